"""Two at once, and the same one twice."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError
from django.utils import timezone

from aguiapp import store
from aguiapp.models import Run, RunEvent, Thread
from tests.bugs.crowd import given, open_socket, rounds, said, script_of
from tests.bugs.world import World, case, sibling
from tests.live.servers import (
    Person as Client,
    Servers,
    ended,
    gapless,
    legal as legal_texts,
    stored as rows_of,
)
from tests.live.test_sockets import drained
from tests.scripts import legal, opening, registered, row, run_input, stored, text, writer


@pytest.fixture
def two(servers: Servers, database_url: str, user: User) -> tuple[Client, Client]:
    """A person at two processes."""
    here = Client(servers.shared("daphne", database_url), user)
    return here, here.at(servers.shared("uvicorn", database_url))


def at_once(*posts: Any) -> list[Any]:
    """Call them at the same moment, each in a thread."""
    together = threading.Barrier(len(posts))

    def one(post: Any) -> Any:
        together.wait(10)
        return post()

    with ThreadPoolExecutor(len(posts)) as pool:
        return list(pool.map(one, posts))


@case("CON-01")
def test_one_of_two_turns_at_once_is_told_that_the_thread_is_busy(
    w: World, two: tuple[Client, Client]
) -> None:
    """409 before any stream; the database decides, for the two are two processes."""
    for number in range(rounds(4, 50)):
        first, second = (
            given(f"t{number}", script_of(w, sleep=0.2), case["runId"])
            for case in w.input["parallel"]
        )
        readers = at_once(
            lambda given=first: two[0].post("scripted", given).done(),
            lambda given=second: two[1].post("scripted", given).done(),
        )
        assert sorted(reader.status for reader in readers) == [200, 409]
        won = next(reader for reader in readers if reader.status == 200)
        lost = next(reader for reader in readers if reader.status == 409)
        refusal = json.loads(bytes(lost.raw))["error"]
        assert refusal["code"] == "thread_busy"
        assert refusal["details"]["run"] == won.run
        assert won.logged == rows_of(won.run)
        assert Run.objects.filter(thread__thread_id=f"t{number}").count() == 1
    assert Thread.objects.count() == number + 1


@sibling("CON-01")
async def test_of_twenty_turns_at_once_one_runs(w: World) -> None:
    bodies = [run_input("t1", f"r{n}", script=[{"$sleep": 0.5}]) for n in range(20)]
    replies = await asyncio.gather(*(w.ada.run(body) for body in bodies))
    assert Counter(reply.status for reply in replies) == {200: 1, 409: 19}
    assert {reply.code for reply in replies if reply.status == 409} == {"thread_busy"}
    assert await Run.objects.acount() == 1
    assert (await w.ada.run(run_input("t1", "r99", script=[]))).status == 200


@case("CON-02")
async def test_the_same_post_again_is_the_same_run(w: World) -> None:
    """One after the other, at once, on every way out; the agent is called once."""
    called: list[str] = []

    async def counting(run: Any) -> AsyncIterator[Any]:
        called.append(run.input["runId"])
        for event in text("m1", "once"):
            yield event
            await asyncio.sleep(0.02)

    first, second = w.input["parallel"]
    assert first == second
    with registered("counting", counting):
        replies = await asyncio.gather(*(w.ada.run(first, "counting") for _ in range(8)))
        replies.append(await w.ada.run(second, "counting"))
        document = await w.ada.run(first, "counting", accept="application/json")
        changed = await w.ada.run({**first, "state": {"other": 1}}, "counting")
        moved = await w.ada.run(first, "scripted")
        # Order and spelling of the JSON are nothing that makes another input.
        shuffled = json.dumps(dict(reversed(first.items())), indent=3).encode()
        replies.append(await w.ada.run(shuffled, "counting"))
    assert called == ["r1"]
    rows = await stored()
    for reply in replies:
        assert reply.status == 200
        assert reply.logged == rows
        assert reply.headers["AGUI-Run"] == replies[0].headers["AGUI-Run"]
        legal(reply.events)
    assert [json.loads(row) for row in rows] == document.events
    assert (changed.status, changed.code) == (409, "run_id_taken")
    assert (moved.status, moved.code) == (409, "run_id_taken")
    assert await Run.objects.acount() == 1
    # The same ids of somebody else are another run.
    with registered("counting", counting):
        assert (await w.bob.run(first, "counting")).status == 200
    assert called == ["r1", "r1"]


@sibling("CON-02")
def test_the_same_post_at_two_processes_by_two_transports(
    w: World, two: tuple[Client, Client]
) -> None:
    here, there = two

    def by_socket(body: dict[str, Any]) -> list[str]:
        with open_socket(there.server, there.headers) as socket:
            socket.send(json.dumps(body))
            return drained(socket)

    for number in range(3):
        body = given(f"t{number}", [{"$sleep": 0.1}, *said("x")], "r1")
        stream, frames, second = at_once(
            lambda body=body: here.post("scripted", body).done(),
            lambda body=body: by_socket(body),
            lambda body=body: there.post("scripted", body).done(),
        )
        rows = rows_of(stream.run)
        assert stream.logged == frames == second.logged == rows
        assert Run.objects.filter(thread__thread_id=f"t{number}").count() == 1


@sibling("CON-02")
def test_the_same_post_after_a_crash_replays_and_starts_nothing(
    w: World, servers: Servers, kind: str, database_url: str, user: User
) -> None:
    other = {"daphne": "uvicorn", "uvicorn": "daphne"}[kind]
    own = servers.launch(kind, database_url)
    there = Client(servers.shared(other, database_url), user)
    here = there.at(own.ready())
    body = given("crashed", [*said("x"), {"$hang": True}], "r1")
    reader = here.post("scripted", body).events(4)
    own.kill()
    again = there.post("scripted", body).done()
    assert (again.status, again.end, again.run) == (200, "clean", reader.run)
    rows = rows_of(reader.run)
    assert again.logged == rows
    assert again.last["code"] == "orphaned"
    assert rows[: len(reader.logged)] == reader.logged
    legal_texts(rows)
    assert ended(reader.run).status == "error"
    reader.done()


@case("CON-04")
@pytest.mark.parametrize("sort", ["tasks", "threads"])
async def test_many_producers_of_one_run_leave_no_gap(w: World, sort: str) -> None:
    """Tasks of one loop, and threads that hand their events to it."""
    producers, count = 10, w.input["events"]

    async def crowd(run: Any) -> None:
        loop = asyncio.get_running_loop()

        def event(n: int) -> dict[str, Any]:
            return {"type": "CUSTOM", "name": "n", "value": n}

        async def task(start: int) -> None:
            for n in range(start, count, producers):
                await run.emit(event(n))

        def thread(start: int) -> None:
            for n in range(start, count, producers):
                asyncio.run_coroutine_threadsafe(run.emit(event(n)), loop).result(20)

        jobs = [
            task(start) if sort == "tasks" else asyncio.to_thread(thread, start)
            for start in range(producers)
        ]
        await asyncio.gather(*jobs)

    with registered("crowd", crowd):
        reply = await w.run(run_input(), agent="crowd")
    assert reply.types == ["RUN_STARTED", *["CUSTOM"] * count, "RUN_FINISHED"]
    values = [event["value"] for event in reply.events[1:-1]]
    assert sorted(values) == list(range(count))
    for start in range(producers):
        own = [value for value in values if value % producers == start]
        assert own == sorted(own)
    seqs = RunEvent.objects.order_by("seq").values_list("seq", flat=True)
    assert [seq async for seq in seqs] == list(range(1, count + 3))


@case("CON-05")
async def test_numbers_go_on_behind_a_take_over(w: World) -> None:
    opened = await store.call(store.open_run, opening())
    run, old = opened.run, opened.run.lease_token or 0
    events = [{"type": "CUSTOM", "name": "n", "value": n} for n in range(1, 11)]
    rows = [row(seq, event) for seq, event in enumerate(events, 1)]
    assert await store.call(writer.commit, [writer.Job(run.pk, old, rows[:5])]) == [None]
    new = await store.call(store.take, run) or 0
    assert await store.call(writer.commit, [writer.Job(run.pk, new, rows[5:])]) == [None]
    # One who counts from the beginning again, as a restarted process would: the key forbids it.
    (refused,) = await store.call(writer.commit, [writer.Job(run.pk, old, rows[:1])])
    assert refused is not None

    def again() -> None:
        found = RunEvent(run_id=run.pk, seq=5, type=1, payload="{}", created=timezone.now())
        found.save(force_insert=True)

    with pytest.raises(IntegrityError):
        await store.call(again)
    seqs = RunEvent.objects.order_by("seq").values_list("seq", flat=True)
    assert [seq async for seq in seqs] == list(range(1, 11))
    values = [json.loads(payload)["value"] for payload in await stored()]
    assert values == list(range(1, 11))


@sibling("CON-05")
def test_the_next_run_goes_on_behind_a_process_that_died(
    w: World, servers: Servers, kind: str, database_url: str, user: User
) -> None:
    other = {"daphne": "uvicorn", "uvicorn": "daphne"}[kind]
    own = servers.launch(kind, database_url)
    there = Client(servers.shared(other, database_url), user)
    here = there.at(own.ready())
    with open_socket(own, here.headers) as socket:
        socket.send(json.dumps(given("taken", [*said("1", "2", "3"), {"$hang": True}], "r1")))
        head = [str(socket.recv(timeout=20)) for _ in range(6)]
        own.kill()
    again = there.run("echo", "next", "taken").done()
    runs = list(Run.objects.order_by("offset"))
    rows = [payload for run in runs for payload in rows_of(str(run.key))]
    assert rows[:6] == head
    assert [run.offset for run in runs] == [0, runs[0].last_seq]
    page = there.get(f"/agui/threads/{again.thread}/events")
    assert page.text.splitlines() == rows
    assert page.headers["AGUI-Next"] == again.ids[-1]


# -- turns that wait ----------------------------------------------------------------


@sibling("CON-01")
def test_of_two_turns_at_once_the_second_waits_where_that_is_said(
    w: World, servers: Servers, database_url: str, user: User
) -> None:
    overrides = {"AGUIAPP": {"BUSY": "enqueue"}}
    people = [
        Client(servers.shared(kind, database_url, "queue", overrides=overrides), user)
        for kind in ("daphne", "uvicorn")
    ]
    for number in range(rounds(2, 30)):
        bodies = [
            given(f"t{number}", [{"$sleep": 0.2}, *said(f"of r{n}", name=f"m{n}")], f"r{n}")
            for n in (1, 2)
        ]
        readers = at_once(
            lambda given=bodies[0]: people[0].post("scripted", given).done(),
            lambda given=bodies[1]: people[1].post("scripted", given).done(),
        )
        assert [(reader.status, reader.end) for reader in readers] == [(200, "clean")] * 2
        runs = list(Run.objects.filter(thread__thread_id=f"t{number}").order_by("offset"))
        assert [run.status for run in runs] == ["success", "success"]
        assert [run.offset for run in runs] == [0, runs[0].last_seq]
        for run in runs:
            reader = readers[int(run.run_id[1:]) - 1]
            assert reader.logged == rows_of(str(run.key))
            gapless(reader)


@sibling("CON-01")
async def test_turns_at_once_run_one_after_the_other(w: World) -> None:
    """As many as there is room for; who comes on top of them is told so."""
    w.settings.AGUIAPP = {"QUEUE_RUNS": 5}
    going: list[int] = []
    seconds = [2.0]  # of the first turn: until everybody came

    async def alone(run: Any) -> AsyncIterator[Any]:
        going.append(1)
        assert len(going) == 1
        yield {"type": "CUSTOM", "name": "turn", "value": run.input["runId"]}
        await asyncio.sleep(seconds.pop() if seconds else 0.05)
        going.pop()

    with registered("alone", alone, busy="enqueue"):
        replies = await asyncio.gather(
            *(w.ada.run(run_input("t1", f"r{n}"), "alone") for n in range(10))
        )
    assert Counter(reply.status for reply in replies) == {200: 6, 409: 4}
    assert {reply.code for reply in replies if reply.status == 409} == {"queue_full"}
    taken = [reply for reply in replies if reply.status == 200]
    for reply in taken:
        own = [json.loads(payload) for payload in reply.logged]
        legal(own)
        assert [event["type"] for event in own] == ["RUN_STARTED", "CUSTOM", "RUN_FINISHED"]
    turns = [json.loads(row) for row in await stored()]
    names = [event["value"] for event in turns if event["type"] == "CUSTOM"]
    assert sorted(names) == sorted(
        event["value"] for reply in taken for event in reply.events if event["type"] == "CUSTOM"
    )
    runs = [run async for run in Run.objects.order_by("pk")]
    assert [run.offset for run in runs] == [3 * n for n in range(6)]


@sibling("CON-01")
async def test_a_turn_that_interrupts_ends_the_one_before(w: World) -> None:
    async def talks(run: Any) -> AsyncIterator[Any]:
        yield {"type": "CUSTOM", "name": "turn", "value": run.input["runId"]}
        if run.input["runId"] == "r1":
            await asyncio.Event().wait()

    with registered("talks", talks, busy="interrupt"):
        first = await w.ada.watch(run_input("t1", "r1"), "talks")
        await first.until(lambda raw: b"turn" in raw)
        second = await w.ada.run(run_input("t1", "r2"), "talks")
        before = await first.rest()
    assert before.events[-1]["outcome"] == {"type": "cancelled"}
    assert [event["value"] for event in second.events if event["type"] == "CUSTOM"] == ["r2"]
    runs = [run.status async for run in Run.objects.order_by("offset")]
    assert runs == ["cancelled", "success"]


@sibling("CON-02")
async def test_the_same_post_while_it_waits_is_the_same_turn(w: World) -> None:
    go_on = asyncio.Event()
    called: list[str] = []

    async def waits(run: Any) -> AsyncIterator[Any]:
        called.append(run.input["runId"])
        yield {"type": "CUSTOM", "name": "turn", "value": run.input["runId"]}
        await go_on.wait()

    with registered("waits", waits, busy="enqueue"):
        first = await w.ada.watch(run_input("t1", "r1"), "waits")
        await first.until(lambda raw: b"turn" in raw)
        again = [await w.ada.watch(run_input("t1", "r2"), "waits") for _ in range(3)]
        assert await Run.objects.filter(status="queued").acount() == 1
        go_on.set()
        await first.rest()
        replies = [await stream.rest() for stream in again]
    assert called == ["r1", "r2"]
    rows = await stored(run__run_id="r2")
    for reply in replies:
        assert reply.logged == rows
