"""`send` of an ASGI server with back-pressure, a limit on stalls, and a way to cut the line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aguiapp import conf, feed
from aguiapp.errors import StreamAborted
from aguiapp.transports import line

Send = Callable[[Any], Awaitable[None]]
#: How often in its time a reader that blocks is looked at.
LOOKS = 4


class _PushProducer:
    """Twisted's IPushProducer, by shape: the transport says when its buffer is full."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()

    def pauseProducing(self) -> None:
        self.open.clear()

    def resumeProducing(self) -> None:
        self.open.set()

    def stopProducing(self) -> None:
        self.open.set()


class Stalled(StreamAborted):
    """The reader took nothing for too long."""


class Outlet:
    """Sends ASGI messages no faster than the reader takes them; an async context manager.

    uvicorn waits inside `send`. Daphne's returns at once, so a producer is registered with the
    Twisted transport behind it; without one an unread stream would fill the memory.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._stall = conf.get().STALL_SECONDS
        self._line = line.behind(send)
        self._producer: _PushProducer | None = None

    async def __aenter__(self) -> Outlet:
        feed.current().outlets.add(self)
        if not self._line.waits:
            producer = _PushProducer()
            with contextlib.suppress(Exception):  # a line that is gone, or takes no producer
                self._line.register(producer)
                self._producer = producer
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
        feed.current().outlets.discard(self)

    async def __call__(self, message: Any) -> None:
        """Send one message; raises Stalled when the reader took no byte for too long."""
        if self._is_open(message):
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self._stall) as patience:
                with _prolonged(patience, self._stall, self._line):
                    if self._producer is not None:
                        await self._producer.open.wait()
                    await self._send(message)
        except TimeoutError:
            raise Stalled from None

    def _is_open(self, message: Any) -> bool:
        """Whether `send` is known to return at once, so that nothing needs to be watched."""
        if self._producer is not None:
            return self._producer.open.is_set()
        return message["type"] == "http.response.body" and self._line.is_empty()

    def release(self) -> None:
        """The stream is about to end in order: the transport owns its buffer again."""
        if self._producer is not None:
            with contextlib.suppress(Exception):
                self._line.unregister()
            self._producer = None

    def cut(self, error: Exception) -> bool:
        """Close the connection without its final chunk; False when the server must be told so.

        A reader who stalled is cut at once: waiting for its buffer to empty would be for ever.
        """
        self.release()
        return self._line.cut(now=isinstance(error, Stalled))

    async def close_socket(self, code: int) -> None:
        """End a WebSocket with that code."""
        self.release()
        if not self._line.close_socket(code):
            await self({"type": "websocket.close", "code": code})


@contextlib.contextmanager
def _prolonged(patience: asyncio.Timeout, stall: float, connection: line.Line) -> Iterator[None]:
    """Prolong a reader's time while it takes bytes, however few."""
    loop = asyncio.get_running_loop()
    taken: int | None = None
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal taken, timer
        before, taken = taken, connection.taken()
        if before is not None and taken is not None and taken > before:
            patience.reschedule(loop.time() + stall)
        timer = loop.call_later(stall / LOOKS, look)

    timer = loop.call_later(stall / LOOKS, look)
    try:
        yield
    finally:
        timer.cancel()


async def close_socket(send: Send, code: int) -> None:
    """Close a WebSocket that has no outlet yet; any code of RFC 6455 or of our own will do."""
    if not line.behind(send).close_socket(code):
        await send({"type": "websocket.close", "code": code})
