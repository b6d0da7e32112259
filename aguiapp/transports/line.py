"""The connection behind an ASGI server's `send`, as far as the server lets us see it.

ASGI has no word for back-pressure on Daphne, for cutting a connection, or for how much the other
side took. What is known of uvicorn and Daphne is gathered here; any other server is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
from typing import Any

#: Where `tcpi_bytes_acked` stands in Linux' struct tcp_info, since 4.1.
_BYTES_ACKED = 120
_TCP_INFO = getattr(socket, "TCP_INFO", None)


def acknowledged(fileno: int) -> int | None:
    """The bytes that the other side has taken so far; None where the system does not say."""
    if _TCP_INFO is None:
        return None
    with contextlib.suppress(OSError, struct.error):
        with socket.socket(fileno=os.dup(fileno)) as connection:
            known = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED + 8)
        return int(struct.unpack_from("=Q", known, _BYTES_ACKED)[0])
    return None


class Line:
    """A connection of a server that we know nothing of."""

    #: The server's `send` waits by itself while the other side does not read.
    waits = True

    def fileno(self) -> int:
        """The connection's file descriptor; -1 where there is none."""
        return -1

    def is_empty(self) -> bool:
        """Whether nothing is known to wait for the other side."""
        return False

    def taken(self) -> int | None:
        """The bytes that the other side has taken so far, where that can be known."""
        number = self.fileno()
        return None if number < 0 else acknowledged(number)

    def cut(self, *, now: bool) -> bool:
        """Close without a final chunk, `now` or after what is buffered; False if that is not ours."""
        return False

    def close_socket(self, code: int) -> bool:
        """Send a WebSocket close frame; False when the server itself can."""
        return False

    def register(self, producer: Any) -> None:
        """Tell a Twisted push producer when the buffer is full and when it is not."""

    def unregister(self) -> None:
        """The transport owns its buffer again."""


class _Asyncio(Line):
    """uvicorn: `send` is bound to what holds an asyncio transport."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def fileno(self) -> int:
        found = self._transport.get_extra_info("socket")
        return -1 if found is None else int(found.fileno())

    def is_empty(self) -> bool:
        return bool(self._transport.get_write_buffer_size() == 0)

    def cut(self, *, now: bool) -> bool:
        if now:
            self._transport.abort()
        else:
            self._transport.close()
        return True


class _Twisted(Line):
    """Daphne: `send` returns at once, so a producer is what waits."""

    waits = False

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def fileno(self) -> int:
        found = getattr(self._transport, "fileno", None)
        return -1 if found is None else int(found())

    def cut(self, *, now: bool) -> bool:
        ends = ("abortConnection", "loseConnection") if now else ("loseConnection",)
        next(getattr(self._transport, end) for end in ends if hasattr(self._transport, end))()
        return True


class _TwistedHttp(_Twisted):
    """A request of Daphne: its channel registers producers, and loses the connection."""

    def __init__(self, request: Any) -> None:
        super().__init__(request.channel.transport)
        self._request = request

    def register(self, producer: Any) -> None:
        self._request.registerProducer(producer, True)

    def unregister(self) -> None:
        self._request.unregisterProducer()


class _TwistedSocket(_Twisted):
    """A WebSocket of Daphne: the HTTP channel that it came by is still registered."""

    def __init__(self, protocol: Any) -> None:
        super().__init__(protocol.transport)
        self._protocol = protocol

    def register(self, producer: Any) -> None:
        self._transport.unregisterProducer()
        self._transport.registerProducer(producer, True)

    def unregister(self) -> None:
        self._transport.unregisterProducer()

    def close_socket(self, code: int) -> bool:
        # Its own way refuses the codes of RFC 6455 that only servers use, 1011 to 1013.
        if code == 1000 or code >= 3000:
            return False
        self._protocol.sendCloseFrame(code=code)
        return True


def behind(send: Any) -> Line:
    """The line of this `send`: Daphne hands out `partial(server.handle_reply, protocol)`."""
    if isinstance(send, functools.partial) and send.args:
        protocol = send.args[0]
        if hasattr(protocol, "sendCloseFrame") and getattr(protocol, "transport", None) is not None:
            return _TwistedSocket(protocol)
        if getattr(getattr(protocol, "channel", None), "transport", None) is not None:
            return _TwistedHttp(protocol)
        return Line()
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    return _Asyncio(transport) if hasattr(transport, "get_extra_info") else Line()
