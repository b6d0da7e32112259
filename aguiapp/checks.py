"""System checks: a wrong configuration is found by `manage.py check`, not by a visitor."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections, router

from aguiapp import agents, conf
from aguiapp.models import RunEvent


@register(Tags.compatibility)
def check_settings(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """AGUIAPP holds known keys with usable values."""
    given = getattr(settings, "AGUIAPP", {})
    if not isinstance(given, dict):
        return [Error("AGUIAPP must be a dict.", id="aguiapp.E001")]
    return [*_unknown_keys(given), *_wrong_values(given), *_beyond(given), *_broken_imports()]


def _unknown_keys(given: dict[str, Any]) -> Iterator[CheckMessage]:
    known = sorted(field.name for field in fields(conf.Settings))
    for key in sorted(set(given) - set(known)):
        yield Error(
            f"AGUIAPP has no setting {key!r}.",
            hint=f"Known are: {', '.join(known)}.",
            id="aguiapp.E001",
        )


def _wrong_values(given: dict[str, Any]) -> Iterator[CheckMessage]:
    defaults = {field.name: field.default for field in fields(conf.Settings)}
    for key, value in given.items():
        default = defaults.get(key)
        if default is None:
            continue
        if key == "DISCONNECT":
            if not conf.is_disconnect(value):
                yield Error(
                    f"AGUIAPP['DISCONNECT'] is {value!r}; choose one of"
                    f" {', '.join(conf.DISCONNECTS)}, or a number of seconds.",
                    id="aguiapp.E002",
                )
            continue
        wanted = (int, float) if isinstance(default, float) else type(default)
        wrong = not isinstance(value, wanted) or isinstance(value, bool) != isinstance(
            default, bool
        )
        if wrong or (isinstance(value, int | float) and value < 0):
            yield Error(
                f"AGUIAPP[{key!r}] is {value!r}; it must be like the default {default!r}.",
                id="aguiapp.E002",
            )
        elif key in conf.CHOICES and value not in conf.CHOICES[key]:
            yield Error(
                f"AGUIAPP[{key!r}] is {value!r}; choose one of {', '.join(conf.CHOICES[key])}.",
                id="aguiapp.E002",
            )


def _beyond(given: dict[str, Any]) -> Iterator[CheckMessage]:
    for key, most in conf.MOST.items():
        value = given.get(key, 0)
        if isinstance(value, int | float) and value > most:
            yield Error(f"AGUIAPP[{key!r}] is {value!r}; the most is {most}.", id="aguiapp.E002")


def _broken_imports() -> Iterator[CheckMessage]:
    for key in ("AUTHENTICATE", "POLICY"):
        try:
            conf.imported(key)
        except (ImportError, ValueError) as error:
            yield Error(f"AGUIAPP[{key!r}] cannot be imported: {error}", id="aguiapp.E003")


@register(Tags.compatibility)
def check_agents(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """There are agents, and each can be called with one argument."""
    found: list[CheckMessage] = []
    if not agents.names():
        module = conf.get().AGENTS_MODULE
        places = ", ".join(f"{app.name}.{module}" for app in apps.get_app_configs())
        found.append(
            Warning(
                "No agent is registered: every post to one is answered with 404.",
                hint=f"Looked for {places}. An app that has agents must be in INSTALLED_APPS.",
                id="aguiapp.W003",
            )
        )
    for name in agents.names():
        target = agents.get(name).target
        function = (
            target.run if hasattr(target, "run") and not inspect.isroutine(target) else target
        )
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            found.append(Error(f"The agent {name!r} cannot be called.", id="aguiapp.E004"))
            continue
        taken = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        wanted = 2 if inspect.isclass(target) else 1
        if len(taken) != wanted and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            found.append(
                Error(
                    f"The agent {name!r} must take one argument: the run, or its input.",
                    id="aguiapp.E004",
                )
            )
    return found


@register(Tags.database)
def check_database(
    app_configs: Sequence[AppConfig] | None = None,
    databases: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[CheckMessage]:
    """The log's database is one that was measured; SQLite runs in WAL mode."""
    alias = router.db_for_write(RunEvent)
    if databases is None or alias not in databases:
        return []
    connection = connections[alias]
    if connection.vendor == "postgresql":
        return []
    if connection.vendor != "sqlite":
        return [
            Error(
                f"aguiapp keeps its log on PostgreSQL or SQLite, not on {connection.vendor}.",
                id="aguiapp.E005",
            )
        ]
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        mode = cursor.fetchone()[0]
    if mode in ("wal", "memory"):
        return []
    return [
        Warning(
            f"SQLite is in journal mode {mode!r}: a busy stream would stop the host's writes.",
            hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE", "init_command": '
            '"PRAGMA journal_mode=WAL;"} for this database.',
            id="aguiapp.W001",
        )
    ]


@register(Tags.database)
def check_one_database(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Threads and runs name users by foreign keys, which do not cross databases."""
    log, users = router.db_for_write(RunEvent), router.db_for_write(get_user_model())
    if log == users:
        return []
    return [
        Error(
            f"aguiapp writes to the database {log!r}, users are in {users!r}.",
            hint="Route the app aguiapp to the database of the user model.",
            id="aguiapp.E006",
        )
    ]


@register(Tags.compatibility, deploy=True)
def check_layer(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Several processes need a shared channel layer, or readers wait for the poll."""
    name = conf.get().CHANNEL_LAYER
    layers = getattr(settings, "CHANNEL_LAYERS", {})
    backend = layers.get(name, {}).get("BACKEND", "")
    if settings.DEBUG or (backend and not backend.endswith("InMemoryChannelLayer")):
        return []
    if connections[router.db_for_write(RunEvent)].vendor != "postgresql":
        return []
    return [
        Warning(
            f"The channel layer {name!r} is missing or in memory: readers in other processes poll.",
            hint="Use channels_redis where more than one process serves the site.",
            id="aguiapp.W002",
        )
    ]
