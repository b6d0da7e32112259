"""Who holds a run: this process by name, and whether another process of this host still lives."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

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
    """The kernel's start time of the process in ticks: a reused pid has another one."""
    fields = _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else "-"


@cache
def _owner_of(pid: int) -> str:
    return f"{socket.gethostname()} {pid} {_boot_id()} {_process_start(pid)}"


def owner() -> str:
    """This process as `Run.lease_owner` names it: host, pid, boot id, process start."""
    return _owner_of(os.getpid())


def is_dead(lease_owner: str) -> bool:
    """Whether that process certainly runs no more; False whenever this host cannot know."""
    host, pid, boot, start = (lease_owner.split(" ") + ["-"] * 4)[:4]
    if host != socket.gethostname() or "-" in (boot, start) or not pid.isdigit():
        return False
    if boot != _boot_id():
        return True
    return _process_start(int(pid)) != start
