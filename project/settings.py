"""Settings of the example product: SQLite and the in-memory layer unless services are given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

BASE_DIR = Path(__file__).resolve().parent.parent
SECRET_KEY = os.environ.get("SECRET_KEY", "only-for-the-example-product-and-its-tests")
DEBUG = os.environ.get("DEBUG", "") == "1"
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1],testserver").split(",")
CSRF_TRUSTED_ORIGINS = [o for o in os.environ.get("TRUSTED_ORIGINS", "").split(",") if o]

INSTALLED_APPS = [
    "daphne",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "aguiapp",
    "project",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "project.middleware.content_security_policy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "project.urls"
ASGI_APPLICATION = "project.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]


def database(url: str) -> dict[str, Any]:
    """The Django settings for ``postgresql://user:password@host:port/name`` or a SQLite path."""
    if url.startswith("postgres"):
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path.lstrip("/"),
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            # A socket's folder stands in the query: postgresql://user@/name?host=/run/postgresql
            "HOST": query.pop("host", None) or unquote(parts.hostname or ""),
            "PORT": query.pop("port", None) or str(parts.port or ""),
            "OPTIONS": query,
        }
    name = Path(url.removeprefix("sqlite:///")) if url else BASE_DIR / "demo.sqlite3"
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(name),
        "TEST": {"NAME": str(name.with_name("test-" + name.name))},
        "OPTIONS": {
            "timeout": 10,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }


DATABASES = {"default": database(os.environ.get("DATABASE_URL", ""))}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

if redis_url := os.environ.get("REDIS_URL"):
    CHANNEL_LAYERS: dict[str, Any] = {
        "default": {
            "BACKEND": "channels_redis.core.RedisChannelLayer",
            "CONFIG": {"hosts": [redis_url]},
        }
    }
else:
    CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}

LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "home"
LOGOUT_REDIRECT_URL = "home"
STATIC_URL = "static/"
STATIC_ROOT = BASE_DIR / "staticfiles"
#: Let the ASGI application serve static files itself: for the demo, not for production.
SERVE_STATIC = DEBUG or os.environ.get("SERVE_STATIC", "") == "1"
USE_TZ = True
TIME_ZONE = "UTC"

AGUIAPP: dict[str, Any] = {}
#: Adds the `scripted` agent, which plays what a request says: for demos and tests, never live.
SCRIPTED_AGENT = os.environ.get("SCRIPTED_AGENT", "") == "1"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {
        "not_http2": {  # Daphne's advice at every start
            "()": "django.utils.log.CallbackFilter",
            "callback": lambda record: "HTTP/2" not in record.getMessage(),
        }
    },
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"daphne.server": {"filters": ["not_http2"]}},
    "root": {"handlers": ["console"], "level": "INFO"},
}
