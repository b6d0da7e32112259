"""`send` of an ASGI server with back-pressure, a limit on stalls, and a way to cut the line."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from aguiapp import conf, feed
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


class Stalled(StreamAborted):
    """The reader took nothing for too long."""


class Outlet:
    """Sends ASGI messages no faster than the reader takes them; an async context manager.

    uvicorn waits inside `send`. Daphne's returns at once, so a producer is registered with the
    Twisted protocol behind it; without one an unread stream would fill the memory.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._stall = conf.get().STALL_SECONDS
        self._twisted = _twisted_protocol(send)
        self._producer: _PushProducer | None = None

    async def __aenter__(self) -> Outlet:
        feed.current().outlets.add(self)
        if self._twisted is not None:
            producer = _PushProducer()
            with contextlib.suppress(Exception):  # a protocol that is gone, or takes no producer
                self._twisted.registerProducer(producer, True)
                self._producer = producer
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
        feed.current().outlets.discard(self)

    async def __call__(self, message: Any) -> None:
        """Send one message; raises Stalled when the reader took nothing for too long."""
        try:
            async with asyncio.timeout(self._stall):
                if self._producer is not None and not self._producer.open.is_set():
                    await self._producer.open.wait()
                await self._send(message)
        except TimeoutError:
            raise Stalled from None

    def release(self) -> None:
        """The stream is about to end in order: the transport owns its buffer again."""
        if self._producer is not None:
            with contextlib.suppress(Exception):
                self._twisted.unregisterProducer()
            self._producer = None

    def cut(self, error: Exception) -> bool:
        """Close the connection without its final chunk; False when the server must be told so.

        A reader who stalled is cut at once: waiting for its buffer to empty would be for ever.
        """
        self.release()
        now = isinstance(error, Stalled)
        if self._twisted is not None:
            if now:
                _abort_twisted(self._twisted)
            else:
                self._twisted.loseConnection()
            return True
        transport = getattr(getattr(self._send, "__self__", None), "transport", None)
        end = getattr(transport, "abort" if now else "close", None)
        if end is None:
            return False
        end()
        return True


def _abort_twisted(protocol: Any) -> None:
    channel = getattr(protocol, "channel", None) or protocol
    transport = getattr(channel, "transport", None) or channel
    getattr(transport, "abortConnection", protocol.loseConnection)()


def _twisted_protocol(send: Send) -> Any:
    """Daphne hands out `partial(server.handle_reply, protocol)`; anything else is left alone."""
    if not isinstance(send, functools.partial) or not send.args:
        return None
    protocol = send.args[0]
    wanted = ("registerProducer", "unregisterProducer", "loseConnection")
    return protocol if all(hasattr(protocol, name) for name in wanted) else None
