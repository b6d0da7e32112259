"""The ASGI entry point: Daphne and uvicorn serve `project.asgi:application`."""

from __future__ import annotations

import os
from typing import Any

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
django_application = get_asgi_application()

# After Django's set-up: both need its settings and apps.
from django.conf import settings  # noqa: E402
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler  # noqa: E402

from aguiapp.asgi import mount  # noqa: E402

application: Any = mount(django_application)
if settings.SERVE_STATIC:
    application = ASGIStaticFilesHandler(application)
