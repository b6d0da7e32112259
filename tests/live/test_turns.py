"""One active run per thread, decided by the database: turns posted to several processes."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from django.contrib.auth.models import User
from django.db import connection
from websockets.sync.client import connect

from aguiapp.models import Run, Watcher
from project.management.commands import demo
from tests.live.servers import (
    Person,
    Reader,
    Server,
    Servers,
    delta,
    ended,
    legal,
    new_id,
    said,
    stored,
    trickle,
    until,
)

POSTS = 50


@pytest.fixture
def crowd(servers: Servers, database_url: str) -> list[Server]:
    """Four processes on PostgreSQL, without a layer between them; one on SQLite."""
    count = 4 if connection.vendor == "postgresql" else 1
    kinds = ("uvicorn", "daphne", "uvicorn", "daphne")[:count]
    room = {"AGUIAPP": {"QUEUE_RUNS": POSTS}}
    return [
        servers.shared(kind, database_url, f"crowd {n}", overrides=room)
        for n, kind in enumerate(kinds)
    ]


@pytest.fixture
def pair(servers: Servers, database_url: str) -> list[Server]:
    """A process to post to, and another one; both may be ended by the test."""
    return [servers.start("uvicorn", database_url), servers.start("daphne", database_url)]


def turn(person: Person, agent: str, thread: str, name: str, *script: Any) -> Reader:
    """A post that says its name."""
    given = demo.run_input(thread, name, {"script": list(script)})
    return person.post(agent, {**given, "runId": name})


def in_order(thread: str) -> list[Run]:
    """The thread's runs by their place; each is legal, and no position is missing."""
    runs = list(Run.objects.filter(thread__thread_id=thread, offset__isnull=False))
    runs.sort(key=lambda run: run.offset or 0)
    end = 0
    for run in runs:
        assert run.offset == end
        rows = stored(str(run.key))
        legal(rows)
        end += len(rows)
    return runs


def said_by_people(runs: list[Run]) -> list[str]:
    """What the echoes of the runs say, in order."""
    echoes = [json.loads(stored(str(run.key))[0])["input"]["messages"] for run in runs]
    return [message["content"] for messages in echoes for message in messages]


def test_of_many_posts_at_once_exactly_one_runs(crowd: list[Server], user: User) -> None:
    people = [Person(server, user) for server in crowd]
    hold = said(trickle(40, 0.05))
    thread = new_id()
    with ThreadPoolExecutor(POSTS) as pool:
        posts = pool.map(
            lambda n: turn(people[n % len(people)], "scripted", thread, f"r{n}", *hold).opened(),
            range(POSTS),
        )
        readers = list(posts)
    assert Counter(reader.status for reader in readers) == {200: 1, 409: POSTS - 1}
    (winner,) = [reader for reader in readers if reader.status == 200]
    refused = next(reader for reader in readers if reader.status == 409)
    assert json.loads(bytes(refused.done().raw))["error"]["code"] == "thread_busy"
    assert winner.done().last["type"] == "RUN_FINISHED"
    assert len(in_order(thread)) == 1


def test_of_many_posts_at_once_all_run_in_order(crowd: list[Server], user: User) -> None:
    people = [Person(server, user) for server in crowd]
    thread = new_id()
    with ThreadPoolExecutor(POSTS) as pool:
        posts = pool.map(
            lambda n: turn(people[n % len(people)], "queueing", thread, f"r{n}", *said(delta())),
            range(POSTS),
        )
        readers = [reader.done(60) for reader in posts]
    assert {(reader.status, reader.end) for reader in readers} == {(200, "clean")}
    runs = in_order(thread)
    assert {run.status for run in runs} == {"success"}
    assert sorted(said_by_people(runs)) == sorted(f"r{n}" for n in range(POSTS))
    assert [run.pk for run in runs] == sorted(run.pk for run in runs)
    for reader in readers:
        assert reader.logged == stored(reader.run)


def test_a_queue_goes_on_when_its_process_is_killed(pair: list[Server], user: User) -> None:
    here, there = (Person(server, user) for server in pair)
    thread = new_id()
    first = turn(here, "queueing", thread, "r1", *said(trickle(60_000, 0.01))).events(5)
    others = [
        turn(person, "queueing", thread, f"r{n}", *said(delta())).opened()
        for n, person in ((2, there), (3, here), (4, there))
    ]
    waiting = there.snapshot(first.thread)["queue"]
    assert [entry["runId"] for entry in waiting] == ["r2", "r3", "r4"]
    pair[0].kill()
    began = time.monotonic()
    assert others[0].done(20).last["type"] == "RUN_FINISHED"
    print(f"the queue went on after {time.monotonic() - began:.1f} s")  # noqa: T201
    assert others[2].done(20).last["type"] == "RUN_FINISHED"
    until(lambda: len(in_order(thread)) == 4, 20, "every turn ran")
    until(lambda: not Run.objects.filter(status__in=("queued", "running")).exists(), 20)
    runs = in_order(thread)
    assert [run.status for run in runs] == ["error", "success", "success", "success"]
    assert said_by_people(runs) == ["r1", "r2", "r3", "r4"]


def test_a_stopping_process_hands_its_queue_over(pair: list[Server], user: User) -> None:
    here, there = (Person(server, user) for server in pair)
    thread = new_id()
    first = turn(here, "queueing", thread, "r1", *said(trickle(30, 0.05))).events(5)
    waiting = turn(there, "queueing", thread, "r2", *said(delta())).opened()
    pair[0].terminate()
    assert first.done().last["type"] == "RUN_FINISHED"
    assert waiting.done(20).last["type"] == "RUN_FINISHED"
    runs = in_order(thread)
    assert [run.status for run in runs] == ["success", "success"]
    assert runs[0].lease_owner != runs[1].lease_owner


def test_a_turn_takes_over_from_another_process(crowd: list[Server], user: User) -> None:
    here, there = Person(crowd[0], user), Person(crowd[-1], user)
    thread = new_id()
    first = turn(here, "impulsive", thread, "r1", *said(delta(), {"$hang": True})).events(3)
    began = time.monotonic()
    second = turn(there, "impulsive", thread, "r2", *said(delta(message="m2"), message="m2"))
    assert second.done().last["type"] == "RUN_FINISHED"
    assert time.monotonic() - began < 3
    assert first.done().last["outcome"] == {"type": "cancelled"}
    assert said_by_people(in_order(thread)) == ["r1", "r2"]


def test_a_waiting_turn_is_cancelled_from_another_process(crowd: list[Server], user: User) -> None:
    here, there = Person(crowd[0], user), Person(crowd[-1], user)
    thread = new_id()
    first = turn(here, "queueing", thread, "r1", {"$hang": True}).events(1)
    second = turn(here, "queueing", thread, "r2").opened()
    assert there.cancel(second).json()["status"] == "cancelled"
    assert second.done(5).types == ["RUN_STARTED", "RUN_FINISHED"]
    assert second.end == "clean"
    assert second.ids == []
    here.cancel(first)
    first.done()
    assert len(in_order(thread)) == 1


def test_a_turn_waits_on_a_socket_too(crowd: list[Server], user: User) -> None:
    person = Person(crowd[0], user)
    thread = new_id()
    first = turn(person, "queueing", thread, "r1", *said(trickle(20, 0.02))).events(3)
    address = crowd[-1].url("/agui/agents/queueing/ws").replace("http", "ws")
    with connect(address, additional_headers=person.headers) as socket:
        given = demo.run_input(thread, "r2", {"script": said(delta(message="m2"), message="m2")})
        socket.send(json.dumps({**given, "runId": "r2"}))
        events = [json.loads(frame) for frame in socket]
        assert socket.close_code == 1000
    legal([json.dumps(event) for event in events])
    assert first.done().last["type"] == "RUN_FINISHED"
    run = Run.objects.get(run_id="r2", thread__thread_id=thread)
    rows = stored(str(run.key))
    assert [json.dumps(json.loads(row)) for row in rows] == [
        json.dumps(event) for event in events[-len(rows) :]
    ]


class TestReaders:
    def test_a_run_is_cancelled_when_its_last_reader_drops(
        self, crowd: list[Server], user: User
    ) -> None:
        person = Person(crowd[0], user)
        reader = turn(person, "attached", new_id(), "r1", *said(trickle(60_000, 0.02))).events(3)
        began = time.monotonic()
        reader.drop()
        run = ended(reader.run)
        assert time.monotonic() - began < 2.5
        assert run.status == "cancelled"
        legal(stored(reader.run))

    def test_a_reader_at_another_process_keeps_it(self, crowd: list[Server], user: User) -> None:
        here, there = Person(crowd[0], user), Person(crowd[-1], user)
        script = said(trickle(150, 0.02))
        reader = turn(here, "attached", new_id(), "r1", *script).events(3)
        watching = there.watch(reader.thread, run=reader.run).events(3)
        until(lambda: Watcher.objects.exists(), 5, "the other process says so")
        reader.drop()
        assert watching.done().last["type"] == "RUN_FINISHED"
        assert ended(reader.run).status == "success"
        until(lambda: not Watcher.objects.filter(thread__key=reader.thread).exists(), 5)

    def test_it_is_cancelled_when_the_reader_at_another_process_drops(
        self, crowd: list[Server], user: User
    ) -> None:
        here, there = Person(crowd[0], user), Person(crowd[-1], user)
        script = said(trickle(60_000, 0.02))
        reader = turn(here, "attached", new_id(), "r1", *script).events(3)
        watching = there.watch(reader.thread, run=reader.run).events(3)
        reader.drop()
        watching.events(len(watching.payloads) + 60)
        watching.drop()
        assert ended(reader.run, 5).status == "cancelled"

    def test_a_grace_is_waited_out(self, crowd: list[Server], user: User) -> None:
        person = Person(crowd[0], user)
        reader = turn(person, "forgiving", new_id(), "r1", *said(trickle(60_000, 0.02))).events(3)
        reader.drop()
        dropped = time.monotonic()
        run = ended(reader.run, 8)
        assert 2.5 < time.monotonic() - dropped < 5.5
        assert run.status == "cancelled"

    def test_a_socket_counts_as_a_reader(self, crowd: list[Server], user: User) -> None:
        person = Person(crowd[0], user)
        address = crowd[0].url("/agui/agents/attached/ws").replace("http", "ws")
        thread = new_id()
        with connect(address, additional_headers=person.headers) as socket:
            script = said(trickle(60_000, 0.02))
            socket.send(json.dumps(demo.run_input(thread, "go", {"script": script})))
            for _ in range(80):
                socket.recv()
        run = Run.objects.get(thread__thread_id=thread)
        assert ended(str(run.key), 5).status == "cancelled"


def test_a_run_whose_time_is_up_is_ended_even_when_its_agent_blocks(
    servers: Servers, kind: str, database_url: str, user: User
) -> None:
    server = servers.start(kind, database_url, overrides={"AGUIAPP": {"LEASE_SECONDS": 3}})
    person = Person(server, user)
    script = said(delta(), {"$sleep": 0.2}, {"$block_s": 8}, delta("late"))
    reader = turn(person, "hasty", new_id(), "r1", *script).events(3)
    began = time.monotonic()
    run = ended(reader.run, 8)
    assert time.monotonic() - began < 6.5
    assert (run.status, run.error_code) == ("error", "run_timeout")
    rows = stored(reader.run)
    legal(rows)
    assert reader.done(20).logged == rows
    assert stored(reader.run) == rows


def test_a_run_may_be_started_without_a_stream(crowd: list[Server], user: User) -> None:
    person = Person(crowd[0], user)
    given = demo.run_input(new_id(), "go", {"script": said(delta())})
    headers = {**person.headers, "Prefer": "respond-async"}
    url = crowd[0].url("/agui/agents/scripted/")
    answer = httpx.post(url, json=given, headers=headers, timeout=10)
    assert answer.status_code == 202
    found = answer.json()
    ended(found["run"])
    lines = person.get(found["urls"]["events"]).text.splitlines()
    assert lines == stored(found["run"])
