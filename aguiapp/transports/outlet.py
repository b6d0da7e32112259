"""`send` of an ASGI server with back-pressure, a limit on stalls, and a way to cut the line."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from aguiapp import conf
from aguiapp.errors import StreamAborted

Send = Callable[[Any], Awaitable[None]]


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


class Outlet:
    """Sends ASGI messages no faster than the reader takes them.

    uvicorn waits inside `send`. Daphne's returns at once, so a producer is registered with the
    Twisted protocol behind it; without one an unread stream would fill the memory.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._stall = conf.get().STALL_SECONDS
        self._protocol = _twisted_protocol(send)
        self._producer: _PushProducer | None = None
        if self._protocol is not None:
            producer = _PushProducer()
            with contextlib.suppress(Exception):  # a protocol that is gone, or takes no producer
                self._protocol.registerProducer(producer, True)
                self._producer = producer

    async def __call__(self, message: Any) -> None:
        """Send one message; raises StreamAborted when the reader took nothing for too long."""
        try:
            async with asyncio.timeout(self._stall):
                if self._producer is not None and not self._producer.open.is_set():
                    await self._producer.open.wait()
                await self._send(message)
        except TimeoutError:
            raise StreamAborted from None

    def release(self) -> None:
        """The stream is about to end in order: the transport owns its buffer again."""
        if self._producer is not None:
            with contextlib.suppress(Exception):
                self._protocol.unregisterProducer()
            self._producer = None

    def cut(self) -> bool:
        """Close the connection without its final chunk; False when the server must be told so."""
        if self._protocol is None:
            return False
        self.release()
        self._protocol.loseConnection()
        return True


def _twisted_protocol(send: Send) -> Any:
    """Daphne hands out `partial(server.handle_reply, protocol)`; anything else is left alone."""
    if not isinstance(send, functools.partial) or not send.args:
        return None
    protocol = send.args[0]
    wanted = ("registerProducer", "unregisterProducer", "loseConnection")
    return protocol if all(hasattr(protocol, name) for name in wanted) else None
