"""A TCP proxy that loses things on purpose; one kind of it reads PostgreSQL's frontend messages."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

#: Where a service listens: a TCP address, or the path of a socket.
Address = tuple[str, int] | str

#: Requests for encryption, which come before anything else and are answered with "no".
ENCRYPTION = {80877103, 80877104}


def connected(address: Address) -> socket.socket:
    """A connection to a service."""
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout=10)
    found = socket.socket(socket.AF_UNIX)
    found.connect(address)
    return found


class Link:
    """One connection through the proxy: what its client sends goes up, the answers come down."""

    def __init__(self, proxy: Proxy, client: socket.socket, target: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.target = target
        for side in (client, target):
            side.settimeout(None)
        self._ends = [client, target]
        pairs = ((client, self.up), (target, self.down))
        self._threads = [
            threading.Thread(target=self._pump, args=pair, daemon=True) for pair in pairs
        ]

    def start(self) -> None:
        """Begin to pass on."""
        for thread in self._threads:
            thread.start()

    def up(self, data: bytes) -> None:
        """Bytes from the client."""
        self.target.sendall(data)

    def down(self, data: bytes) -> None:
        """Bytes from the service."""
        self.client.sendall(data)

    def cut(self) -> None:
        """End the connection on both sides."""
        for side in (self.client, self.target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def _pump(self, source: socket.socket, onward: Callable[[bytes], None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                onward(data)
        self.cut()
        self._ends.remove(source)
        if not self._ends:  # nobody reads from either any more
            self.client.close()
            self.target.close()
            self.proxy.links.discard(self)


class Proxy:
    """Listens on a port of its own and passes everything on, until a test says otherwise."""

    link: type[Link] = Link

    def __init__(self, target: Address) -> None:
        self.target = target
        self.links: set[Link] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                target = connected(self.target)
            except OSError:
                client.close()
                continue
            link = self.link(self, client, target)
            self.links.add(link)
            link.start()

    def close(self) -> None:
        """End it and every connection through it."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in list(self.links):
            link.cut()


class PostgresLink(Link):
    """Knows where transactions begin and end, and can cut the connection around a COMMIT."""

    def __init__(self, proxy: Proxy, client: socket.socket, target: socket.socket) -> None:
        super().__init__(proxy, client, target)
        self._buffer = bytearray()
        self._started = False
        self._statements: list[str] = []
        self._swallowing = False
        self._answered = threading.Event()

    def up(self, data: bytes) -> None:
        self._buffer += data
        while message := self._next():
            self._take(message)

    def down(self, data: bytes) -> None:
        if self._swallowing:
            self._answered.set()
        else:
            super().down(data)

    def _next(self) -> bytes:
        """The next whole message; empty when there is none yet."""
        head = 1 if self._started else 0
        if len(self._buffer) < head + 4:
            return b""
        size = head + struct.unpack_from("!i", self._buffer, head)[0]
        if len(self._buffer) < size:
            return b""
        message = bytes(self._buffer[:size])
        del self._buffer[:size]
        return message

    def _take(self, message: bytes) -> None:
        if not self._started:
            if struct.unpack_from("!i", message, 4)[0] in ENCRYPTION:
                self.client.sendall(b"N")
                return
            self._started = True
        elif message[:1] in b"QP":
            # A parsed statement has a name before its text.
            text = message[5:].split(b"\0")[0 if message[:1] == b"Q" else 1].decode().strip()
            if text.upper().startswith("COMMIT"):
                self._commit(message)
                return
            if text.upper().startswith("BEGIN"):
                self._statements = []
            self._statements.append(text)
        self.target.sendall(message)

    def _commit(self, message: bytes) -> None:
        assert isinstance(self.proxy, PostgresProxy)
        where = self.proxy.decide(self._statements)
        if where == "before":
            self.cut()
            return
        if where == "hold":
            self.proxy.released.wait(60)
        self._swallowing = where == "after"
        self.target.sendall(message)
        if self._swallowing:
            self._answered.wait(10)
            self.cut()


class PostgresProxy(Proxy):
    """Asks `decide` at every COMMIT, with the transaction's statements, what to do about it.

    "" lets it pass, "before" and "after" cut the connection, "hold" keeps it until `released`.
    """

    link = PostgresLink

    def __init__(self, target: Address) -> None:
        self.decide: Callable[[list[str]], str] = calm
        self.released = threading.Event()
        super().__init__(target)


def calm(statements: list[str]) -> str:
    """Lets every COMMIT pass."""
    return ""


def target_of(url: str) -> Address:
    """Where the database of that URL listens."""
    parts = urlsplit(url)
    if parts.hostname:
        return parts.hostname, parts.port or 5432
    (folder,) = [
        value for key, _, value in (pair.partition("=") for pair in parts.query.split("&"))
        if key == "host"
    ]  # fmt: skip
    return f"{folder.replace('%2F', '/')}/.s.PGSQL.5432"


def at_port(url: str, port: int) -> str:
    """The same database by way of a port of this machine."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    return urlunsplit((parts.scheme, f"{login}@127.0.0.1:{port}", parts.path, "", ""))
