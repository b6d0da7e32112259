"""Sockets: who may open one, what is told to whom it is closed on, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from django.contrib.auth.models import User
from django.test import Client as Browser
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from aguiapp.models import Participant, Run, Thread
from project.management.commands import demo
from tests.bugs.crowd import (
    MIB,
    client_of,
    dice,
    drop_socket,
    given,
    nothing_left,
    open_socket,
    read_frames,
    rounds,
    said,
    script_of,
)
from tests.bugs.world import World, case, sibling
from tests.live.servers import (
    KINDS,
    Person as Client,
    Server,
    Servers,
    delta,
    ended,
    stored,
    trickle,
    until,
)
from tests.live.test_sockets import cookie, drained, run_of
from tests.scripts import follow, opening, row


def heard(socket: ClientConnection) -> list[str]:
    """The frames up to the close, which must come."""
    frames: list[str] = []
    try:
        while True:
            frames.append(str(socket.recv(timeout=5)))
    except ConnectionClosed:
        return frames
    except TimeoutError:
        pytest.fail(f"the socket was not closed; its last frame: {frames[-1:]}")


def closing(socket: ClientConnection) -> tuple[str, int | None]:
    """The code of the error frame, "" without one, and the close code."""
    frames = [json.loads(frame) for frame in heard(socket)]
    codes = [frame["code"] for frame in frames if frame["type"] == "aguiapp.error"]
    return codes[-1] if codes else "", socket.close_code


@case("WSK-01")
def test_a_stop_beside_the_socket_is_answered_at_once(w: World, ada: Client) -> None:
    """The plain socket carries its run alone; a stop comes beside it, also when it was dropped."""
    with open_socket(ada.server, ada.headers) as socket:
        socket.send(json.dumps(given("t1", script_of(w), "r1")))
        assert json.loads(socket.recv(timeout=20))["type"] == "RUN_STARTED"
        run = run_of("t1")
        path = f"/agui/threads/{run.thread.key}/runs/{run.key}/cancel"
        started = time.monotonic()
        answer = httpx.post(ada.server.url(path), headers=ada.headers)
        took = time.monotonic() - started
        assert answer.json()["status"] == "cancelled"
        assert took < 0.9
        frames = drained(socket)
        assert socket.close_code == 1000
    assert json.loads(frames[-1])["outcome"] == {"type": "cancelled"}
    with open_socket(ada.server, ada.headers) as socket:
        socket.send(json.dumps(given("t1", script_of(w), "r2")))
        # A heal may come ahead of the run itself.
        while json.loads(socket.recv(timeout=20)).get("runId") != "r2":
            pass
        drop_socket(socket)
    second = Run.objects.select_related("thread").get(run_id="r2")
    path = f"/agui/threads/{second.thread.key}/runs/{second.key}/cancel"
    assert httpx.post(ada.server.url(path), headers=ada.headers).json()["status"] == "cancelled"


@case("WSK-02")
@pytest.mark.parametrize("kind", KINDS)
def test_dropped_sockets_are_forgotten_at_once(w: World, server: Server, ada: Client) -> None:
    def stream_and_drop(number: int) -> None:
        with open_socket(server, ada.headers) as socket:
            socket.send(json.dumps(given(f"dropped-{number}", said_for(1.5))))
            socket.recv(timeout=20)
            socket.recv(timeout=20)
            drop_socket(socket)

    def said_for(seconds: float) -> list[Any]:
        return [*said("x"), *said("y", name="m2"), {"$sleep": seconds}]

    stream_and_drop(-1)
    until(lambda: Run.objects.get().ended)
    with nothing_left(server):
        for number in range(rounds(15, 100)):
            stream_and_drop(number)
        dropped = time.monotonic()
        streams = ("pump", "RunConsumer", "_run", "websocket")

        def forgotten() -> bool:
            names = server.inside()["tasks"]
            return not [name for name in names if any(part in name for part in streams)]

        until(forgotten, 2, "no task of a socket is left")
        assert time.monotonic() - dropped < 2
        until(lambda: not Run.objects.exclude(status="success").exists(), 30)
    log = server.said()
    assert "took too long" not in log
    assert "Traceback" not in log
    assert all(len(stored(str(run.key))) == 8 for run in Run.objects.all())


@case("WSK-04")
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example"]
)
def test_another_sites_page_gets_no_socket_and_starts_no_run(
    w: World, server: Server, user: User, origin: str
) -> None:
    headers = {**cookie(user), "Origin": origin}
    with pytest.raises(InvalidStatus) as caught, open_socket(server, headers, "echo"):
        pass
    assert caught.value.response.status_code == 403
    for sent in (headers, cookie(user)):
        body = demo.run_input("t1", "hi", {})
        refused = httpx.post(server.url("/agui/agents/echo/"), json=body, headers=sent)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "csrf_failed"
        assert refused.headers["Content-Type"] == "application/json"
    assert not Run.objects.exists()
    # No browser: it sends no Origin, and has nothing that another site's page could use.
    with open_socket(server, cookie(user), "echo") as socket:
        socket.send(json.dumps(demo.run_input("t1", "hi", {})))
        assert json.loads(drained(socket)[-1])["type"] == "RUN_FINISHED"


def deactivate(user: User, thread: Thread, session: Browser) -> None:
    User.objects.filter(pk=user.pk).update(is_active=False)


def log_out(user: User, thread: Thread, session: Browser) -> None:
    session.logout()


def take_away(user: User, thread: Thread, session: Browser) -> None:
    Participant.objects.filter(user=user).delete()


LOSSES = {
    "deactivated": (deactivate, 4401),
    "logged out": (log_out, 4401),
    "thread taken away": (take_away, 4404),
}


@case("WSK-05")
@pytest.mark.parametrize("loss", LOSSES)
def test_who_lost_the_right_is_shown_no_more(
    w: World, impatient: Server, user: User, other: User, loss: str
) -> None:
    """Bob is on ada's thread by his session, and loses it; she goes on."""
    lose, code = LOSSES[loss]
    ada = Client(impatient, user)
    first = ada.run("echo", "hi", "shared").done()
    thread = Thread.objects.get(key=first.thread)
    Participant.objects.create(thread=thread, user=other, role="member")
    browser = Browser()
    browser.force_login(other)
    headers = {"Cookie": f"sessionid={browser.cookies['sessionid'].value}"}
    with open_socket(impatient, headers, query=f"?thread={first.thread}") as socket:
        socket.send(json.dumps(given("shared", said_long(), "r2")))
        while json.loads(socket.recv(timeout=20))["type"] != "TEXT_MESSAGE_CONTENT":
            pass
        lose(other, thread, browser)
        lost = time.monotonic()
        frames = heard(socket)
        assert time.monotonic() - lost < 5
        assert json.loads(frames[-1])["type"] != "RUN_FINISHED"
        closed = socket.close_code
    assert ended(str(Run.objects.get(run_id="r2").key)).status == "success"
    # Not 1012, which tells a client to come back at once.
    assert closed == code


def said_long() -> list[Any]:
    """Half a minute's talk in small pieces would be too long; two seconds of it."""
    pieces = {"$repeat": 100, "events": [delta(), {"$sleep": 0.02}]}
    return [*said()[:1], pieces, *said()[-1:]]


@case("WSK-07")
@pytest.mark.parametrize("kind", KINDS)
def test_close_codes_say_what_to_do(
    w: World, own_server: Server, servers: Servers, database_url: str, user: User
) -> None:
    """1012: come back elsewhere; 1013: come back later; 4401: sign in; 1000: it is all said."""
    person = Client(own_server, user)
    driver = person.at(servers.shared("uvicorn", database_url))
    with open_socket(own_server, person.headers, "unready") as socket:
        socket.send(json.dumps(demo.run_input("t1", "hi", {})))
        assert closing(socket) == ("agent_not_ready", 1013)
    with open_socket(own_server, {}) as socket:
        assert closing(socket) == ("unauthenticated", 4401)
    body = given("elsewhere", [*said("x"), {"$sleep": 6}], "r1")
    reader = driver.post("scripted", body).events(4)
    with open_socket(own_server, person.headers) as socket:
        socket.send(json.dumps(body))  # attaches to the run of another process
        frames = [str(socket.recv(timeout=20)) for _ in range(4)]
        own_server.process.terminate()
        assert closing(socket) == ("", 1012)
    own_server.process.wait(15)
    assert frames == reader.logged[:4]
    driver.cancel(reader)
    reader.done()


BAD: dict[str, str | bytes] = {
    "unfinished": '{"op":"run","input":',
    "binary": b"\xff\xfe",
    "deep": "[" * 20_000 + "]" * 20_000,
    "null": "null",
    "text": '"str"',
    "unknown": '{"op":"nope"}',
    "empty": "",
}


@case("WSK-08")
def test_bad_frames_are_answered_and_cost_nobody_else(
    w: World, server: Server, ada: Client
) -> None:
    """The plain socket closes with 4400 behind its answer: there is no second frame on it."""
    neighbour = ada.play(*said()[:1], trickle(200, 0.01), *said()[-1:]).events(3)
    for name, frame in BAD.items():
        with open_socket(server, ada.headers) as socket:
            socket.send(frame)
            code, closed = closing(socket)
            assert (bool(code), closed) == (True, 4400), name
    assert Run.objects.count() == 1
    assert neighbour.done().last["type"] == "RUN_FINISHED"
    assert neighbour.logged == stored(neighbour.run)
    assert "Traceback" not in server.said()


@sibling("WSK-08")
@pytest.mark.parametrize("megabytes", [5, 20, 100])
def test_frames_too_large_are_refused_in_bounded_memory(
    w: World, server: Server, ada: Client, megabytes: int
) -> None:
    """1009 by the server's own limit, or 4413 by ours; never the memory of the whole frame."""
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    neighbour = ada.play(*said()[:1], trickle(60, 0.02), *said()[-1:]).events(3)
    with open_socket(server, ada.headers) as socket:
        with suppress(ConnectionClosed, OSError):
            socket.send('{"threadId":"' + "x" * (megabytes * MIB))
        highest = process.memory_info().rss
        with suppress(ConnectionClosed):
            drained(socket)
        closed = socket.close_code
    highest = max(highest, process.memory_info().rss)
    # Where the server resets the connection under a client that still sends, no code arrives.
    assert closed in (1009, 1006, 4400, 4413)
    assert highest - before < 64 * MIB
    assert Run.objects.count() == 1
    assert neighbour.done().logged == stored(neighbour.run)


@case("WSK-09")
def test_foreign_and_unknown_threads_are_told_apart_by_nobody(
    w: World, own_server: Server, user: User, other: User
) -> None:
    ada, bob = Client(own_server, user), Client(own_server, other)
    mine = ada.run("echo", "hi", "mine").done()
    answers = []
    for key in (mine.thread, mine.thread[:-4] + "0000"):
        with open_socket(own_server, bob.headers, "echo", f"?thread={key}") as socket:
            socket.send(json.dumps(demo.run_input("mine", "hi", {})))
            frames = drained(socket)
            answers.append((frames, socket.close_code))
    assert answers[0] == answers[1]
    assert (json.loads(answers[0][0][0])["code"], answers[0][1]) == ("not_found", 4404)
    for query in (f"?thread={mine.thread}", "?thread=no-key", ""):
        with open_socket(own_server, {}, "echo", query) as socket:
            assert closing(socket) == ("unauthenticated", 4401)
    with open_socket(own_server, bob.headers, "nobody") as socket:
        assert closing(socket) == ("not_found", 4404)
    for path in ("/ws/threads/foreign/", f"/agui/threads/{mine.thread}/wss"):
        url = own_server.url(path)
        with pytest.raises(InvalidStatus) as caught, connect_to(url, bob.headers):
            pass
        assert caught.value.response.status_code == 403
    assert Run.objects.count() == 1
    log = own_server.said()
    assert "Traceback" not in log
    assert "ERROR" not in log


def connect_to(url: str, headers: dict[str, str]) -> ClientConnection:
    """A socket to any address."""
    from websockets.sync.client import connect

    return connect(url.replace("http", "ws"), additional_headers=headers, proxy=None)


@case("WSK-11")
async def test_what_comes_right_behind_the_attaching_is_delivered(w: World) -> None:
    """A follower that attaches, and an event a moment later: by table, and by the tail."""
    from aguiapp import feed, store
    from tests.scripts import writer

    chance = dice(w)
    opened = await store.call(store.open_run, opening())
    run, token = opened.run, opened.run.lease_token or 0
    tail = feed.current().open_tail(opened.thread, run)
    for seq in range(1, rounds(150, 1000) + 1):
        moment = chance.uniform(0, 0.005)
        after = seq - 1

        async def first(after: int = after) -> str:
            async for payload in follow(opened.thread, after, run):
                return payload
            return ""

        waiting = asyncio.ensure_future(first())
        await asyncio.sleep(moment)
        rows = [row(seq, {"type": "CUSTOM", "name": "n", "value": seq})]
        assert await store.call(writer.commit, [writer.Job(run.pk, token, rows)]) == [None]
        tail.publish(rows)
        async with asyncio.timeout(0.9):  # before any poll could have helped
            assert json.loads(await waiting)["value"] == seq
    tail.close()


@sibling("WSK-11")
def test_whoever_attaches_as_the_run_starts_sees_all_of_it(
    w: World, server: Server, ada: Client
) -> None:
    """By socket on the same post, and by stream on the thread."""
    chance = dice(w)

    async def many() -> list[tuple[list[str], list[str]]]:
        quiet = [ada.run("echo", "warm", f"t{n}").done() for n in range(rounds(12, 200))]
        async with client_of(ada) as client:
            return await asyncio.gather(*(one(client, n, reader) for n, reader in enumerate(quiet)))

    async def one(client: httpx.AsyncClient, n: int, quiet: Any) -> tuple[list[str], list[str]]:
        url = server.url(f"/agui/threads/{quiet.thread}/stream?after={quiet.ids[-1]}")
        raw = bytearray()
        async with client.stream("GET", url) as response:
            await asyncio.sleep(chance.uniform(0, 0.005))
            url = server.url("/agui/agents/scripted/")
            posted = asyncio.ensure_future(client.post(url, json=given(f"t{n}", said("x"))))
            async for chunk in response.aiter_raw():
                raw += chunk
                if (
                    read_frames(bytes(raw))[1]
                    and '"RUN_FINISHED"' in read_frames(bytes(raw))[1][-1]
                ):
                    break
        return read_frames(bytes(raw))[1], read_frames((await posted).content)[1]

    for watched, own in asyncio.run(many()):
        assert len(own) == 5
        assert watched == own
