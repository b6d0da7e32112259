"""The wall clock, in one place so that tests can hold it."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Milliseconds since 1970 (UTC), as events carry them."""
    return time.time_ns() // 1_000_000
