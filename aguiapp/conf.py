"""The `AGUIAPP` settings dict, read once and typed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from aguiapp import protocol

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every key of `AGUIAPP` with its default; sizes in bytes, times in seconds."""

    AGENTS_MODULE: str = "agents"
    AUTHENTICATE: str = "aguiapp.access.bearer_user"
    POLICY: str = "aguiapp.access.Policy"
    ANONYMOUS: bool = False
    TOKEN_SECONDS: int = 7 * 24 * 3600

    STATE: str = "merge"
    SYSTEM_MESSAGES: bool = True
    LEGACY_ECHO: bool = False

    BUSY: str = "reject"
    DISCONNECT: str | float = "continue"

    WRITER: str = "group"
    CHANNEL_LAYER: str = "default"
    AGENT_THREADS: int = 8
    UNCOMMITTED_BYTES: int = MIB
    TAIL_BYTES: int = MIB

    INPUT_BYTES: int = 8 * MIB
    EVENT_BYTES: int = 8 * MIB
    STATE_BYTES: int = 8 * MIB
    RUN_EVENTS: int = 1_000_000
    RUN_BYTES: int = 512 * MIB
    RUN_SECONDS: float = 3600.0
    IDLE_SECONDS: float = 600.0
    QUEUE_RUNS: int = 20
    JSON_DEPTH: int = 100
    PAGE_EVENTS: int = 1000

    LEASE_SECONDS: float = 15.0
    SWEEP_SECONDS: float = 4.0
    COMMAND_SECONDS: float = 0.4
    CANCEL_SECONDS: float = 0.45
    POLL_SECONDS: float = 1.0
    HEARTBEAT_SECONDS: float = 15.0
    STALL_SECONDS: float = 60.0
    STREAM_SECONDS: float = 0.0
    DRAIN_SECONDS: float = 3.0


#: Events are built around what inputs and agents hold, so those may nest this much less.
MOST = {"JSON_DEPTH": protocol.MAX_DEPTH - 8}
CHOICES = {
    "STATE": ("merge", "client", "thread"),
    "WRITER": ("group", "inline"),
    "BUSY": ("reject", "enqueue", "interrupt"),
}
#: What becomes of a run whose readers left; or a number: the seconds it waits for one.
DISCONNECTS = ("continue", "cancel")


def is_disconnect(value: Any) -> bool:
    """Whether the value says what becomes of a run that nobody reads any more."""
    return value in DISCONNECTS if isinstance(value, str) else is_amount(value)


def is_amount(value: Any) -> bool:
    """Whether the value is a number from 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


@cache
def get() -> Settings:
    """The settings in force; unknown keys are left to the system check."""
    given: dict[str, Any] = getattr(django_settings, "AGUIAPP", {})
    known = {field.name for field in fields(Settings)}
    return Settings(**{key: value for key, value in given.items() if key in known})


@cache
def imported(key: str) -> Any:
    """The object that a dotted-path setting names."""
    return import_string(getattr(get(), key))


def _reset(*, setting: str, **_: Any) -> None:
    if setting == "AGUIAPP":
        get.cache_clear()
        imported.cache_clear()


setting_changed.connect(_reset, dispatch_uid="aguiapp.conf")
