"""The body of a stream: one generator of bytes for every server that carries it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from django.http import HttpResponse, StreamingHttpResponse

from aguiapp import conf, feed, protocol
from aguiapp.errors import StreamAborted

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

Recheck = Callable[[], Awaitable[bool]]


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


async def _demand(recheck: Recheck) -> None:
    if not await recheck():
        raise StreamAborted


async def guarded(
    follower: feed.Follower, recheck: Recheck
) -> AsyncGenerator[feed.Batch | None, None]:
    """The follower's batches for as long as the reader may see the thread.

    Whatever goes wrong on the way is an abort: the reader comes back with its cursor.
    """
    loop = asyncio.get_running_loop()
    period = conf.get().HEARTBEAT_SECONDS
    due = loop.time() + period
    try:
        async with aclosing(follower.batches(period)) as batches:
            async for batch in batches:
                if loop.time() >= due:
                    await _demand(recheck)
                    due = loop.time() + period
                yield batch
    except StreamAborted:
        raise
    except Exception as error:
        logger.exception("stream aborted")
        raise StreamAborted from error


async def framed(
    framing: Framing,
    follower: feed.Follower,
    recheck: Recheck,
    *,
    unlogged: Sequence[dict[str, Any]] = (),
    resumes: bool = False,
) -> AsyncGenerator[bytes, None]:
    """A follower's events, one per frame: the unlogged ones without id, then the log.

    An end before the run's terminal is an abort, because a stock client takes a clean end for
    success; readers that declared that they resume get a marked, clean end.
    """
    yield framing.opening  # also when empty: it sends the headers ahead of the agent
    if unlogged:
        yield b"".join(map(framing.frame, unlogged))
    async with aclosing(guarded(follower, recheck)) as batches:
        async for batch in batches:
            if batch is not None:
                yield framing.frames(batch)
            elif framing.keep_alive:
                yield framing.keep_alive
    if follower.finished:
        return
    if not resumes or framing.mark is None:
        raise StreamAborted
    yield framing.mark(follower.cursor)


async def document(
    follower: feed.Follower, recheck: Recheck, *, unlogged: Sequence[dict[str, Any]] = ()
) -> AsyncGenerator[bytes, None]:
    """One JSON document of a run, `{"events": [...]}`, written as the run goes.

    Streamed so that a request that waits for a long run holds no thread and no connection; an
    idle one gets white space, which JSON allows between values.
    """
    counted = f'"unlogged":{len(unlogged)},' if unlogged else ""
    yield f'{{{counted}"events":['.encode()
    before = ""
    if unlogged:
        yield ",".join(protocol.dumps(event) for event in unlogged).encode()
        before = ","
    async with aclosing(guarded(follower, recheck)) as batches:
        async for batch in batches:
            if batch is None:
                yield b" "
            else:
                yield (before + ",".join(batch.payloads)).encode()
                before = ","
    if not follower.finished:
        raise StreamAborted
    yield b"]}"
