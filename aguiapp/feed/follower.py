"""The one source of all readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from aguiapp import conf, store
from aguiapp.feed.batches import Batch, cursor
from aguiapp.feed.bell import Bell
from aguiapp.feed.loop import Feed, current
from aguiapp.models import Run, Thread

#: Who waits for a turn looks at its row no more often, however busy the thread is.
LOOK_SECONDS = 0.25


class Pruned(Exception):
    """Events were pruned that this reader has not had yet: it must come back with its cursor."""


class Follower:
    """Every event of a thread behind a position, in order, live: the one source of all readers.

    With `run` it covers that run alone and ends with its terminal event (`finished`). It never
    leaves a run before it delivered that run's terminal event. What was pruned is left out only
    before its first event, and `strict` ones not even there.
    """

    def __init__(
        self, thread: Thread, after: int, run: Run | None = None, *, strict: bool = False
    ) -> None:
        self.thread = thread
        self._only = run
        self._after = after
        self._current: int | None = None
        self._offset = 0
        self._began = strict
        self.position = after
        self.finished = False
        if run is not None:
            self._place(run)

    @classmethod
    def at_end(cls, thread: Thread, position: int) -> Follower:
        """A follower with nothing left to follow."""
        follower = cls(thread, position)
        follower.finished = True
        return follower

    def _place(self, run: Run) -> None:
        """Begin with the run this follower is for, once it has its place; one in a queue has none."""
        self._only = run
        if run.offset is not None:
            self._current, self._offset = run.pk, run.offset
            self.position = max(self._after, run.offset + run.pruned_to)
        self.finished = run.ended and self.position >= self._offset + run.last_seq

    @property
    def run(self) -> Run | None:
        """The run that this follower is limited to."""
        return self._only

    @property
    def waits(self) -> bool:
        """Whether the run is still in its thread's queue."""
        return self._only is not None and self._only.offset is None and not self.finished

    @property
    def withdrawn(self) -> bool:
        """Whether the run was cancelled before its turn came: it has no event."""
        return self._only is not None and self._only.offset is None and self.finished

    @property
    def cursor(self) -> str:
        """Where this follower stands, as it goes over the wire."""
        return cursor(self.thread.epoch, self.position)

    async def batches(self, idle: float) -> AsyncGenerator[Batch | None, None]:
        """Batches as they are committed; None after every `idle` seconds without any."""
        feed = current()
        loop = asyncio.get_running_loop()
        quiet_since = loop.time()
        with feed.listening(self.thread.pk) as bell:
            while not self.finished:
                seen = bell.version
                batches = await self._next(feed)
                for batch in batches:
                    self._advance(batch)
                    quiet_since = loop.time()
                    yield batch
                if batches or (bell.version != seen and not self.waits):
                    continue
                if feed.closing or self._is_over():
                    return
                await self._rest(feed, bell, seen, quiet_since + idle)
                if loop.time() >= quiet_since + idle:
                    quiet_since = loop.time()
                    yield None

    async def _rest(self, feed: Feed, bell: Bell, seen: int, until: float) -> None:
        """Wait for a reason to look again, at most until then (in the loop's time)."""
        patience = max(0.0, until - asyncio.get_running_loop().time())
        if self._only is None or not self.waits:
            await bell.wait(seen, patience)
            return
        # The bell rings for every commit of the runs before this one, but not when it is withdrawn
        # in another process.
        rang = await bell.wait(seen, min(patience, conf.get().POLL_SECONDS))
        if rang and self._only.pk not in feed.tails:
            await asyncio.sleep(LOOK_SECONDS)

    def _is_over(self) -> bool:
        return self.finished

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
        self._began = True
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
        if self._current is None and not await self._find():
            return []
        assert self._current is not None  # noqa: S101
        after = self.position - self._offset
        rows = await store.call(store.deliverable, self._current, self._offset, after, limit)
        if not rows:
            moved = await self._check_end(self._current)
            return await self._stored(limit) if moved and not self.finished else []
        self._keep(self._offset + rows[0].seq - 1)
        types = [row.type for row in rows]
        return [
            Batch(
                self.thread.epoch,
                self._offset + rows[0].seq,
                types,
                [row.payload for row in rows],
            )
        ]

    async def _check_end(self, run_id: int) -> bool:
        """Whether no event will come where none is: the run was pruned meanwhile."""
        run = await store.call(store.refresh_by_id, run_id)
        pruned_to = self._offset + run.pruned_to
        if pruned_to <= self.position:
            return False
        self._keep(pruned_to)
        if run.ended and self.position >= self._offset + run.last_seq:
            self.finished = self._only is not None
            self._current = None
        return True

    async def _find(self) -> bool:
        """The run to read from now on; False while there is none."""
        if self._only is not None:
            self._place(await store.call(store.refresh, self._only))
        else:
            kept, run = await store.call(store.next_kept, self.thread.pk, self.position)
            self._keep(kept)
            if run is not None:
                self._current, self._offset = run.pk, run.offset or 0
        return self._current is not None

    def _keep(self, position: int) -> None:
        """Go on from there. Only who has read nothing yet may begin behind what was pruned."""
        if position != self.position and self._began:
            raise Pruned
        self.position = position
        self._began = True
