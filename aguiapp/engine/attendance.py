"""Who that may speak reads which thread: in this process by count, in others by their rows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from aguiapp import agents, store
from aguiapp.store import watchers

logger = logging.getLogger("aguiapp.engine")

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class Attendance:
    """The readers of one event loop. Rows are written only where some agent heeds its readers."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._counts: Counter[int] = Counter()
        self._changed: set[int] = set()
        self._writing = False
        self._renewed = 0.0

    @contextmanager
    def reading(self, thread_id: int) -> Iterator[None]:
        """Somebody who may speak reads the thread."""
        self._counts[thread_id] += 1
        if self._counts[thread_id] == 1:
            self._note(thread_id)
        try:
            yield
        finally:
            self._counts[thread_id] -= 1
            if not self._counts[thread_id]:
                del self._counts[thread_id]
                self._note(thread_id)

    def here(self, thread_id: int) -> bool:
        """Whether somebody reads the thread through this process."""
        return thread_id in self._counts

    async def read(self, thread_ids: list[int]) -> set[int]:
        """Those of the threads that somebody reads, here or elsewhere."""
        here = {thread_id for thread_id in thread_ids if self.here(thread_id)}
        others = [thread_id for thread_id in thread_ids if thread_id not in here]
        return here | (await store.call(watchers.watched, others) if others else set())

    def renew(self) -> None:
        """Keep the rows of this process alive; cheap to call often."""
        if time.monotonic() > self._renewed + watchers.WATCH_SECONDS / 4:
            self._renewed = time.monotonic()
            for thread_id in self._counts:
                self._note(thread_id)

    def _note(self, thread_id: int) -> None:
        if not agents.heed_readers():
            return
        self._changed.add(thread_id)
        if not self._writing:
            self._writing = True
            self._spawn(self._write(), "aguiapp watchers")

    async def _write(self) -> None:
        try:
            while self._changed:
                counts = {thread_id: self._counts[thread_id] for thread_id in self._changed}
                self._changed.clear()
                try:
                    await store.call(watchers.note, counts)
                except Exception as error:  # the database is away: say it again
                    logger.warning("readers not noted: %s", error)
                    self._changed |= counts.keys()
                    await asyncio.sleep(1)
        finally:
            self._writing = False
