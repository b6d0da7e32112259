"""The one source of all readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from aguiapp import conf, store
from aguiapp.feed.batches import Batch, cursor
from aguiapp.feed.loop import Feed, current
from aguiapp.models import Run, Thread


class Follower:
    """Every event of a thread behind a position, in order, live: the one source of all readers.

    With `run` it covers that run alone and ends with its terminal event (`finished`). It never
    leaves a run before it delivered that run's terminal event.
    """

    def __init__(self, thread: Thread, after: int, run: Run | None = None) -> None:
        self._thread = thread
        self._only = run
        self._current: int | None = run.pk if run else None
        self._offset = (run.offset or 0) if run else 0
        self.position = max(after, self._offset)
        self.finished = run is not None and run.ended and after >= self._offset + run.last_seq

    @property
    def cursor(self) -> str:
        """Where this follower stands, as it goes over the wire."""
        return cursor(self._thread.epoch, self.position)

    async def batches(self, idle: float) -> AsyncGenerator[Batch | None, None]:
        """Batches as they are committed; None after every `idle` seconds without any."""
        feed = current()
        loop = asyncio.get_running_loop()
        quiet_since = loop.time()
        with feed.listening(self._thread.pk) as bell:
            while not self.finished:
                seen = bell.version
                batches = await self._next(feed)
                for batch in batches:
                    self._advance(batch)
                    quiet_since = loop.time()
                    yield batch
                if batches or bell.version != seen:
                    continue
                if feed.closing:
                    return
                if not await bell.wait(seen, max(0.0, quiet_since + idle - loop.time())):
                    quiet_since = loop.time()
                    yield None

    async def read(self, limit: int) -> list[Batch]:
        """What is stored behind the position now, up to `limit` events."""
        found: list[Batch] = []
        count = 0
        while count < limit and not self.finished:
            batches = await self._stored(limit - count)
            if not batches:
                break
            for batch in batches:
                self._advance(batch)
                count += len(batch.payloads)
            found += batches
        return found

    def _advance(self, batch: Batch) -> None:
        self.position = batch.last
        if batch.ends:
            self.finished = self._only is not None
            self._current = None

    async def _next(self, feed: Feed) -> Sequence[Batch]:
        tail = feed.tails.get(self._current) if self._current is not None else None
        if tail is not None and (batches := tail.behind(self.position)) is not None:
            return batches
        return await self._stored(conf.get().PAGE_EVENTS)

    async def _stored(self, limit: int) -> list[Batch]:
        if self._current is None:
            only = self._only.pk if self._only else None
            run = await store.call(store.run_at, self._thread.pk, self.position, only)
            if run is None:
                return []
            self._current, self._offset = run.pk, run.offset or 0
        after = self.position - self._offset
        rows = await store.call(store.deliverable, self._current, self._offset, after, limit)
        if not rows:
            return []
        types = [row.type for row in rows]
        return [
            Batch(
                self._thread.epoch,
                self._offset + rows[0].seq,
                types,
                [row.payload for row in rows],
            )
        ]
