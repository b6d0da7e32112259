"""What readers, waiting runs and stops cost a server: bytes, connections, seconds.

`FAULTS=long` in the environment takes the large numbers: 10 minutes, 2,000 readers, 500 runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from django.contrib.auth.models import User
from django.db import connection

from aguiapp import protocol
from aguiapp.models import Run
from project.management.commands import demo
from tests.live import crowd
from tests.live.servers import (
    KINDS,
    Person,
    Reader,
    Server,
    Servers,
    delta,
    ended,
    new_id,
    said,
    stored,
    until,
)
from tests.live.test_readers import drop_all, given_back, only_run, settled
from tests.services import LONG

FLOOD_SECONDS = 600.0 if LONG else 3.0
CYCLES = 2000 if LONG else 100
WAITING = 500 if LONG else 100
STOPS = 40 if LONG else 6
#: Connections of a process: for the store, and for calls of agents.
STORE, AGENT_THREADS = 3, 8
MIB = 1024 * 1024

Json = dict[str, Any]


def blobs(count: int, kib: int = 16, seconds: float = 0.005) -> Json:
    """Many large events, some time apart."""
    piece = {"type": "CUSTOM", "name": "blob", "value": {"$blob_kb": kib}}
    return {"$repeat": count, "events": [piece, {"$sleep": seconds}]}


# -- readers who do not read -------------------------------------------------------


def unread(
    person: Person, path: str, headers: dict[str, str], given: Json | None = None
) -> socket.socket:
    """A connection that asks for a stream and never reads it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30)
    client.connect(person.server.address)
    method = "GET" if given is None else "POST"
    client.sendall(crowd.request(person, method, path, headers, given))
    return client


def rest(client: socket.socket) -> bytes:
    """What was on its way when the connection was closed; it must have been closed."""
    found = bytearray()
    client.settimeout(10)
    with client, contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            found += piece
    return bytes(found)


def queued(server: Server) -> dict[int, int]:
    """Bytes that the kernel holds for the server's readers, by the reader's port."""
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if int(local.rpartition(":")[2], 16) == server.port:
            found[int(remote.rpartition(":")[2], 16)] = int(queues.partition(":")[0], 16)
    return found


def ask_for(form: str, person: Person, given: Json, reader: Reader) -> socket.socket:
    """A connection that asks for the reader's run in that form, and never reads it."""
    stream = f"/agui/threads/{reader.thread}/stream"
    post = "/agui/agents/scripted/"
    match form:
        case "stream":
            return unread(person, f"{stream}?run={reader.run}", {})
        case "resumed":
            return unread(person, stream, {"Last-Event-ID": reader.ids[0]})
        case "binary":
            return unread(person, f"{stream}?run={reader.run}", {"Accept": protocol.PROTO})
        case "document":
            return unread(person, post, {"Accept": "application/json"}, given)
        case _:
            client = unread(person, f"{post}ws", UPGRADE)
            answer = b""
            while not answer.endswith(crowd.END):
                answer += client.recv(1)
            client.sendall(text_frame(given))
            return client


UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec-WebSocket-Version": "13",
}


def text_frame(given: Json) -> bytes:
    """A client's text frame, masked by zeros."""
    payload = protocol.dumps(given).encode()
    return b"\x81" + struct.pack(">BH", 0x80 | 126, len(payload)) + bytes(4) + payload


def highest(process: psutil.Process, over: Any, timeout: float) -> int:
    """The largest resident size seen until it is over."""
    found = 0

    def look() -> Any:
        nonlocal found
        found = max(found, process.memory_info().rss)
        return over()

    until(look, timeout)
    return found


class Cuts:
    """When each of the server's connections was gone, and the most the kernel held for it."""

    def __init__(self, server: Server, clients: dict[str, socket.socket]) -> None:
        self._server = server
        self._process = psutil.Process(server.process.pid)
        self._ports = {form: client.getsockname()[1] for form, client in clients.items()}
        self._started = time.monotonic()
        self._seen: set[tuple[Any, ...]] = set()
        self.after: dict[str, float] = {}
        self.held = dict.fromkeys(clients, 0)

    def all(self) -> bool:
        """Look again; whether all are gone."""
        held = {tuple(c.raddr[1:]) for c in self._process.net_connections()}
        in_kernel = queued(self._server)
        self._seen |= held
        for form, port in self._ports.items():
            self.held[form] = max(self.held[form], in_kernel.get(port, 0))
            if (port,) in self._seen - held:
                self.after.setdefault(form, time.monotonic() - self._started)
        return len(self.after) == len(self._ports)

    def __str__(self) -> str:
        told = (f"{f} {s:.1f} s, {self.held[f] / MIB:.1f} MiB" for f, s in self.after.items())
        return f"cut after, in the kernel: {'; '.join(told)}"


@pytest.mark.parametrize(
    "forms", [("stream", "resumed", "binary", "document"), ("socket",)], ids=["http", "socket"]
)
def test_who_never_reads_is_ended_and_nobody_else_notices(
    impatient: Server, user: User, forms: tuple[str, ...]
) -> None:
    person = Person(impatient, user)
    process = psutil.Process(impatient.process.pid)
    person.play(blobs(100)).done()
    before = process.memory_info().rss
    given = demo.run_input("ignored", "go", {"script": [blobs(700)]})
    reader = person.post("scripted", given).events(3)
    watcher = person.watch(reader.thread, run=reader.run)
    clients = {form: ask_for(form, person, given, reader) for form in forms}
    cuts = Cuts(impatient, clients)
    try:
        peak = highest(process, cuts.all, 15)
        in_time = reader.end == ""
        reader.done(30)
        watcher.done(30)
    finally:
        kept = {form: rest(client) for form, client in clients.items()}
    print(f"never read, {impatient.kind}: grew {(peak - before) / MIB:.1f} MiB; {cuts}")  # noqa: T201
    rows = stored(reader.run)
    assert reader.logged == watcher.logged == rows
    for r in (reader, watcher):
        assert max(b - a for a, b in zip(r.times, r.times[1:], strict=False)) < 1, "noticed"
    assert in_time, "the run was over before its readers were cut"
    assert peak - before < 6 * MIB * (1 + len(forms))
    for form, body in kept.items():
        assert not body.endswith(b"0\r\n\r\n"), form
        assert b"aguiapp.resume" not in body, form
        assert len(body) < 4 * MIB, form
    if "resumed" in kept:  # it comes back with the last cursor that it has
        last = crowd.last_id(kept["resumed"]) or reader.ids[0]
        again = person.watch(reader.thread, last, run=reader.run).done(30)
        assert again.logged == rows[int(last.rpartition("-")[2]) :]


def test_who_reads_slowly_gets_everything(impatient: Server, user: User) -> None:
    """It takes some bytes all the time, although each write takes longer than STALL_SECONDS."""
    person = Person(impatient, user)
    script = [blobs(150, 32, 0.0)]

    async def read() -> crowd.Line:
        given = demo.run_input("slowly", "go", {"script": script})
        line = crowd.Line(
            person, "/agui/agents/scripted/", given=given, pause=0.03, piece=16 * 1024
        )
        while not line.task.done():
            held.append(max(queued(person.server).values(), default=0))
            await asyncio.sleep(0.05)
        return line

    held: list[int] = []
    started = time.monotonic()
    line = asyncio.run(read())
    gaps = [b - a for a, b in zip(line.times, line.times[1:], strict=False)]
    took = time.monotonic() - started
    size = len(line.body)
    print(  # noqa: T201
        f"slow reader, {impatient.kind}: {size / MIB:.1f} MiB in {took:.1f} s, then {line.end};"
        f" its longest pause {max(gaps):.2f} s, at most {max(held) / MIB:.2f} MiB in the kernel"
    )
    assert (line.status, line.end) == (200, "clean")
    rows = stored(line.headers["agui-run"])
    assert len(rows) == 152
    assert [f.partition(b"data: ")[2].decode()[:-2] for f in crowd.frames(line.body)] == rows
    assert took > 4


def test_a_flood_that_nobody_reads_holds_no_more_with_time(
    servers: Servers, kind: str, database_url: str, user: User
) -> None:
    server = servers.start(kind, database_url, overrides={"AGUIAPP": {"STALL_SECONDS": 700}})
    person = Person(server, user)
    process = psutil.Process(server.process.pid)
    piece = {"type": "CUSTOM", "name": "blob", "value": {"$blob_kb": 8}}
    flood = {"$forever": [piece, {"$sleep": 0.02 if LONG else 0.001}]}
    person.play(blobs(300, 8, 0.001)).done()
    given = demo.run_input("flood", "go", {"script": [flood]})
    reader = unread(person, "/agui/agents/scripted/", {}, given)
    run = only_run("flood")
    noted: list[tuple[float, float, float]] = []
    started = time.monotonic()
    before = process.memory_info().rss
    while (now := time.monotonic() - started) < FLOOD_SECONDS:
        in_kernel = queued(server).get(reader.getsockname()[1])
        assert in_kernel is not None, "the reader was cut"
        noted.append((now, (process.memory_info().rss - before) / MIB, in_kernel / MIB))
        time.sleep(FLOOD_SECONDS / 40)
    path = f"/agui/threads/{run.thread.key}/runs/{run.key}/cancel"
    assert httpx.post(server.url(path), headers=person.headers, timeout=30).status_code == 200
    sent = ended(str(run.key)).bytes / MIB
    print(f"flood, {kind}: {sent:.0f} MiB in {FLOOD_SECONDS:.0f} s; (s, MiB grown, MiB in kernel):")  # noqa: T201
    for row in noted[:: max(1, len(noted) // 10)]:
        print("  %4.0f %6.1f %6.2f" % row)  # noqa: T201, UP031
    reader.close()
    grown = [row[1] for row in noted]
    assert sent > 4
    assert max(grown) < 25
    assert max(grown[-10:]) < max(grown[:-10]) + 2


# -- what is left behind -----------------------------------------------------------


async def watch_and_leave(person: Person, path: str, count: int) -> None:
    """Open that many streams, a few at a time, and drop each once its first bytes came."""
    opening = asyncio.Semaphore(20)

    async def one() -> None:
        async with opening:
            line = crowd.Line(person, path)
            await crowd.until(lambda: b"id: " in line.body)
            line.task.cancel()
            await asyncio.wait({line.task})

    await asyncio.gather(*(one() for _ in range(count)))


@pytest.mark.parametrize("what", ["watch", "post"])
def test_readers_who_leave_take_everything_with_them(
    servers: Servers, kind: str, database_url: str, user: User, what: str
) -> None:
    server = servers.start(kind, database_url)
    person = Person(server, user)
    process = psutil.Process(server.process.pid)
    hanging = person.play(delta_of("x"), {"$hang": True}).events(2)
    path = f"/agui/threads/{hanging.thread}/stream"

    async def leave(count: int, name: str) -> None:
        if what == "watch":
            await watch_and_leave(person, path, count)
        else:
            await drop_all(server, person, count, [{"$sleep": 0.05}, *said(delta())], name)

    def quiet() -> bool:
        return Run.objects.filter(status=Run.Status.RUNNING).count() == 1

    asyncio.run(leave(40, "warm"))
    until(quiet)
    before, memory = settled(server), process.memory_info().rss
    started = time.monotonic()
    asyncio.run(leave(CYCLES, "left"))
    took = time.monotonic() - started
    until(quiet, 60)
    try:
        given_back(server, before, 12)
    finally:
        after, grown = settled(server), (process.memory_info().rss - memory) / MIB
        print(f"{CYCLES} x {what}, {kind}: {before} -> {after}, {grown:+.1f} MiB, {took:.0f} s")  # noqa: T201
    assert grown < 12
    person.cancel(hanging)
    hanging.done()
    assert "Traceback" not in server.said()


def delta_of(text: str) -> Json:
    """Something short to say."""
    return {"type": "CUSTOM", "name": "said", "value": text}


# -- runs that wait ----------------------------------------------------------------


def backends(name: str) -> int:
    """Connections to the database under that name."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name])
        return int(cursor.fetchone()[0])


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite has no backends")
def test_runs_that_wait_hold_no_connection(
    servers: Servers, kind: str, database_url: str, user: User
) -> None:
    name = f"waiting-{kind}"
    server = servers.start(kind, f"{database_url}?application_name={name}")
    person = Person(server, user)
    at = time.time() + 3 + WAITING / 25
    asyncio.run(start_all(person, at))
    waiting = Run.objects.filter(thread__thread_id__startswith="waiting-")
    assert waiting.filter(status=Run.Status.RUNNING).count() == WAITING
    assert time.time() < at, "they did not wait together"
    while_waiting = 0
    while_asking: list[int] = []
    while time.time() < at - 0.2:
        while_waiting = max(while_waiting, backends(name))
        time.sleep(0.05)

    def all_asked() -> bool:
        while_asking.append(backends(name))
        return asked_twice(waiting) == WAITING

    started = time.monotonic()
    until(all_asked, 60, "all have asked")
    took = time.monotonic() - started
    most, usual = max(while_asking), statistics.median(while_asking)
    print(  # noqa: T201
        f"{WAITING} waiting, {kind}: {while_waiting} backends;"
        f" while all ask {usual:g}, at most {most}, {took:.1f} s"
    )
    server.terminate(60)
    assert 0 < while_waiting <= STORE
    assert STORE < usual <= STORE + AGENT_THREADS
    # A backend whose connection was just closed may be seen beside the one that came after it.
    assert most <= STORE + 2 * AGENT_THREADS


async def start_all(person: Person, at: float) -> None:
    """Start the runs, a few at a time, and leave them."""
    opening = asyncio.Semaphore(20)

    async def one(number: int) -> None:
        async with opening:
            given = demo.run_input(f"waiting-{number}", "go", {"at": at})
            line = crowd.Line(person, "/agui/agents/querying/", given=given)
            await crowd.until(lambda: b'"asked"' in line.body)
            line.task.cancel()
            await asyncio.wait({line.task})

    await asyncio.gather(*(one(number) for number in range(WAITING)))


def asked_twice(waiting: Any) -> int:
    return int(waiting.filter(events__seq=3).count())


# -- stops -------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["redis", "none"])
def test_a_silent_run_is_stopped_from_another_process(
    servers: Servers, database_url: str, user: User, layer: str, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {"overrides": {"CHANNEL_LAYERS": {}}}
    if layer == "redis":
        options = {"environment": {"REDIS_URL": request.getfixturevalue("redis_url")}}
    one, two = (servers.shared(kind, database_url, layer, **options) for kind in KINDS)
    took, seen = [], []
    for number in range(STOPS):
        here = Person((one, two)[number % 2], user)
        there = here.at((two, one)[number % 2])
        reader = here.play(*said(delta("x"), {"$hang": True}), thread=new_id()).events(3)
        started = time.monotonic()
        answer = there.cancel(reader)
        took.append(time.monotonic() - started)
        assert answer.json()["status"] == "cancelled"
        reader.done()
        seen.append(reader.times[-1] - started)
        assert reader.last["outcome"]["type"] == "cancelled"
        assert reader.logged == stored(reader.run)
    print(f"{STOPS} stops, {layer}: {spread(took)}; seen by its reader: {spread(seen)}")  # noqa: T201
    assert max(took) < 1
    assert max(seen) < 1.2


def spread(seconds: list[float]) -> str:
    """Median and worst, in milliseconds."""
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"p50 {statistics.median(ordered) * 1000:.0f} ms, p99 {high * 1000:.0f} ms"
