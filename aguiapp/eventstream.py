"""The body of a stream: one generator of bytes for every server that carries it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from django.http import StreamingHttpResponse

from aguiapp import conf, feed, protocol
from aguiapp.errors import StreamAborted

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
    # GZipMiddleware of Django 5.2 compresses each chunk for itself, which no reader understands.
    "Content-Encoding": "identity",
}
OPENING = b": aguiapp\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Recheck = Callable[[], Awaitable[bool]]


class EventStream(StreamingHttpResponse):
    """A response that streams; `source` yields its bytes to whoever serves it."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        content_type: str = CONTENT_TYPE,
    ) -> None:
        super().__init__(source, content_type=content_type, headers={**HEADERS, **headers})
        self.source = source


async def guarded(
    follower: feed.Follower, recheck: Recheck
) -> AsyncGenerator[feed.Batch | None, None]:
    """The follower's batches for as long as the reader may see the thread."""
    loop = asyncio.get_running_loop()
    period = conf.get().HEARTBEAT_SECONDS
    due = loop.time() + period
    async with aclosing(follower.batches(period)) as batches:
        async for batch in batches:
            if loop.time() >= due:
                if not await recheck():
                    raise StreamAborted
                due = loop.time() + period
            yield batch


async def sse(
    follower: feed.Follower,
    recheck: Recheck,
    *,
    unlogged: Sequence[dict[str, Any]] = (),
    resumes: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a follower: opening comment, unlogged frames without id, the log.

    An end before the run's terminal is an abort, because a stock client takes a clean end for
    success; readers that declared that they resume get a marked, clean end.
    """
    yield OPENING
    if unlogged:
        yield b"".join(protocol.encode_sse(event) for event in unlogged)
    async with aclosing(guarded(follower, recheck)) as batches:
        async for batch in batches:
            yield KEEP_ALIVE if batch is None else batch.sse
    if follower.finished:
        return
    if not resumes:
        raise StreamAborted
    yield f": aguiapp.resume {follower.cursor}\n\n".encode()


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
