"""The app's configuration: system checks and the discovery of agents."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class AguiappConfig(AppConfig):
    """AG-UI runs, stored and streamed."""

    name = "aguiapp"
    label = "aguiapp"
    verbose_name = _("AG-UI")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from aguiapp import (
            access,
            checks,  # noqa: F401  (registers itself)
            conf,
        )
        from aguiapp.engine import turns

        turns.permits = access.still_has
        autodiscover_modules(conf.get().AGENTS_MODULE)
