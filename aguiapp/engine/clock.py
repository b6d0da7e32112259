"""The wall clock, in one place so that tests can hold it."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now_ms() -> int:
    """Milliseconds since 1970 (UTC), as events carry them."""
    return time.time_ns() // 1_000_000


def moment(milliseconds: int) -> datetime:
    """The time that many milliseconds after 1970, as rows carry it."""
    return datetime.fromtimestamp(milliseconds / 1000, tz=UTC)
