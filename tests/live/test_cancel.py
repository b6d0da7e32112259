"""Stop ends a run for everybody, within a second, from any process."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.contrib.auth.models import User

from aguiapp.models import Run
from tests.live.servers import Person, Servers, delta, ended, legal, said, stored, until


def check_cancelled(reader, rows: list[str]) -> None:
    legal(rows)
    last = json.loads(rows[-1])
    assert (last["type"], last["outcome"]["type"]) == ("RUN_FINISHED", "cancelled")
    assert reader.done().logged == rows
    assert reader.end == "clean"
    assert ended(reader.run).status == Run.Status.CANCELLED


def test_stop_ends_a_hanging_run_within_a_second(ada: Person) -> None:
    tool = {"type": "TOOL_CALL_START", "toolCallId": "c", "toolCallName": "look"}
    reader = ada.play(tool, *said(delta("x"), {"$hang": True})).events(4)
    watcher = ada.watch(reader.thread, run=reader.run).events(4)
    started = time.monotonic()
    answer = ada.cancel(reader)
    took = time.monotonic() - started
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert took < 1
    rows = stored(reader.run)
    check_cancelled(reader, rows)
    assert watcher.done().logged == rows
    types = [json.loads(row)["type"] for row in rows]
    assert types[-4:] == ["TEXT_MESSAGE_END", "TOOL_CALL_END", "TOOL_CALL_RESULT", "RUN_FINISHED"]
    again = ada.cancel(reader)
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")
    assert stored(reader.run) == rows
    print(f"cancel {ada.server.kind}: {took * 1000:.0f} ms")  # noqa: T201


@pytest.mark.parametrize("flavour", ["hang", "ignores", "busy"])
def test_stop_from_another_process(
    servers: Servers, kind: str, database_url: str, user: User, flavour: str
) -> None:
    here = Person(servers.shared(kind, database_url), user)
    other = {"daphne": "uvicorn", "uvicorn": "daphne"}[kind]
    there = here.at(servers.shared(other, database_url))
    late = [{"$sleep": 2}, *said(delta("late"), message="m2")]
    script = {
        "hang": said(delta("x"), {"$hang": True}),
        "ignores": [{"$on_cancel": late}, *said(delta("x"), {"$hang": True})],
        "busy": said({"$forever": [delta("x")]}),
    }[flavour]
    reader = here.play(*script).events(3)
    started = time.monotonic()
    answer = there.cancel(reader)
    took = time.monotonic() - started
    print(f"cancel from another process, {kind}, {flavour}: {took * 1000:.0f} ms")  # noqa: T201
    assert answer.json()["status"] == "cancelled"
    assert took < 1.2
    rows = stored(reader.run)
    check_cancelled(reader, rows)
    assert stored(reader.run) == rows
    assert "late" not in "".join(rows)


@pytest.mark.parametrize("agent", ["stubborn", "plodding"])
def test_an_agent_that_does_not_listen_is_not_heard_again(ada: Person, agent: str) -> None:
    reader = ada.run(agent, "go", "deaf").events(3)
    started = time.monotonic()
    assert ada.cancel(reader).json()["status"] == "cancelled"
    assert time.monotonic() - started < 1
    rows = stored(reader.run)
    check_cancelled(reader, rows)
    again = ada.run("echo", "next", "deaf").done()
    assert again.last["type"] == "RUN_FINISHED"
    if agent == "stubborn":
        until(lambda: Run.objects.get(key=reader.run).findings, 6, "what came late is a finding")
    assert stored(reader.run) == rows


@pytest.mark.parametrize("awaits", [True, False])
def test_an_agent_is_told_wherever_it_is(ada: Person, awaits: bool) -> None:
    last = {"type": "CUSTOM", "name": "cleaned up", "value": 1}
    pieces = [delta("x"), {"$sleep": 60}] if awaits else [delta("x")]
    chatty = {"$repeat": 10_000_000, "events": pieces}
    reader = ada.play({"$on_cancel": [last]}, *said(chatty)).events(3)
    ada.cancel(reader)
    rows = stored(reader.run)
    assert "cleaned up" in rows[-3]
    check_cancelled(reader, rows)


def test_two_stops_at_once_agree(ada: Person) -> None:
    reader = ada.play(*said(delta("x"), {"$hang": True})).events(3)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ada.cancel, reader) for _ in range(4)]
        assert {a.result().json()["status"] for a in answers} == {"cancelled"}
    check_cancelled(reader, stored(reader.run))


def test_an_agent_that_blocks_the_loop_is_ended_when_it_lets_go(ada: Person) -> None:
    reader = ada.play(*said(delta("x"), {"$sleep": 0.2}, {"$block_s": 1.5}, delta("late"))).events(
        3
    )
    time.sleep(0.4)
    answer = ada.cancel(reader)
    assert answer.json()["status"] in ("cancelled", "success")
    rows = stored(reader.run)
    legal(rows)
    assert reader.done().logged == rows


def test_a_blocked_process_is_overruled_by_another(
    servers: Servers, kind: str, database_url: str, user: User
) -> None:
    here = Person(servers.shared(kind, database_url), user)
    other = {"daphne": "uvicorn", "uvicorn": "daphne"}[kind]
    there = here.at(servers.shared(other, database_url))
    reader = here.play(*said(delta("x"), {"$sleep": 0.2}, {"$block_s": 3}, delta("late"))).events(3)
    watcher = there.watch(reader.thread, run=reader.run).events(3)
    time.sleep(0.3)
    started = time.monotonic()
    answer = there.cancel(reader)
    took = time.monotonic() - started
    assert answer.json()["status"] == "cancelled"
    assert took < 1.5
    rows = stored(reader.run)
    assert watcher.done(5).logged == rows
    assert time.monotonic() - started < 2.7
    check_cancelled(reader, rows)
    assert stored(reader.run) == rows
    assert "late" not in "".join(rows)


def test_a_stranger_stops_nothing(ada: Person, other: User) -> None:
    reader = ada.play(*said(delta("x"), {"$hang": True})).events(3)
    bob = Person(ada.server, other)
    assert bob.cancel(reader).status_code == 404
    assert Run.objects.get(key=reader.run).status == Run.Status.RUNNING
    ada.cancel(reader)
    check_cancelled(reader, stored(reader.run))


def test_a_stopped_thread_takes_a_new_run_at_once(ada: Person) -> None:
    reader = ada.play({"$hang": True}, thread="next").events(1)
    ada.cancel(reader)
    assert ada.run("echo", "next", "next").done().last["type"] == "RUN_FINISHED"
    reader.done()
