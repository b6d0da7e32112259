"""From the log to its readers: the tail of what was just committed, and the one follower.

The table is the truth. A wake-up carries no event; one that is lost costs a poll interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from channels.layers import InMemoryChannelLayer, get_channel_layer

from aguiapp import conf, protocol, store
from aguiapp.errors import BadCursor, CursorForeign
from aguiapp.models import Run, Thread

logger = logging.getLogger("aguiapp.feed")

TERMINAL_CODES = frozenset(protocol.TYPE_CODES[name] for name in protocol.TERMINAL)


def cursor(epoch: str, position: int) -> str:
    """A place in a thread's history as it goes over the wire."""
    return f"{epoch}-{position}"


def parse_cursor(thread: Thread, text: str) -> int:
    """The position of a cursor of this thread; raises BadCursor or CursorForeign."""
    epoch, _, digits = text.strip().rpartition("-")
    if not epoch or not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise BadCursor(details={"cursor": text[:64]})
    if epoch != thread.epoch:
        raise CursorForeign
    return int(digits)


class Batch:
    """Events that were committed together: `first` is the position of the first of them."""

    def __init__(self, epoch: str, first: int, types: Sequence[int], payloads: list[str]) -> None:
        self.epoch = epoch
        self.first = first
        self.payloads = payloads
        self.types = types

    @property
    def last(self) -> int:
        """The position of the last event."""
        return self.first + len(self.payloads) - 1

    @property
    def ends(self) -> bool:
        """Whether the run's terminal event is the last one here."""
        return self.types[-1] in TERMINAL_CODES

    @cached_property
    def sse(self) -> bytes:
        """The SSE frames of the batch, encoded once for all readers."""
        head = f"id: {self.epoch}-"
        frames = [
            f"{head}{position}\ndata: {payload}\n\n"
            for position, payload in enumerate(self.payloads, self.first)
        ]
        return "".join(frames).encode()

    def behind(self, position: int) -> Batch:
        """The part of the batch behind a position."""
        skip = position + 1 - self.first
        if skip <= 0:
            return self
        return Batch(self.epoch, position + 1, self.types[skip:], self.payloads[skip:])


class Bell:
    """Wakes the followers of one thread; `version` tells a follower what it has seen."""

    def __init__(self) -> None:
        self.version = 0
        self.followers = 0
        self._waiting: set[asyncio.Future[bool]] = set()

    def ring(self) -> None:
        """Wake everybody who waits."""
        self.version += 1
        for waiter in self._waiting:
            _answer(waiter, True)

    async def wait(self, seen: int, patience: float) -> bool:
        """Wait until the bell rang since `seen`; False when `patience` seconds passed instead."""
        if self.version != seen:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(patience, _answer, waiter, False)
        self._waiting.add(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiting.discard(waiter)


def _answer(waiter: asyncio.Future[bool], rang: bool) -> None:
    if not waiter.done():
        waiter.set_result(rang)


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
        return [batch.behind(position) for batch in self.batches if batch.last > position]

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
        self._hints = Hints(self)
        self._poller: asyncio.Task[None] | None = None

    def open_tail(self, thread: Thread, run: Run) -> Tail:
        """The tail of a run that this process drives."""
        tail = self.tails[run.pk] = Tail(self, thread, run)
        self.announce(thread.pk)
        return tail

    def announce(self, thread_id: int) -> None:
        """Something was committed in this thread."""
        if bell := self.bells.get(thread_id):
            bell.ring()
        self._hints.send(thread_id)

    @contextlib.contextmanager
    def listening(self, thread_id: int) -> Any:
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


def group(thread_id: int) -> str:
    """The channel-layer group of a thread."""
    return "aguiapp." + hashlib.sha256(f"thread {thread_id}".encode()).hexdigest()[:32]


class Hints:
    """Wake-ups between processes through the channel layer; losing one is allowed."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._layer: Any = _shared_layer()
        self._channel: str | None = None
        self._threads: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: dict[int, bool] = {}
        self._listener: asyncio.Task[None] | None = None

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def send(self, thread_id: int) -> None:
        """Tell other processes, one message in flight per thread."""
        if self._layer is None:
            return
        if thread_id in self._sending:
            self._sending[thread_id] = True
            return
        self._sending[thread_id] = False
        self._spawn(self._send(thread_id))

    async def _send(self, thread_id: int) -> None:
        try:
            again = True
            while again:
                self._sending[thread_id] = False
                hint = {"type": "aguiapp.hint", "thread": thread_id}
                await self._layer.group_send(group(thread_id), hint)
                again = self._sending[thread_id]
        finally:
            self._sending.pop(thread_id, None)

    def join(self, thread_id: int) -> None:
        """Listen for a thread."""
        if self._layer is not None:
            self._spawn(self._join(thread_id))

    async def _join(self, thread_id: int) -> None:
        if self._channel is None:
            self._channel = await self._layer.new_channel("aguiapp")
            self._listener = self._spawn(self._listen())
        await self._layer.group_add(group(thread_id), self._channel)

    def leave(self, thread_id: int) -> None:
        """Listen no more for a thread."""
        if self._layer is not None and self._channel is not None:
            self._spawn(self._layer.group_discard(group(thread_id), self._channel))

    async def _listen(self) -> None:
        while not self._feed.closing:
            try:
                message = await self._layer.receive(self._channel)
            except (OSError, RuntimeError) as error:
                logger.warning("channel layer: %s; readers poll meanwhile", type(error).__name__)
                await asyncio.sleep(1)
                continue
            if bell := self._feed.bells.get(message.get("thread", 0)):
                bell.ring()


def _shared_layer() -> Any:
    layer = get_channel_layer(conf.get().CHANNEL_LAYER)
    return None if layer is None or isinstance(layer, InMemoryChannelLayer) else layer


async def _quietly(work: Any) -> None:
    """A hint that fails is a hint that is lost."""
    try:
        await work
    except Exception as error:  # whatever the layer raises: the poll covers it
        logger.warning("channel layer: %s", type(error).__name__)


_feeds: WeakKeyDictionary[asyncio.AbstractEventLoop, Feed] = WeakKeyDictionary()


def current() -> Feed:
    """The feed of the running loop."""
    loop = asyncio.get_running_loop()
    found = _feeds.get(loop)
    if found is None:
        found = _feeds[loop] = Feed()
    return found


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
