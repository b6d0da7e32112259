"""The same project served by Django alone, without `aguiapp.asgi`."""

from __future__ import annotations

from django.core.asgi import get_asgi_application

application = get_asgi_application()
