"""Servers that die, and servers that are told to stop: no run is lost, none stays open."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from django.contrib.auth.models import User
from websockets.sync.client import connect

from aguiapp.models import Run
from project.management.commands import demo
from tests.live.servers import (
    KINDS,
    Person,
    Reader,
    Server,
    Servers,
    delta,
    ended,
    legal,
    said,
    stored,
    trickle,
    until,
)
from tests.live.test_sockets import drained

#: Events that the client has got when its server is killed.
MOMENTS = (0, 1, 2, 40, 400)


def long_run(person: Person, thread: str, *, tool: bool = False) -> Reader:
    """A run that goes on for a minute, with a step and reasoning or a tool call open."""
    opened = [{"type": "STEP_STARTED", "stepName": "work"}]
    if tool:
        opened.append({"type": "TOOL_CALL_START", "toolCallId": "c1", "toolCallName": "look"})
        opened.append({"type": "TOOL_CALL_ARGS", "toolCallId": "c1", "delta": '{"half": '})
    return person.play(*opened, *said(trickle(60_000, 0.001)), thread=thread)


@pytest.mark.parametrize("kind", KINDS)
def test_kill_9_loses_nothing_that_anybody_saw(
    servers: Servers, kind: str, database_url: str, user: User
) -> None:
    server = servers.start(kind, database_url)
    for moment in MOMENTS:
        thread = f"killed-{moment}"
        reader = long_run(Person(server, user), thread, tool=moment == 40).opened().events(moment)
        server.kill()
        reader.done()
        assert reader.end == "aborted"
        seen, before = reader.logged, stored(reader.run)
        assert len(seen) >= moment
        assert before[: len(seen)] == seen
        server = servers.start(kind, database_url)
        again = Person(server, user).run("echo", "still there?", thread).done()
        assert (again.status, again.end, again.last["type"]) == (200, "clean", "RUN_FINISHED")
        died = ended(reader.run)
        rows = stored(reader.run)
        assert rows[: len(before)] == before
        assert (died.status, died.error_code) == (Run.Status.ERROR, "orphaned")
        last = json.loads(rows[-1])
        assert (last["type"], last["code"]) == ("RUN_ERROR", "orphaned")
        types = [json.loads(row)["type"] for row in rows]
        assert types.count("TEXT_MESSAGE_START") == types.count("TEXT_MESSAGE_END")
        assert types.count("STEP_STARTED") == types.count("STEP_FINISHED")
        assert "TOOL_CALL_END" not in types
        legal(rows)
        snapshot = Person(server, user).snapshot(again.thread)
        asked = [m["content"] for m in snapshot["messages"] if m["role"] == "user"]
        assert asked == ["play", "still there?"]


@pytest.mark.parametrize("kind", KINDS)
def test_watchers_elsewhere_see_the_end_of_a_killed_servers_run(
    servers: Servers, kind: str, database_url: str, user: User
) -> None:
    other = servers.shared("uvicorn", database_url)
    server = servers.start(kind, database_url)
    reader = long_run(Person(server, user), "watched").events(50)
    watcher = Person(other, user).watch(reader.thread, run=reader.run).events(50)
    server.kill()
    killed = time.monotonic()
    watcher.done(20)
    assert time.monotonic() - killed < 20
    assert (watcher.end, watcher.last["code"]) == ("clean", "orphaned")
    assert watcher.logged == stored(reader.run)
    reader.done()


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_process_ends_lost_runs_before_anybody_asks_for_them(
    servers: Servers, kind: str, database_url: str, user: User
) -> None:
    server = servers.start(kind, database_url)
    reader = long_run(Person(server, user), "asleep").events(3)
    server.kill()
    again = servers.start(kind, database_url)
    if kind == "daphne":  # it tells its applications nothing of its start
        assert httpx.get(again.url("/admin/login/"), timeout=10).status_code == 200
    assert ended(reader.run).error_code == "orphaned"


def cleaning_up() -> list[object]:
    """A run that says so when it is cancelled."""
    last = {"type": "CUSTOM", "name": "cleaned up", "value": 1}
    return [{"$on_cancel": [last]}, *said(trickle(60_000, 0.005))]


def test_sigterm_ends_a_run_legally_and_lets_it_clean_up(own_server: Server, user: User) -> None:
    person = Person(own_server, user)
    reader = person.play(*cleaning_up()).events(20)
    watcher = person.watch(reader.thread, run=reader.run).events(20)
    resuming = person.watch(reader.thread, resume="1").events(20)
    with connect(
        own_server.url("/agui/agents/scripted/ws").replace("http", "ws"),
        additional_headers=person.headers,
    ) as socket:
        given = demo.run_input("by socket", "play", {"script": cleaning_up()})
        socket.send(json.dumps(given))
        frames = [socket.recv() for _ in range(20)]
        with ThreadPoolExecutor(1) as pool:  # a reader that keeps reading while the server stops
            rest = pool.submit(drained, socket)
            took = own_server.terminate()
            frames += rest.result()
        assert socket.close_code == 1000
    print(f"SIGTERM {own_server.kind}: {took:.1f} s")  # noqa: T201
    assert took < 10
    for follower in (reader, watcher, resuming):
        follower.done()
        assert follower.end == "clean"
        assert "cleaned up" in follower.payloads[-3] + follower.payloads[-2]
        assert (follower.last["type"], follower.last["code"]) == ("RUN_ERROR", "shutdown")
    rows = stored(reader.run)
    assert reader.logged == watcher.logged == rows
    legal(rows)
    assert ended(reader.run).error_code == "shutdown"
    assert json.loads(frames[-1])["code"] == "shutdown"
    assert resuming.comments[-1] == f"aguiapp.resume {resuming.ids[-1]}"
    assert "Traceback" not in own_server.said()


def test_sigterm_waits_for_a_run_that_is_nearly_done(own_server: Server, user: User) -> None:
    person = Person(own_server, user)
    reader = person.play(*said(trickle(20, 0.05))).events(5)
    assert own_server.terminate() < 10
    assert (reader.done().end, reader.last["type"]) == ("clean", "RUN_FINISHED")
    assert ended(reader.run).status == Run.Status.SUCCESS


def test_a_stopping_server_takes_no_new_run(own_server: Server, user: User) -> None:
    person = Person(own_server, user)
    reader = person.play(*said(trickle(60_000, 0.01)), thread="old").events(3)
    own_server.process.terminate()

    def refused() -> bool:
        try:
            given = demo.run_input("new", "go", {})
            url = own_server.url("/agui/agents/echo/")
            answer = httpx.post(url, json=given, headers=person.headers, timeout=10)
        except httpx.ConnectError:
            return True
        return answer.status_code == 503

    until(refused, 3)
    own_server.process.wait(10)
    assert reader.done().last["code"] == "shutdown"


def test_an_agent_that_ignores_the_shutdown_is_ended_too(own_server: Server, user: User) -> None:
    person = Person(own_server, user)
    stubborn = [
        {"$on_cancel": [{"$sleep": 60}, *said(delta("late"))]},
        *said(delta(), {"$hang": True}),
    ]
    reader = person.play(*stubborn).events(3)
    assert own_server.terminate() < 10
    assert (reader.done().end, reader.last["code"]) == ("clean", "shutdown")
    assert "late" not in "".join(stored(reader.run))


def test_a_reader_of_a_quiet_thread_is_aborted_unless_it_resumes(
    own_server: Server, user: User
) -> None:
    person = Person(own_server, user)
    done = person.run("echo", "hi").done()
    plain = person.watch(done.thread).events(len(done.ids))
    resuming = person.watch(done.thread, resume="1").events(len(done.ids))
    behind = person.watch(done.thread, after=done.ids[0]).events(len(done.ids) - 1)
    took = own_server.terminate()
    assert took < 10
    assert plain.done().end == "aborted"
    for reader in (resuming, behind):
        assert reader.done().end == "clean"
        assert reader.comments[-1] == f"aguiapp.resume {done.ids[-1]}"
