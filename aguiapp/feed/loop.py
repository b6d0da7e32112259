"""All tails and followers of one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from aguiapp import conf, store
from aguiapp.feed.batches import Batch
from aguiapp.feed.bell import Bell
from aguiapp.feed.hints import Hints
from aguiapp.models import Run, Thread

logger = logging.getLogger("aguiapp.feed")


class Tail:
    """What a run of this process committed last, held for its readers within a byte limit."""

    def __init__(self, feed: Feed, thread: Thread, run: Run) -> None:
        self._feed = feed
        self.thread_id = thread.pk
        self.run_id = run.pk
        self.epoch = thread.epoch
        self.offset = run.offset or 0
        self.batches: deque[Batch] = deque()
        self.bytes = 0

    def publish(self, rows: Sequence[store.Row]) -> None:
        """Hand committed rows to local followers and let other processes know."""
        payloads = [row.payload for row in rows]
        batch = Batch(self.epoch, self.offset + rows[0].seq, [row.type for row in rows], payloads)
        self.batches.append(batch)
        self.bytes += sum(map(len, payloads))
        limit = conf.get().TAIL_BYTES
        while self.bytes > limit and len(self.batches) > 1:
            self.bytes -= sum(map(len, self.batches.popleft().payloads))
        self._feed.announce(self.thread_id)

    def behind(self, position: int) -> list[Batch] | None:
        """The batches behind a position; None when the tail does not reach back that far."""
        if not self.batches:
            return [] if position == self.offset else None
        if self.batches[0].first > position + 1:
            return None
        # From the end: a reader that is up to date must not pay for how long the tail is.
        found = []
        for batch in reversed(self.batches):
            if batch.last <= position:
                break
            found.append(batch.behind(position))
        found.reverse()
        return found

    def close(self) -> None:
        """The run ended or was lost: followers read on from the table."""
        self._feed.tails.pop(self.run_id, None)
        self._feed.announce(self.thread_id)


class Feed:
    """All tails and followers of one event loop."""

    def __init__(self) -> None:
        self.tails: dict[int, Tail] = {}
        self.bells: dict[int, Bell] = {}
        self.closing = False
        #: Connections that still have something to send; a stopping server waits for them.
        self.outlets: set[object] = set()
        self._hints = Hints(self._ring)
        self._poller: asyncio.Task[None] | None = None

    def open_tail(self, thread: Thread, run: Run) -> Tail:
        """The tail of a run that this process drives."""
        tail = self.tails[run.pk] = Tail(self, thread, run)
        self.announce(thread.pk)
        return tail

    def announce(self, thread_id: int) -> None:
        """Something was committed in this thread."""
        self._ring(thread_id)
        self._hints.send(thread_id)

    def _ring(self, thread_id: int) -> None:
        if bell := self.bells.get(thread_id):
            bell.ring()

    @contextlib.contextmanager
    def listening(self, thread_id: int) -> Iterator[Bell]:
        """The thread's bell for as long as somebody follows it."""
        bell = self.bells.setdefault(thread_id, Bell())
        bell.followers += 1
        if bell.followers == 1:
            self._hints.join(thread_id)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll())
        try:
            yield bell
        finally:
            bell.followers -= 1
            if not bell.followers:
                del self.bells[thread_id]
                self._hints.leave(thread_id)

    async def _poll(self) -> None:
        """Look at the table for all followed threads together: hints from elsewhere may be lost.

        A thread seen for the first time is rung once, so that nothing can fall between a
        follower's first read and the first look.
        """
        seen: dict[int, store.Mark | None] = {}
        while self.bells and not self.closing:
            await asyncio.sleep(conf.get().POLL_SECONDS)
            try:
                marks = await store.call(store.marks, list(self.bells))
            except Exception as error:  # the database is away; the next look may find it
                logger.warning("the log could not be polled: %s", error)
                continue
            for thread_id, bell in self.bells.items():
                if thread_id not in seen or seen[thread_id] != marks.get(thread_id):
                    bell.ring()
            seen = {thread_id: marks.get(thread_id) for thread_id in self.bells}

    def close(self) -> None:
        """End every follower of this loop: the server stops."""
        self.closing = True
        for bell in self.bells.values():
            bell.ring()

    async def flushed(self, patience: float) -> None:
        """Wait until the readers have sent their last, at most `patience` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while (self.bells or self.outlets) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # what was handed to the transports goes out in the loop's turns


_feeds: WeakKeyDictionary[asyncio.AbstractEventLoop, Feed] = WeakKeyDictionary()


def current() -> Feed:
    """The feed of the running loop."""
    loop = asyncio.get_running_loop()
    found = _feeds.get(loop)
    if found is None:
        found = _feeds[loop] = Feed()
    return found
