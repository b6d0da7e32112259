"""What the tests of transports share: how long they go on, scripts of cases, many readers at once."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
from websockets.sync.client import ClientConnection, connect

from project.management.commands import demo
from tests.bugs.world import World
from tests.live.servers import DEADLINE, Person, Server
from tests.live.test_readers import given_back, request_bytes, settled
from tests.services import LONG

MIB = 1024 * 1024


def rounds(short: int, long: int) -> int:
    """How often to do it."""
    return long if LONG else short


def script_of(w: World, **seconds: float) -> list[Any]:
    """The case's events without its own RUN_STARTED and RUN_FINISHED, whose ids are not ours.

    `sleep` replaces the seconds of its directives.
    """
    ends = ("RUN_STARTED", "RUN_FINISHED")
    script = [item for item in w.input["agent_events"] if item.get("type") not in ends]
    if "sleep" in seconds:
        script = [{"$sleep": seconds["sleep"]} if "$sleep" in item else item for item in script]
    return script


def said(*deltas: str, name: str = "m1") -> list[dict[str, Any]]:
    """A whole message."""
    pieces = [
        {"type": "TEXT_MESSAGE_CONTENT", "messageId": name, "delta": delta} for delta in deltas
    ]
    return [
        {"type": "TEXT_MESSAGE_START", "messageId": name, "role": "assistant"},
        *pieces,
        {"type": "TEXT_MESSAGE_END", "messageId": name},
    ]


def positions(ids: Sequence[str]) -> list[int]:
    """The positions that cursors name."""
    return [int(cursor.rpartition("-")[2]) for cursor in ids]


def open_socket(
    server: Server, headers: dict[str, str], agent: str = "scripted", query: str = ""
) -> ClientConnection:
    """The plain WebSocket of an agent."""
    url = server.url(f"/agui/agents/{agent}/ws{query}").replace("http", "ws")
    return connect(url, additional_headers=headers, max_size=None, proxy=None)


def given(thread: str, script: Sequence[Any], run: str = "") -> dict[str, Any]:
    """A run input for the scripted agent; the same `run` makes the same input."""
    made = demo.run_input(thread, "play", {"script": list(script)})
    if run:
        made["runId"] = run
        made["messages"][0]["id"] = f"u-{run}"
    return made


def cut(client: socket.socket) -> None:
    """Reset the connection."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def drop_socket(connection: ClientConnection) -> None:
    """Reset the connection under a WebSocket."""
    raw = connection.socket
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.shutdown(socket.SHUT_RDWR)


@contextmanager
def nothing_left(server: Server, timeout: float = DEADLINE) -> Iterator[None]:
    """What is done meanwhile leaves no task, thread, file or database connection behind."""
    before = settled(server)
    yield
    given_back(server, {name: most + SLACK.get(name, 0) for name, most in before.items()}, timeout)


#: Threads of the pools, their connections, and the tasks every process keeps start when needed.
SLACK = {"threads": 4, "fds": 8, "backends": 4, "tasks": 2}


def rss(server: Server) -> int:
    """Resident memory of a server process."""
    return int(psutil.Process(server.process.pid).memory_info().rss)


async def all_of(jobs: Sequence[Callable[[], Awaitable[Any]]], at_once: int) -> list[Any]:
    """Do all of them, so many at a time."""
    room = asyncio.Semaphore(at_once)

    async def one(job: Callable[[], Awaitable[Any]]) -> Any:
        async with room:
            return await job()

    return await asyncio.gather(*map(one, jobs))


async def send_and_abort(server: Server, raw: bytes, seconds: float) -> None:
    """Send a request, and reset the connection after a moment, whatever has come."""
    _, writer = await asyncio.open_connection(*server.address)
    writer.write(raw)
    await asyncio.sleep(seconds)
    client = writer.get_extra_info("socket")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def attaching(server: Server, person: Person, thread: str, query: str = "") -> bytes:
    """A GET of the thread's stream as it goes over the wire."""
    head = [
        f"GET /agui/threads/{thread}/stream{query} HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        f"Authorization: Bearer {person.token}",
    ]
    return "\r\n".join([*head, "", ""]).encode()


def posting(server: Server, person: Person, body: dict[str, Any], agent: str = "scripted") -> bytes:
    """A POST as it goes over the wire."""
    return request_bytes(server, person, agent, body)


async def viewer(
    client: httpx.AsyncClient, url: str, *, delay: float = 0.0, pause: float = 0.0
) -> tuple[list[int], list[str]]:
    """Read an event stream from some moment on: its positions and payloads.

    `pause` is how long this reader takes for each piece it reads.
    """
    await asyncio.sleep(delay)
    raw = bytearray()
    async with client.stream("GET", url) as response:
        assert response.status_code == 200
        async for chunk in response.aiter_raw():
            raw += chunk
            if pause:
                await asyncio.sleep(pause)
    return read_frames(bytes(raw))


def read_frames(raw: bytes) -> tuple[list[int], list[str]]:
    """Positions and payloads of the logged frames of an event stream."""
    found: tuple[list[int], list[str]] = [], []
    for block in raw.decode("utf-8", "surrogatepass").split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.split("\n") if line[:1] != ":")
        if "id" in fields:
            found[0].append(int(fields["id"].rpartition("-")[2]))
            found[1].append(fields["data"])
    return found


def client_of(person: Person) -> httpx.AsyncClient:
    """Many connections of one person."""
    limits = httpx.Limits(max_connections=200)
    return httpx.AsyncClient(headers=person.headers, timeout=60, limits=limits)


def dice(w: World) -> random.Random:
    """Chance that is the same in every run of a case."""
    return random.Random(w.case["id"])


def types_of(payloads: Sequence[str]) -> list[str]:
    """The types of events."""
    return [json.loads(payload)["type"] for payload in payloads]
