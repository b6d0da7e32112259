"""The example's settings for server processes of the tests; `LIVE_SETTINGS` (JSON) overrides."""

from __future__ import annotations

import json
import os

from project.settings import *  # noqa: F403
from project.settings import INSTALLED_APPS, MIDDLEWARE

ROOT_URLCONF = "tests.live.urls"
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = [*INSTALLED_APPS, "tests.live"]
globals().update(json.loads(os.environ.get("LIVE_SETTINGS", "{}")))
if os.environ.get("LIVE_HOST_MIDDLEWARE") == "1":
    MIDDLEWARE = [
        "django.middleware.gzip.GZipMiddleware",
        "tests.live.middleware.host",
        *MIDDLEWARE,
    ]
