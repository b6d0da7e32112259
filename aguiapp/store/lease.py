"""Who holds a run: this process by name, and whether another process of this host still lives."""

from __future__ import annotations

import os
import secrets
import socket
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from django.db.models.functions import Now

from aguiapp import conf

_PROC = Path("/proc")
#: Behind an owner's name: it holds the run only to end it.
ENDING = " ending"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@cache
def _boot_id() -> str:
    return _read(_PROC / "sys/kernel/random/boot_id").strip() or "-"


def _process_start(pid: int) -> str:
    """The kernel's start time of the process in ticks: a reused pid has another one.

    One that is dead and not yet buried (state Z or X, proc_pid_stat(5)) has none.
    """
    fields = _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else "-"


@cache
def _owner_of(pid: int) -> str:
    return f"{socket.gethostname()} {pid} {_boot_id()} {_process_start(pid)}"


def owner() -> str:
    """This process as `Run.lease_owner` names it: host, pid, boot id, process start."""
    return _owner_of(os.getpid())


def new_token() -> int:
    """A lease token: who holds it may write."""
    return secrets.randbits(62) + 1


def expiry() -> Any:
    """When a lease that is taken now runs out, by the database's clock."""
    return Now() + timedelta(seconds=conf.get().LEASE_SECONDS)


def is_dead(lease_owner: str) -> bool:
    """Whether that process certainly runs no more; False whenever this host cannot know."""
    host, pid, boot, start = (lease_owner.split(" ") + ["-"] * 4)[:4]
    if host != socket.gethostname() or "-" in (boot, start) or not pid.isdigit():
        return False
    if boot != _boot_id():
        return True
    return _process_start(int(pid)) != start
