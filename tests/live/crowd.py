"""Many readers in one loop: HTTP/1.1 as it goes over the wire, and the bytes as they came."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.live.servers import DEADLINE, Person

END = b"\r\n\r\n"


async def until(predicate: Callable[[], Any], what: str = "", seconds: float = DEADLINE) -> Any:
    """Ask until the answer is true, and let others go on meanwhile; returns the answer."""
    deadline = time.monotonic() + seconds
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}; last answer {answer!r}")
        await asyncio.sleep(0.005)
    return answer


def request(
    person: Person, method: str, path: str, headers: dict[str, str], given: Any = None
) -> bytes:
    """A request as bytes; `given` is sent as JSON."""
    body = b"" if given is None else json.dumps(given).encode()
    fields = {"Host": f"127.0.0.1:{person.server.port}", **person.headers, **headers}
    if given is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


class Line:
    """One connection with one request, read in a task; `pause` seconds after each frame."""

    def __init__(
        self,
        person: Person,
        path: str,
        headers: dict[str, str] | None = None,
        *,
        given: Any = None,
        pause: float = 0,
        piece: int = 65536,
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.end = ""  # "clean", "aborted"
        self.opened = asyncio.Event()
        self.times: list[float] = []
        self._address = person.server.address
        method = "GET" if given is None else "POST"
        self._request = request(person, method, path, headers or {}, given)
        self._pause, self._piece = pause, piece
        self.task = asyncio.create_task(self._read())

    async def done(self, seconds: float = DEADLINE) -> Line:
        """Wait for the end of the body."""
        async with asyncio.timeout(seconds):
            await self.task
        return self

    @property
    def position(self) -> int:
        """The newest position of an event stream; 0 before the first."""
        return int(last_id(self.body).rpartition("-")[2] or 0)

    async def _read(self) -> None:
        client = socket.socket()
        if self._pause:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, self._address)
        reader, writer = await asyncio.open_connection(sock=client, limit=self._piece)
        try:
            writer.write(self._request)
            status, *fields = (await reader.readuntil(END)).decode("latin-1").split("\r\n")[:-2]
            self.status = int(status.split()[1])
            pairs = (field.partition(": ") for field in fields)
            self.headers = {name.lower(): value for name, _, value in pairs}
            self.opened.set()
            async for piece in self._pieces(reader):
                self.body += piece
                self.times.append(time.monotonic())
                if self._pause:
                    await asyncio.sleep(self._pause * max(1, piece.count(b"\n\n")))
            self.end = "clean"
        except (asyncio.IncompleteReadError, ConnectionError):
            self.end = "aborted"
        finally:
            self.opened.set()
            writer.close()

    async def _pieces(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readuntil(b"\r\n")), 16):
                async for piece in self._exactly(reader, size):
                    yield piece
                await reader.readexactly(2)
            await reader.readexactly(2)
        elif self.status != 204:
            async for piece in self._exactly(reader, int(self.headers["content-length"])):
                yield piece

    async def _exactly(self, reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
        while size:
            piece = await reader.read(min(size, self._piece))
            if not piece:
                raise asyncio.IncompleteReadError(b"", size)
            size -= len(piece)
            yield piece


def last_id(body: bytes | bytearray) -> str:
    """The id of the last whole frame of an event stream; "" when there is none."""
    start = body.rfind(b"\nid: ", 0, body.rfind(b"\n\n") + 1) + 1
    return body[start + 4 : body.index(b"\n", start)].decode() if start else ""


def frames(body: bytes | bytearray) -> list[bytes]:
    """The logged frames of an event stream, whole; comments and unlogged frames are left out."""
    blocks = bytes(body).split(b"\n\n")
    assert blocks.pop() == b"", "half a frame"
    return [block + b"\n\n" for block in blocks if block.startswith(b"id: ")]


def binary_frames(body: bytes | bytearray) -> list[bytes]:
    """The frames of a binary stream, each with its length ahead."""
    found, rest = [], bytes(body)
    while rest:
        size = 4 + int.from_bytes(rest[:4])
        assert len(rest) >= size, "half a frame"
        found.append(rest[:size])
        rest = rest[size:]
    return found
