"""How long a run may take, may be silent, and may go unread."""

from __future__ import annotations

import time

from aguiapp import conf

#: A reader who comes back within this many seconds never left: a socket changes, a page moves on.
SETTLE_SECONDS = 0.5
#: Answers that are read as they are written; a run that nobody was to read is never deserted.
READ_MODES = frozenset({"sse", "proto", "json", "ws"})


class Patience:
    """The clocks of one run, in monotonic seconds; read by other threads too."""

    def __init__(self, settings: conf.Settings, *, mode: str) -> None:
        self._began = self._heard = self._read = time.monotonic()
        self._total = settings.RUN_SECONDS
        self._idle = settings.IDLE_SECONDS
        grace = {"continue": None, "cancel": 0.0}
        policy = settings.DISCONNECT if mode in READ_MODES else "continue"
        self._grace = grace[policy] if isinstance(policy, str) else float(policy)

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def heeds_readers(self) -> bool:
        """Whether the run ends when its readers leave."""
        return self._grace is not None

    def heard(self) -> None:
        """The agent sent an event, of whatever kind."""
        self._heard = time.monotonic()

    def remaining(self) -> float | None:
        """Seconds until the next limit could pass; None when there is none."""
        ends = [self._began + self._total] if self._total else []
        ends += [self._heard + self._idle] if self._idle else []
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def overdue(self, late: float = 0.0) -> str:
        """The code of the limit that passed at least `late` seconds ago; "" when none did."""
        now = time.monotonic() - late
        if self._total and now > self._began + self._total:
            return "run_timeout"
        if self._idle and now > self._heard + self._idle:
            return "idle_timeout"
        return ""

    def deserted(self, *, is_read: bool) -> bool:
        """Whether everybody who may speak has been gone for too long; asked every moment."""
        if is_read:
            self._read = time.monotonic()
        if self._grace is None:
            return False
        return time.monotonic() > self._read + max(self._grace, SETTLE_SECONDS)
