"""Who that may speak reads which thread: in this event loop by count, elsewhere by their rows."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from aguiapp import agents, store
from aguiapp.store import lease, watchers

logger = logging.getLogger("aguiapp.engine")

#: Somebody who left counts a moment longer: polls come and go between two looks at the readers.
LINGER_SECONDS = 0.5
#: A response that is on its way counts so long, until it is read: the host's middleware takes time.
START_SECONDS = 5.0

Spawn = Callable[[Coroutine[Any, Any, None], str], object]
_loops = itertools.count()


class Attendance:
    """The readers of one event loop. Rows are written only where some agent heeds its readers."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        #: A process may have several loops, each of which counts for itself.
        self._name = f"{lease.owner()} {next(_loops)}"
        self._counts: Counter[int] = Counter()
        #: Until when who is not there counts all the same.
        self._lingering: dict[int, float] = {}
        self._changed: set[int] = set()
        self._writing = False
        self._renewed = 0.0

    def expect(self, thread_id: int) -> None:
        """Somebody who may speak is about to read the thread."""
        self._linger(thread_id, START_SECONDS)

    @contextmanager
    def reading(self, thread_id: int) -> Iterator[None]:
        """Somebody who may speak reads the thread."""
        self._lingering.pop(thread_id, None)
        self._counts[thread_id] += 1
        if self._counts[thread_id] == 1:
            self._note(thread_id)
        try:
            yield
        finally:
            self._counts[thread_id] -= 1
            if not self._counts[thread_id]:
                del self._counts[thread_id]
                self._linger(thread_id, LINGER_SECONDS)

    def here(self, thread_id: int) -> bool:
        """Whether somebody reads the thread through this loop, or did just now."""
        if thread_id in self._counts:
            return True
        return self._lingering.get(thread_id, 0.0) > time.monotonic()

    async def read(self, thread_ids: list[int]) -> set[int]:
        """Those of the threads that somebody reads, here or elsewhere."""
        here = {thread_id for thread_id in thread_ids if self.here(thread_id)}
        others = [thread_id for thread_id in thread_ids if thread_id not in here]
        if others:
            here |= await store.call(watchers.watched, others, self._name)
        return here

    def renew(self) -> None:
        """Keep the rows of this loop alive; cheap to call often."""
        if time.monotonic() > self._renewed + watchers.WATCH_SECONDS / 4:
            self._renewed = time.monotonic()
            for thread_id in self._counts:
                self._note(thread_id)

    def _linger(self, thread_id: int, seconds: float) -> None:
        if agents.heed_readers():
            until = time.monotonic() + seconds
            self._lingering[thread_id] = max(self._lingering.get(thread_id, 0.0), until)
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
            while self._changed or self._lingering:
                counts = {t: max(self._counts[t], int(self.here(t))) for t in self._changed}
                self._changed.clear()
                try:
                    if counts:
                        await store.call(watchers.note, self._name, counts)
                except Exception as error:  # the database is away: say it again
                    logger.warning("readers not noted: %s", error)
                    self._changed |= counts.keys()
                    await asyncio.sleep(1)
                await self._see_off()
        finally:
            self._writing = False

    async def _see_off(self) -> None:
        """Wait until the next of those who linger is gone, or something else is to be written."""
        while self._lingering and not self._changed:
            await asyncio.sleep(LINGER_SECONDS / 4)
            now = time.monotonic()
            gone = [thread_id for thread_id, until in self._lingering.items() if until <= now]
            for thread_id in gone:
                del self._lingering[thread_id]
                if thread_id not in self._counts:
                    self._changed.add(thread_id)
