"""The body of a stream: one generator of bytes for every server that carries it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.http import HttpResponse, StreamingHttpResponse

from aguiapp import conf, feed, protocol
from aguiapp.errors import AguiError, StreamAborted, StreamRefused
from aguiapp.protocol.restate import run_started

logger = logging.getLogger("aguiapp.stream")

HEADERS = {
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
    # GZipMiddleware of Django 5.2 compresses each chunk for itself, which no reader understands.
    "Content-Encoding": "identity",
}


class Framing(NamedTuple):
    """How events become the bytes of a body.

    `opening` and `keep_alive` are bytes that no reader takes for an event, where there are any;
    `mark` says that the stream ended in order and where to resume it, where that can be said.
    """

    content_type: str
    opening: bytes
    keep_alive: bytes
    frames: Callable[[feed.Batch], bytes]
    frame: Callable[[dict[str, Any]], bytes]
    mark: Callable[[str], bytes] | None


SSE = Framing(
    "text/event-stream; charset=utf-8",
    b": aguiapp\n\n",
    b": keep-alive\n\n",
    lambda batch: batch.sse,
    protocol.encode_sse,
    lambda cursor: f": aguiapp.resume {cursor}\n\n".encode(),
)
#: Without parameters: the official client compares the whole header. It takes an empty frame for
#: a bad one, so there is nothing to keep an idle connection alive with.
PROTO = Framing(
    protocol.PROTO, b"", b"", lambda batch: batch.proto, protocol.encode_proto_frame, None
)
FRAMINGS = {"sse": SSE, "proto": PROTO}

#: Why somebody may not read on; None while they may.
Recheck = Callable[[], Awaitable[AguiError | None]]


class EventStream(StreamingHttpResponse):
    """A response that streams; `source` yields its bytes to whoever serves it."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        content_type: str,
    ) -> None:
        super().__init__(source, content_type=content_type, headers={**HEADERS, **headers})
        self.source = source


class Body(NamedTuple):
    """What a page answers, and whether that is anything."""

    text: str
    headers: dict[str, str]
    found: bool


class Later(HttpResponse):
    """A response whose body may have to be waited for.

    `finish` is called by whoever serves it, once the host's middleware is through: a long poll
    then holds neither its thread nor its connection.
    """

    def __init__(
        self, page: Callable[[], Awaitable[Body]], wait: Callable[[], Awaitable[None]] | None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        self._page = page
        self._wait = wait

    async def finish(self) -> None:
        """Fill in the body: at once when there is one, else after the wait."""
        body = await self._page()
        if not body.found and self._wait is not None:
            await self._wait()
            body = await self._page()
        self.content = body.text.encode()
        for name, value in body.headers.items():
            self[name] = value
        if self.has_header("Content-Length"):
            self["Content-Length"] = str(len(self.content))


class Unlogged(NamedTuple):
    """Events for one reader alone, ahead of the log; they have no place in it."""

    events: Sequence[dict[str, Any]]


Prelude = Callable[[], Awaitable[Sequence[dict[str, Any]]]]
Presence = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One reader's way through a thread, whatever carries it.

    `unlogged` comes first: known already, or a function that tells it once the run's turn has
    come. `presence` says that somebody reads who may keep a run alive by it. Who `resumes` may be
    ended in order before the run is, on a stream whose end can be marked.
    """

    follower: feed.Follower
    recheck: Recheck
    unlogged: Sequence[dict[str, Any]] | Prelude = ()
    presence: Presence = nullcontext
    resumes: bool = False

    async def items(self) -> AsyncGenerator[feed.Batch | Unlogged | None, None]:
        """Unlogged events, then batches as they are committed; None now and then without any.

        Whatever goes wrong on the way is an abort: the reader comes back with its cursor.
        """
        try:
            with self.presence():
                async with aclosing(self._items()) as items:
                    async for item in items:
                        yield item
        except StreamAborted:
            raise
        except Exception as error:
            logger.exception("stream aborted")
            raise StreamAborted from error

    async def _items(self) -> AsyncGenerator[feed.Batch | Unlogged | None, None]:
        known: Sequence[dict[str, Any]] | None = None
        if not callable(self.unlogged):
            known = self.unlogged
            if known:
                yield Unlogged(known)
        async with aclosing(self._batches()) as batches:
            async for batch in batches:
                if batch is not None and callable(self.unlogged) and known is None:
                    known = await self.unlogged()
                    if known:
                        yield Unlogged(known)
                yield batch
        if self.follower.withdrawn:
            yield Unlogged(_withdrawn(self.follower))

    async def _batches(self) -> AsyncGenerator[feed.Batch | None, None]:
        """The follower's batches for as long as the reader may see the thread, or has time."""
        loop = asyncio.get_running_loop()
        settings = conf.get()
        period = settings.HEARTBEAT_SECONDS
        due, close = loop.time() + period, float("inf")
        if self.resumes and settings.STREAM_SECONDS:
            close = loop.time() + settings.STREAM_SECONDS
            period = min(period, settings.STREAM_SECONDS)
        async with aclosing(self.follower.batches(period)) as batches:
            async for batch in batches:
                if loop.time() >= due:
                    if (refusal := await self.recheck()) is not None:
                        raise StreamRefused(refusal)
                    due = loop.time() + settings.HEARTBEAT_SECONDS
                yield batch
                if loop.time() >= close:
                    return


def _withdrawn(follower: feed.Follower) -> list[dict[str, Any]]:
    """A run that was cancelled before its turn came, as clients understand it."""
    assert follower.run is not None  # noqa: S101
    ids = {"threadId": follower.thread.thread_id, "runId": follower.run.run_id}
    finished = {"type": "RUN_FINISHED", **ids, "outcome": {"type": "cancelled"}}
    return [run_started(ids), finished]


async def framed(framing: Framing, reading: Reading) -> AsyncGenerator[bytes, None]:
    """A reader's events, one per frame: the unlogged ones without id, then the log.

    An end before the run's terminal is an abort, because a stock client takes a clean end for
    success; readers that declared that they resume get a marked, clean end.
    """
    yield framing.opening  # also when empty: it sends the headers ahead of the agent
    async with aclosing(reading.items()) as items:
        async for item in items:
            if isinstance(item, Unlogged):
                yield b"".join(map(framing.frame, item.events))
            elif item is not None:
                yield framing.frames(item)
            elif framing.keep_alive:
                yield framing.keep_alive
    if reading.follower.finished:
        return
    if not reading.resumes or framing.mark is None:
        raise StreamAborted
    yield framing.mark(reading.follower.cursor)


async def document(reading: Reading) -> AsyncGenerator[bytes, None]:
    """One JSON document of a run, `{"events": [...]}`, written as the run goes.

    Streamed so that a request that waits for a long run holds no thread and no connection; an
    idle one gets white space, which JSON allows between values.
    """
    yield b"{"
    before = '"events":['
    async with aclosing(reading.items()) as items:
        async for item in items:
            if item is None:
                yield b" "
                continue
            payloads: Iterable[str]
            if isinstance(item, Unlogged):
                before = f'"unlogged":{len(item.events)},{before}'
                payloads = map(protocol.dumps, item.events)
            else:
                payloads = item.payloads
            yield (before + ",".join(payloads)).encode()
            before = ","
    if not reading.follower.finished:
        raise StreamAborted
    yield b"]}" if before == "," else f"{before}]}}".encode()
