"""Readers that leave, readers that do not read: they cost the run nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from typing import Any

import psutil
import pytest
from django.contrib.auth.models import User
from django.db import connection

from aguiapp.models import Run
from project.management.commands import demo
from tests.live.servers import (
    MOUNTED,
    PLAIN,
    Person,
    Server,
    Servers,
    delta,
    ended,
    said,
    stored,
    trickle,
    until,
)

MIB = 1024 * 1024


def request_bytes(server: Server, person: Person, agent: str, given: dict[str, Any]) -> bytes:
    """A POST to an agent as it goes over the wire."""
    body = json.dumps(given).encode()
    head = [
        f"POST /agui/agents/{agent}/ HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"Authorization: Bearer {person.token}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def raw_get(server: Server, person: Person, path: str, *headers: str) -> socket.socket:
    """A GET on a raw socket."""
    head = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}"]
    head += [f"Authorization: Bearer {person.token}", *headers, "", ""]
    client = socket.create_connection(server.address, timeout=30)
    client.sendall("\r\n".join(head).encode())
    return client


def drain(client: socket.socket) -> bytes:
    """Everything until the connection ends, in whatever way."""
    found = b""
    try:
        while chunk := client.recv(65536):
            found += chunk
    except ConnectionResetError:
        pass
    finally:
        client.close()
    return found


def read_until(client: socket.socket, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        chunk = client.recv(65536)
        assert chunk, found
        found += chunk
    return found


def backends() -> int:
    """Connections to the test's database, where it is a server."""
    if connection.vendor != "postgresql":
        return 0
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        (count,) = cursor.fetchone()
        return int(count)


def settled(server: Server) -> dict[str, int]:
    """How much a server holds now: its tasks, threads, files, and all database connections."""
    found = server.inside()
    counts = {name: len(found[name]) for name in ("tasks", "threads")}
    return {**counts, "fds": found["fds"], "backends": backends()}


def given_back(server: Server, most: dict[str, int], timeout: float) -> None:
    """Wait until the server holds no more of anything than that."""

    def back() -> bool:
        held = settled(server)
        return all(held[name] <= most[name] for name in most)

    until(back, timeout, f"no more than {most} is held")


async def drop_all(
    server: Server, person: Person, count: int, script: list[Any], name: str = "dropped"
) -> None:
    # A request that is being opened holds a database connection, as Django itself does it.
    opening = asyncio.Semaphore(20)

    async def opened(number: int) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(*server.address)
        given = demo.run_input(f"{name}-{number}", "go", {"script": script})
        writer.write(request_bytes(server, person, "scripted", given))
        await reader.readuntil(b"RUN_STARTED")
        return writer

    async def one(number: int) -> None:
        async with opening:
            writer = await opened(number)
        sock = writer.get_extra_info("socket")
        if number % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    await asyncio.gather(*(one(number) for number in range(count)))


@pytest.mark.parametrize(
    ("kind", "application"), [("daphne", MOUNTED), ("uvicorn", MOUNTED), ("uvicorn", PLAIN)]
)
def test_two_hundred_dropped_readers_leave_nothing_behind(
    servers: Servers, kind: str, database_url: str, user: User, application: str
) -> None:
    count = 200 if application == MOUNTED else 40
    server = servers.start(kind, database_url, application=application)
    person = Person(server, user)
    script = said({"$repeat": 10, "events": [delta(), {"$sleep": 0.1}]})
    asyncio.run(drop_all(server, person, 8, script, "warm"))
    runs = Run.objects.filter(thread__thread_id__startswith="dropped-")
    until(lambda: not Run.objects.filter(status="running").exists())
    time.sleep(4)  # the lease thread, the only one that ends by itself, looks every 3 s
    before = settled(server)
    asyncio.run(drop_all(server, person, count, [{"$sleep": 0.1}, *script]))
    until(lambda: runs.filter(status="success").count() == count, 60, "all runs end")
    assert all(len(stored(str(run.key))) == 14 for run in runs)
    try:
        given_back(server, before, 12)
    finally:
        print(f"{kind} {application}: {before} -> {settled(server)}")  # noqa: T201
        print(server.inside())  # noqa: T201
    assert "Traceback" not in server.said()


def unread(server: Server, person: Person, pieces: int, thread: str) -> socket.socket:
    """A client that posts, and reads nothing of a stream of `pieces` times 64 KiB."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30)
    client.connect(server.address)
    piece = {"type": "CUSTOM", "name": "blob", "value": {"$blob_kb": 64}}
    given = demo.run_input(thread, "go", {"script": [{"$repeat": pieces, "event": piece}]})
    client.sendall(request_bytes(server, person, "scripted", given))
    return client


def only_run(thread: str) -> Run:
    run = until(lambda: Run.objects.filter(thread__thread_id=thread).first())
    assert run is not None
    return run


def test_a_reader_who_does_not_read_holds_little_memory(own_server: Server, user: User) -> None:
    person = Person(own_server, user)
    warm = unread(own_server, person, 32, "warm")
    ended(str(only_run("warm").key))
    warm.close()
    process = psutil.Process(own_server.process.pid)
    before = process.memory_info().rss
    with unread(own_server, person, 512, "unread"):
        run = only_run("unread")
        highest = 0

        def over() -> bool:
            nonlocal highest
            highest = max(highest, process.memory_info().rss)
            run.refresh_from_db()
            return run.ended

        until(over, 40)
        time.sleep(0.3)  # what a server would go on buffering
        over()
    growth = (highest - before) / MIB
    print(f"slow reader {own_server.kind}: {run.bytes / MIB:.0f} MiB, grew {growth:.1f} MiB")  # noqa: T201
    assert run.status == Run.Status.SUCCESS
    assert run.bytes > 32 * MIB
    assert growth < 25


def test_a_reader_who_stalls_is_cut(impatient: Server, user: User) -> None:
    server = impatient
    person = Person(server, user)
    person.run("echo", "warm").done()
    client = unread(server, person, 160, "stalled")
    run = ended(str(only_run("stalled").key), 30)
    assert run.status == Run.Status.SUCCESS
    mine = client.getsockname()[1]
    process = psutil.Process(server.process.pid)

    def held() -> bool:
        return any(c.raddr[1:] == (mine,) for c in process.net_connections())

    client.settimeout(5)
    try:
        # The server lets go of the connection although the reader has not read a byte.
        until(lambda: not held(), 6, "the connection is closed")
    finally:
        rest = drain(client)
        print(f"stalled {server.kind}: {len(rest)} bytes had been sent")  # noqa: T201
    assert not rest.endswith(b"0\r\n\r\n")


def test_a_stream_is_cut_when_its_reader_may_see_no_more(impatient: Server, user: User) -> None:
    person = Person(impatient, user)
    reader = person.play(*said(trickle(400, 0.01))).events(5)
    user.is_active = False
    user.save()
    reader.done()
    assert reader.end == "aborted"
    assert reader.last["type"] != "RUN_FINISHED"
    assert ended(reader.run).status == Run.Status.SUCCESS


def test_a_stream_ends_with_the_password_it_was_opened_with(impatient: Server, user: User) -> None:
    person = Person(impatient, user)
    reader = person.play(*said(trickle(400, 0.01))).events(5)
    user.set_password("another")
    user.save()
    reader.done()
    assert reader.end == "aborted"
    assert ended(reader.run).status == Run.Status.SUCCESS


@pytest.mark.parametrize("application", [MOUNTED, PLAIN])
def test_an_early_end_has_no_final_chunk(
    servers: Servers, kind: str, database_url: str, user: User, application: str
) -> None:
    server = servers.start(kind, database_url, application=application)
    person = Person(server, user)
    done = person.run("echo", "hi").done()
    path = f"/agui/threads/{done.thread}/stream"
    aborted = raw_get(server, person, path)
    marked = raw_get(server, person, path, "AGUI-Resume: 1")
    for client in (aborted, marked):
        read_until(client, done.ids[-1].encode())
    assert server.terminate() < 10
    cut, clean = drain(aborted), drain(marked)
    assert not cut.endswith(b"0\r\n\r\n")
    assert b"aguiapp.resume" not in cut
    assert clean.endswith(b"0\r\n\r\n")
    assert f": aguiapp.resume {done.ids[-1]}".encode() in clean


def test_a_finished_run_ends_its_stream_cleanly(ada: Person) -> None:
    done = ada.run("echo", "hi").done()
    client = raw_get(ada.server, ada, f"/agui/threads/{done.thread}/stream?run={done.run}")
    found = read_until(client, b"0\r\n\r\n")
    assert b"RUN_FINISHED" in found
    client.close()


def test_a_dropped_reader_leaves_the_run_going(ada: Person) -> None:
    reader = ada.play(*said(trickle(40, 0.02))).events(5)
    reader.drop()
    assert ended(reader.run).status == Run.Status.SUCCESS
    resumed = ada.watch(reader.thread, reader.ids[3], run=reader.run).done()
    assert reader.logged[:4] + resumed.logged == stored(reader.run)
