"""Turns, readers and streams under conditions that are rare and must still be right."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.db import OperationalError, connection
from django.test import Client, modify_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from aguiapp import access, agents, engine, feed, store
from aguiapp.engine import patience, recovery
from aguiapp.engine.attendance import Attendance
from aguiapp.models import Participant, Run, RunEvent, Thread, Watcher
from aguiapp.store import runs, sql
from project import scripted
from tests import scripts
from tests.scripts import Person, Stream, elsewhere, legal, run_input, said, text
from tests.test_joins import prune
from tests.test_queue import statuses, stop, turn

pytestmark = pytest.mark.django_db(transaction=True)

HANG = {"$hang": True}
PING = {"type": "CUSTOM", "name": "ping", "value": None}
CALL = [
    {"type": "TOOL_CALL_START", "toolCallId": "c1", "toolCallName": "pick"},
    {"type": "TOOL_CALL_END", "toolCallId": "c1"},
]
ANSWER = {"id": "a1", "role": "tool", "toolCallId": "c1", "content": "1001"}


@pytest.fixture
def ada(user: User) -> Person:
    return Person(user)


@pytest.fixture(autouse=True)
def agent() -> Iterator[None]:
    with scripts.registered("scripted", scripted.play, busy="enqueue"):
        yield


async def settled(*names: str, seconds: float = 6.0) -> dict[str, str]:
    """The runs' status, once all of them ended or the time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = await statuses()
        if all(found[name] not in ("queued", "running") for name in names):
            return found
        await asyncio.sleep(0.02)
    return await statuses()


def elsewhere_run(user: User, run: str, **more: Any) -> Any:
    """A run that another process took: nothing here drives it."""
    return scripts.opening(scope=f"user:{user.pk}", run=run, user_id=user.pk, **more)


async def a_stuck_queue(ada: Person) -> Run:
    """A thread with a free slot and one turn that waits, as a draining process leaves it."""
    first = await turn(ada, "r1", HANG)
    second = await turn(ada, "r2", *text("m2", "ho"))
    engine.current().draining = True
    await stop(ada, "r1")
    await first.rest()
    assert await statuses() == {"r1": "cancelled", "r2": "queued"}
    engine.current().draining = False
    await second.response.source.aclose()
    return await Run.objects.select_related("thread").aget(run_id="r2")


class TestAnswers:
    async def test_an_answer_that_came_while_the_run_went_on_does_not_wait_for_itself(
        self, ada: Person
    ) -> None:
        first = await turn(ada, "r1", *CALL, {"$sleep": 0.4})
        await first.until(lambda raw: b"TOOL_CALL_END" in raw)
        answer = await turn(ada, "r2", *text("m2", "ok"), messages=[ANSWER])
        assert (await statuses())["r2"] == "queued"
        await first.rest()
        found = await settled("r1", "r2", seconds=6)
        await answer.response.source.aclose()
        assert found == {"r1": "success", "r2": "success"}


class TestShortLoops:
    async def test_a_cancel_from_a_wsgi_process_does_not_abandon_the_next_turn(
        self, ada: Person, user: User, settings: Any
    ) -> None:
        """A sync server answers the plain routes; its loop ends with the request."""
        settings.AGUIAPP = {**settings.AGUIAPP, "COMMAND_SECONDS": 0.1, "CANCEL_SECONDS": 0.1}
        opened = await store.call(store.open_run, elsewhere_run(user, "r1"))
        await store.call(store.open_run, elsewhere_run(user, "r2", busy="enqueue"))
        client = Client(headers={"authorization": f"Bearer {access.make_token(user)}"})
        path = f"/agui/threads/{opened.thread.key}/runs/{opened.run.key}/cancel"
        answer = await elsewhere(lambda: client.post(path, {}, content_type="application/json"))
        assert answer.json()["status"] == "cancelled"
        await asyncio.sleep(0.3)
        second = await Run.objects.aget(run_id="r2")
        assert second.status in ("queued", "success"), (second.status, second.error_code)

    async def test_run_now_does_not_abandon_the_turn_that_waits(self, ada: Person) -> None:
        await a_stuck_queue(ada)
        body = run_input(run="r3", messages=[said("u3")], script=text("m3", "x"))
        await elsewhere(lambda: engine.run_now("scripted", body, user=ada.user))
        await asyncio.sleep(0.3)
        second = await Run.objects.aget(run_id="r2")
        assert second.status in ("queued", "success"), (second.status, second.error_code)

    async def test_run_now_runs_to_the_end_or_refuses(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        body = run_input(run="r3", messages=[said("u3")], script=text("m3", "x"))
        run = await elsewhere(lambda: engine.run_now("scripted", body, user=ada.user))
        await stop(ada, "r1")
        await first.rest()
        assert isinstance(run, Exception) or run.ended, run.status


class TestDrain:
    async def test_a_turn_promoted_as_the_drain_began_is_not_lost(
        self, ada: Person, monkeypatch: pytest.MonkeyPatch, settings: Any
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "DRAIN_SECONDS": 0.3}
        first = await turn(ada, "r1", HANG)
        second = await turn(ada, "r2", HANG)
        here = engine.current()
        finish, begun, go = store.finish, threading.Event(), threading.Event()

        def slow(*arguments: Any, **options: Any) -> Any:
            done = finish(*arguments, **options)
            begun.set()
            go.wait(5)
            return done

        monkeypatch.setattr(store, "finish", slow)
        stopping = asyncio.create_task(stop(ada, "r1"))
        await scripts.until(begun.is_set)
        drain = asyncio.create_task(here.drain())
        await asyncio.sleep(0.05)
        assert here.draining
        monkeypatch.setattr(store, "finish", finish)
        go.set()
        await drain
        await asyncio.gather(stopping, return_exceptions=True)
        here.draining = False
        feed.current().closing = False
        for stream in (first, second):
            await stream.response.source.aclose()
        run = await Run.objects.aget(run_id="r2")
        assert (run.status, run.error_code) in (("queued", ""), ("error", "shutdown")), (
            run.status,
            run.error_code,
        )


def lose_the_answer_to_an_end(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """That end of a run is committed, but who asked for it hears of a lost connection."""
    finish, writing, calls = runs._finish, sql.writing, []

    def counted(*arguments: Any) -> int:
        calls.append(arguments[1])
        return finish(*arguments)

    @contextmanager
    def unheard(found: Any, **more: Any) -> Iterator[None]:
        before = len(calls)
        with writing(found, **more):
            yield
        if before < which == len(calls):
            raise OperationalError("the connection was lost in COMMIT")

    monkeypatch.setattr(runs, "_finish", counted)
    monkeypatch.setattr(sql, "writing", unheard)


class TestInDoubt:
    async def test_the_next_turn_is_driven_though_the_answer_of_a_foreign_ending_was_lost(
        self, ada: Person, monkeypatch: pytest.MonkeyPatch, settings: Any
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "LEASE_SECONDS": 1.0, "SWEEP_SECONDS": 0.2}
        options: dict[str, Any] = {"busy": "enqueue"}
        with scripts.registered("guest", scripted.play, **options):
            first = await turn(ada, "r1", HANG)
            given = run_input(run="r2", messages=[said("r2", "r2")], script=[])
            second = await ada.watch(given, "guest")
            third = await turn(ada, "r3", *text("m3", "ho"))
            agents.unregister("guest")
            lose_the_answer_to_an_end(monkeypatch, 2)  # r1 by its driver, r2 by turns.end
            await stop(ada, "r1")
            found = await settled("r2", "r3")
            for stream in (first, second, third):
                await stream.response.source.aclose()
            assert found == {"r1": "cancelled", "r2": "error", "r3": "success"}

    async def test_an_agent_that_takes_long_to_be_ready_keeps_its_turn(
        self, ada: Person, settings: Any
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "LEASE_SECONDS": 1.0, "SWEEP_SECONDS": 0.2}
        slow = {"seconds": 0.0}

        async def ready() -> bool:
            await asyncio.sleep(slow["seconds"])
            return True

        with scripts.registered("guest", scripted.play, busy="enqueue", ready=ready):
            first = await turn(ada, "r1", HANG)
            given = run_input(run="r2", messages=[said("r2", "r2")], script=[])
            second = await ada.watch(given, "guest")
            slow["seconds"] = 1.8
            await stop(ada, "r1")
            await settled("r2")
            run = await Run.objects.aget(run_id="r2")
            await first.rest()
            await second.response.source.aclose()
            assert (run.status, run.error_code) == ("success", "")


class TestReaders:
    @pytest.fixture(autouse=True)
    def quick(self, settings: Any) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "COMMAND_SECONDS": 0.1, "CANCEL_SECONDS": 0.1}

    @pytest.mark.parametrize("wait", ["?wait=5", ""])
    async def test_who_polls_a_busy_run_reads_it(self, ada: Person, wait: str) -> None:
        busy = {"$repeat": 300, "events": [PING, {"$sleep": 0.01}]}
        with scripts.registered("scripted", scripted.play, disconnect="cancel"):
            stream = await ada.watch(run_input(script=[busy]))
            await stream.until(lambda raw: len(scripts.frames(raw)) >= 2)
            thread = await Thread.objects.aget()
            await stream.response.source.aclose()
            cursor = f"{thread.epoch}-0"
            polls = 0
            async with asyncio.timeout(15):
                while not (run := await Run.objects.aget()).ended:
                    more = "&" if wait else "?"
                    path = f"/agui/threads/{thread.key}/events{wait}{more}after={cursor}"
                    reply = await ada.ask(path)
                    cursor = reply.headers["AGUI-Next"]
                    polls += 1
                    if not wait:
                        await asyncio.sleep(0.05)
            assert run.status == "success", (run.status, run.findings, polls)

    @modify_settings(MIDDLEWARE={"append": "tests.test_rare_moments.slow_middleware"})
    async def test_a_host_that_is_slow_to_answer_costs_nobody_their_run(self, user: User) -> None:
        with scripts.registered("scripted", scripted.play, disconnect="cancel"):
            reply = await Person(user).run(run_input(script=[{"$sleep": 1.6}]))
            assert reply.events[-1].get("outcome", {}).get("type") != "cancelled", reply.events[-1]

    async def test_two_loops_of_a_process_count_together(self, ada: Person) -> None:
        """Rows are by process, counts by event loop."""
        thread = await Thread.objects.acreate(scope="user:1", thread_id="t1")
        with scripts.registered("scripted", scripted.play, disconnect="cancel"):
            here, there = (Attendance(_spawned) for _ in range(2))
            with here.reading(thread.pk):
                with there.reading(thread.pk):
                    await _written()
                await _written()
                assert await Watcher.objects.acount() == 1

    async def test_a_thread_that_is_gone_hides_no_other_readers(self, ada: Person) -> None:
        gone = await Thread.objects.acreate(scope="user:1", thread_id="t1")
        kept = await Thread.objects.acreate(scope="user:1", thread_id="t2")
        await Thread.objects.filter(pk=gone.pk).adelete()
        with scripts.registered("scripted", scripted.play, disconnect="cancel"):
            here = Attendance(_spawned)
            with here.reading(gone.pk), here.reading(kept.pk):
                await asyncio.sleep(1.5)
                found = [w.thread_id async for w in Watcher.objects.all()]
                assert found == [kept.pk]
            await _written()
            for task in list(_tasks):
                task.cancel()


_tasks: set[asyncio.Task[Any]] = set()


def _spawned(work: Any, name: str) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work, name=name)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def _written() -> None:
    async with asyncio.timeout(5):
        while _tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def slow_middleware(get_response: Any) -> Any:
    """A host that takes its time once the view has answered."""

    async def middleware(request: Any) -> Any:
        response = await get_response(request)
        await asyncio.sleep(1.2)
        return response

    return middleware


slow_middleware.async_capable = True  # type: ignore[attr-defined]
slow_middleware.sync_capable = False  # type: ignore[attr-defined]


class TestWaitingReaders:
    async def test_the_mark_of_a_reader_who_waits_does_not_name_the_beginning(
        self, ada: Person, settings: Any
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "STREAM_SECONDS": 0.3}
        await (await turn(ada, "r0", *text("m0", "old"))).rest()
        first = await turn(ada, "r1", HANG)
        waiting = await ada.ask(
            "/agui/agents/scripted/",
            run_input(run="r2", messages=[said("r2")], script=[]),
            **{"agui-resume": "1"},
        )
        await stop(ada, "r1")
        await first.rest()
        mark = waiting.raw.decode().rstrip().rpartition(" ")[2]
        assert not mark.endswith("-0"), waiting.raw

    async def test_a_turn_that_waits_costs_no_query_per_commit_of_another(
        self, ada: Person, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        busy = {"$repeat": 150, "events": [PING, {"$sleep": 0.01}]}
        count = {"n": 0}
        refresh = store.refresh

        def counted(run: Run) -> Run:
            count["n"] += 1
            return refresh(run)

        monkeypatch.setattr(store, "refresh", counted)
        first = await turn(ada, "r1", busy)
        others = [await turn(ada, f"r{n}") for n in range(2, 7)]
        began = time.monotonic()
        await asyncio.gather(first.rest(), *(stream.rest() for stream in others))
        took = time.monotonic() - began
        assert count["n"] <= 5 * 4 * (took + 1)

    async def test_who_waits_behind_a_busy_run_is_kept_alive(
        self, ada: Person, settings: Any
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "HEARTBEAT_SECONDS": 0.2}
        first = await turn(ada, "r1", {"$forever": [PING]})
        second = await turn(ada, "r2")
        third = asyncio.create_task(first.rest())
        other = asyncio.create_task(second.rest())
        await asyncio.sleep(3)
        await stop(ada, "r1")
        await third
        alive = (await other).raw.count(b": keep-alive")
        assert alive >= 8

    async def test_who_may_not_see_the_thread_any_more_does_not_wait_on(
        self, ada: Person, other: User, settings: Any
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "HEARTBEAT_SECONDS": 0.2}
        first = await turn(ada, "r1", {"$forever": [PING]})
        thread = await Thread.objects.aget()
        part = await Participant.objects.acreate(thread=thread, user=other, role="member")
        given = run_input(run="r2", messages=[said("r2")], script=[])
        waiting = await Person(other).watch(given, query=f"?thread={thread.key}")
        reading = asyncio.create_task(first.rest())
        waits = asyncio.create_task(waiting.rest())
        await asyncio.sleep(0.2)
        await part.adelete()
        await asyncio.sleep(2.5)
        done = waits.done()
        await stop(ada, "r1")
        await reading
        reply = await waits
        assert done
        assert reply.aborted

    async def test_a_turn_of_somebody_who_may_not_speak_any_more_does_not_run(
        self, ada: Person, other: User
    ) -> None:
        first = await turn(ada, "r1", HANG)
        thread = await Thread.objects.aget()
        part = await Participant.objects.acreate(thread=thread, user=other, role="member")
        given = run_input(run="r2", messages=[said("r2")], script=text("m2", "x"))
        waiting = await Person(other).watch(given, query=f"?thread={thread.key}")
        await part.adelete()
        await stop(ada, "r1")
        await first.rest()
        found = await settled("r2")
        await waiting.response.source.aclose()
        assert found["r2"] != "success"

    @pytest.mark.parametrize("accept", ["application/json", "application/vnd.ag-ui.event+proto"])
    async def test_only_streams_that_can_be_marked_grow_old(
        self, ada: Person, settings: Any, accept: str
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "STREAM_SECONDS": 0.2}
        reply = await ada.run(
            run_input(script=[{"$sleep": 0.6}]), accept=accept, **{"agui-resume": "1"}
        )
        assert not reply.aborted


class TestRetention:
    async def two_runs(self, ada: Person) -> Thread:
        many = [{"$repeat": 40, "event": {"type": "CUSTOM", "name": "n", "value": "$i"}}]
        await (await turn(ada, "r1", *many)).rest()
        await (await turn(ada, "r2", *text("m2", "x"))).rest()
        return await Thread.objects.aget()

    @pytest.mark.parametrize("whole", [True, False])
    async def test_a_reader_who_was_overtaken_by_retention_is_told(
        self, ada: Person, whole: bool
    ) -> None:
        thread = await self.two_runs(ada)
        run = await Run.objects.aget(run_id="r1")
        follower = feed.Follower(thread, 0, None if whole else run)
        assert len(await follower.read(5)) == 1
        await prune("r1", run.last_seq)
        with pytest.raises(feed.Pruned):
            await anext(follower.batches(3))

    async def test_the_same_post_of_a_pruned_run_is_no_clean_success(self, ada: Person) -> None:
        given = run_input(run="r1", messages=[said("u1")], script=text("m1", "x"))
        await ada.run(given)
        run = await Run.objects.aget()
        await prune("r1", run.last_seq)
        again = await ada.run(given)
        assert again.status != 200 or again.aborted or "RUN_FINISHED" in again.types, again.raw

    async def test_the_same_post_of_a_half_pruned_run_is_legal(self, ada: Person) -> None:
        given = run_input(run="r1", messages=[said("u1")], script=text("m1", "a", "b"))
        await ada.run(given)
        await prune("r1", 5)
        again = await ada.run(given)
        assert (again.status, again.aborted) == (200, False)
        legal(again.events)
        assert again.events[1]["name"] == "aguiapp.gap"

    async def test_connect_to_a_thread_that_was_pruned_follows_its_active_run(
        self, ada: Person
    ) -> None:
        await (await turn(ada, "r1", *text("m1", "x"))).rest()
        await prune("r1", (await Run.objects.aget(run_id="r1")).last_seq)
        user = ada.user
        await store.call(store.open_run, elsewhere_run(user, "r2"))
        response = await ada.open("/agui/agents/scripted/connect", run_input("t1", "joiner"))
        second = await Run.objects.aget(run_id="r2")
        found = response["AGUI-Run"]
        await response.source.aclose()
        assert found == str(second.key)

    async def test_a_gap_that_ends_inside_a_run_is_legal(self, ada: Person) -> None:
        await (await turn(ada, "r0", *text("m0", "a"))).rest()
        await (await turn(ada, "r1", *text("m1", "a", "b"))).rest()
        run = await prune("r1", 5)
        thread = run.thread
        total = await RunEvent.objects.filter(run_id=run.pk).acount()
        stream = Stream(
            await ada.open(
                f"/agui/threads/{thread.key}/stream",
                **{"last-event-id": f"{thread.epoch}-{run.offset}"},
            )
        )
        raw = await stream.until(lambda raw: sum(1 for f in scripts.frames(raw) if f.id) >= total)
        await stream.response.source.aclose()
        legal([json.loads(frame.data) for frame in scripts.frames(raw)])

    @pytest.mark.parametrize("route", ["stream", "events"])
    async def test_a_cursor_older_than_retention_gets_a_gap_also_for_one_run(
        self, ada: Person, route: str
    ) -> None:
        await (await turn(ada, "r1", *text("m1", "a", "b"))).rest()
        run = await prune("r1", 4)
        path = f"/agui/threads/{run.thread.key}/{route}?run={run.key}&after={run.thread.epoch}-1"
        reply = await ada.ask(path)
        assert b"aguiapp.gap" in reply.raw or reply.status >= 400, reply.raw

    async def test_retention_between_the_gap_and_the_first_read_is_told(self, ada: Person) -> None:
        await (await turn(ada, "r1", *text("m1", "a", "b"))).rest()
        await (await turn(ada, "r2", *text("m2", "a", "b"))).rest()
        thread = await Thread.objects.aget()
        path = f"/agui/threads/{thread.key}/stream?after={thread.epoch}-2"
        response = await ada.open(path)
        await prune("r1", (await Run.objects.aget(run_id="r1")).last_seq)
        stream = Stream(response)
        try:
            raw = await stream.until(lambda raw: b"\nid:" in raw or raw.startswith(b"id:"))
        except Exception:
            return  # aborted: it comes back and is told
        assert scripts.frames(raw)[0].id == f"{thread.epoch}-3", scripts.frames(raw)[0]

    async def test_a_long_pruned_history_is_not_walked_run_by_run(self, ada: Person) -> None:
        thread = await Thread.objects.acreate(scope=f"user:{ada.user.pk}", thread_id="t1")
        rows = [
            Run(
                thread=thread,
                run_id=f"x{n}",
                agent="scripted",
                status="success",
                offset=n * 6,
                last_seq=6,
                pruned_to=6,
            )
            for n in range(200)
        ]
        await Run.objects.abulk_create(rows)

        def walk() -> int:
            with CaptureQueriesContext(connection) as found:
                assert store.first_kept(thread.pk, 0) == 1200
            return len(found)

        count = await sync_to_async(walk, thread_sensitive=True)()
        assert count < 20


class TestSweeper:
    async def test_queues_that_wait_for_answers_cost_no_queries_each(self, ada: Person) -> None:
        outcome = {"interrupts": [{"id": "i1"}]}
        for n in range(30):
            thread = await Thread.objects.acreate(scope="user:1", thread_id=f"t{n}")
            await Run.objects.acreate(
                thread=thread,
                run_id="r1",
                agent="scripted",
                status="interrupt",
                offset=0,
                last_seq=2,
                outcome=outcome,
            )
            await Run.objects.acreate(
                thread=thread, run_id="r2", agent="scripted", status="queued", offset=None
            )

        def sweep() -> int:
            with CaptureQueriesContext(connection) as found:
                for thread_id in store.claimable():
                    assert store.claim(thread_id) is None
            return len(found)

        count = await sync_to_async(sweep, thread_sensitive=True)()
        assert count < 30


class TestSameStream:
    async def test_a_post_that_edits_the_state_gets_the_same_stream_again(
        self, ada: Person
    ) -> None:
        await (await turn(ada, "r1", {"type": "STATE_SNAPSHOT", "snapshot": {"n": 1}})).rest()
        messages = [said("r1", "r1"), said("r2", "r2")]
        given = run_input(run="r2", messages=messages, script=[], state={"n": 7})
        once, again = [await ada.run(given) for _ in range(2)]
        assert once.raw == again.raw

    async def test_a_queued_post_that_edits_the_state_is_not_shown_the_old_one(
        self, ada: Person
    ) -> None:
        await (await turn(ada, "r0", {"type": "STATE_SNAPSHOT", "snapshot": {"n": 1}})).rest()
        first = await turn(ada, "r1", HANG, messages=[said("r0", "r0"), said("r1", "r1")])
        messages = [said("r0", "r0"), said("r1", "r1"), said("r2", "r2")]
        second = await turn(ada, "r2", messages=messages, state={"n": 7})
        await stop(ada, "r1")
        await first.rest()
        await settled("r2")
        reply = await second.rest()
        unlogged = [json.loads(f.data) for f in reply.frames if not f.id]
        assert unlogged == []


class TestInline:
    async def test_limits_hold(self, ada: Person, settings: Any) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "WRITER": "inline"}
        with scripts.registered("scripted", scripted.play, limits={"run_seconds": 0.2}):
            reply = await ada.run(run_input(script=[{"$sleep": 1.5}]))
            assert reply.events[-1].get("code") == "run_timeout"

    async def test_no_watcher_is_left_behind(self, user: User, settings: Any) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "WRITER": "inline"}
        with scripts.registered("scripted", scripted.play, disconnect="cancel"):

            def post() -> Any:
                client = Client(headers={"authorization": f"Bearer {access.make_token(user)}"})
                return client.post(
                    "/agui/agents/scripted/",
                    data=run_input(script=[PING]),
                    content_type="application/json",
                )

            response = await elsewhere(post)
            assert response.status_code == 200
            assert not await Watcher.objects.aexists()


class TestLateStops:
    async def test_a_run_that_ended_by_itself_is_not_noted_as_deserted(
        self, ada: Person, monkeypatch: pytest.MonkeyPatch, settings: Any
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "COMMAND_SECONDS": 0.05}
        monkeypatch.setattr(patience, "SETTLE_SECONDS", 0.1)
        finish = store.finish

        def slow(*arguments: Any, **options: Any) -> Any:
            time.sleep(0.6)
            return finish(*arguments, **options)

        monkeypatch.setattr(store, "finish", slow)
        with scripts.registered("scripted", scripted.play, disconnect="cancel"):
            stream = await ada.watch(run_input(script=[PING]))
            await stream.until(lambda raw: len(scripts.frames(raw)) >= 2)
            await stream.response.source.aclose()
            await settled("r1")
            await asyncio.sleep(0.3)
            run = await Run.objects.aget()
            assert (run.status, run.findings) == ("success", [])


class TestSlowSweeps:
    async def test_turns_of_a_long_sweep_are_driven_before_their_lease_is_over(
        self, ada: Person, user: User, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One process ends what a dead one left, and another one sweeps as well."""
        settings.AGUIAPP = {**settings.AGUIAPP, "LEASE_SECONDS": 2.0, "SWEEP_SECONDS": 60.0}
        for n in range(4):
            scope = f"user:{user.pk}"
            more: dict[str, Any] = {"scope": scope, "thread": f"t{n}", "user_id": user.pk}
            await store.call(store.open_run, scripts.opening(run=f"a{n}", **more))
            await store.call(store.open_run, scripts.opening(run=f"b{n}", busy="enqueue", **more))
        await Run.objects.filter(status="running").aupdate(
            lease_owner="elsewhere 1 b 1", lease_expires=timezone.now() - timedelta(seconds=5)
        )
        end_stored = recovery.end_stored

        def slow(*arguments: Any, **options: Any) -> Any:
            time.sleep(1.0)
            return end_stored(*arguments, **options)

        monkeypatch.setattr(recovery, "end_stored", slow)
        engine.current().wake()
        await asyncio.sleep(3.3)
        await elsewhere(recovery.sweep)  # the other process
        monkeypatch.setattr(recovery, "end_stored", end_stored)
        await settled(*(f"b{n}" for n in range(4)))
        found = {r.run_id: (r.status, r.error_code) async for r in Run.objects.all()}
        assert not [k for k, v in found.items() if k[0] == "b" and v[1] == "orphaned"], found


class TestHotRuns:
    async def test_a_cancelled_turn_calls_no_agent(self, ada: Person, settings: Any) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "COMMAND_SECONDS": 0.1, "CANCEL_SECONDS": 0.1}
        called: list[str] = []
        slow = {"seconds": 0.0}

        async def ready() -> bool:
            await asyncio.sleep(slow["seconds"])
            return True

        async def guest(run: Any) -> None:
            called.append(run.input["runId"])

        with scripts.registered("guest", guest, busy="enqueue", ready=ready):
            first = await turn(ada, "r1", HANG)
            given = run_input(run="r2", messages=[said("r2", "r2")])
            second = await ada.watch(given, "guest")
            slow["seconds"] = 1.2
            await stop(ada, "r1")
            await scripts.until(lambda: True)
            while (await statuses())["r2"] == "queued":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await stop(ada, "r2")).json["status"] == "cancelled"
            await asyncio.sleep(1.8)
            await first.rest()
            await second.response.source.aclose()
            assert called == []

    async def test_run_now_leaves_a_long_turn_to_others(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        second = await turn(ada, "r2", {"$sleep": 0.5})
        here = engine.current()
        here.draining = True
        await stop(ada, "r1")
        await first.rest()
        here.draining = False
        assert (await statuses())["r2"] == "queued"
        body = run_input(run="r3", messages=[said("u3")], script=[])
        await elsewhere(lambda: engine.run_now("scripted", body, user=ada.user))
        found = {r.run_id: (r.status, r.error_code) async for r in Run.objects.all()}
        await second.response.source.aclose()
        assert found["r2"][0] in ("queued", "success"), found


class TestLocks:
    async def test_a_locked_thread_keeps_no_other_waiting(self, ada: Person, settings: Any) -> None:
        if connection.vendor != "postgresql":
            pytest.skip("SQLite locks no rows")
        settings.AGUIAPP = {**settings.AGUIAPP, "SWEEP_SECONDS": 0.2}
        keys = []
        for n in range(2):
            more: dict[str, Any] = {"scope": f"user:{ada.user.pk}", "thread": f"t{n}"}
            opened = await store.call(store.open_run, scripts.opening(run=f"r{n}", **more))
            await Run.objects.filter(pk=opened.run.pk).aupdate(status="queued", offset=None)
            keys.append(opened.thread.pk)
        first = (await store.call(store.claimable))[0]
        hold, held = threading.Event(), threading.Event()

        def host() -> None:
            from django.db import transaction

            with transaction.atomic():
                Thread.objects.select_for_update().get(pk=first)
                held.set()
                hold.wait(10)
            connection.close()

        thread = threading.Thread(target=host)
        thread.start()
        await asyncio.to_thread(held.wait)
        engine.current().wake()
        deadline = time.monotonic() + 5
        other = next(pk for pk in keys if pk != first)
        run = await Run.objects.aget(thread_id=other)
        while not run.ended and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            run = await Run.objects.aget(pk=run.pk)
        hold.set()
        thread.join()
        assert run.ended, run.status


class TestOddMoments:
    @pytest.mark.parametrize("queued", [False, True])
    async def test_no_reader_is_counted_who_left_at_an_odd_moment(
        self, ada: Person, queued: bool
    ) -> None:
        with scripts.registered("scripted", scripted.play, disconnect=60, busy="enqueue"):
            first = await turn(ada, "r0", {"$forever": [PING, {"$sleep": 0.005}]})
            if queued:
                await turn(ada, "r1")
            run = await Run.objects.select_related("thread").aget(run_id="r1" if queued else "r0")
            counts = engine.current().attendance._counts
            for ticks in range(60):
                response = await ada.open(f"/agui/threads/{run.thread.key}/stream?run={run.key}")

                async def read(response: Any = response) -> None:
                    async for _ in response.streaming_content:
                        pass

                task = asyncio.create_task(read())
                for _ in range(ticks):
                    await asyncio.sleep(0 if ticks % 2 else 0.001)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await response.source.aclose()
            assert dict(counts) == {}
            await stop(ada, "r0")
            await first.rest()

    async def test_who_may_not_cancel_does_not_interrupt(
        self, ada: Person, other: User, settings: Any
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "POLICY": "tests.test_rare_moments.Careful"}
        with scripts.registered("scripted", scripted.play, busy="interrupt"):
            first = await turn(ada, "r1", HANG)
            thread = await Thread.objects.aget()
            await Participant.objects.acreate(thread=thread, user=other, role="member")
            run = await Run.objects.aget(run_id="r1")
            bob = Person(other)
            path = f"/agui/threads/{thread.key}"
            refused = await bob.ask(f"{path}/runs/{run.key}/cancel", {})
            assert refused.status == 403
            given = run_input(run="r2", messages=[said("r2")], script=[])
            second = await bob.watch(given, query=f"?thread={thread.key}")
            await asyncio.sleep(1.2)
            found = await statuses()
            await stop(ada, "r1")
            await asyncio.gather(first.rest(), second.rest())
            assert found["r1"] == "running"

    async def test_nothing_that_is_asked_is_a_server_error(self, ada: Person) -> None:
        await (await turn(ada, "r1", *text("m1", "a"))).rest()
        thread = await Thread.objects.aget()
        run = await Run.objects.aget()
        bad = [
            "",
            "-",
            "x",
            "-1",
            "9" * 30,
            "%00",
            "%ff",
            "\u0661",
            "a" * 5000,
            "abcdef-99",
            f"{thread.epoch}-",
            f"{thread.epoch}-999",
            f"{thread.epoch}--1",
            "%F0%9F%98%80-1",
            "nan",
            "inf",
            "1e400",
            "00000000-0000-0000-0000-000000000000",
        ]
        base = f"/agui/threads/{thread.key}"
        for value in bad:
            for path in (
                f"{base}/events?after={value}",
                f"{base}/events?run={value}",
                f"{base}/events?wait={value}" if value not in ("inf", "1e400", "9" * 30) else base,
                f"{base}/events?limit={value}",
                f"{base}/snapshot?at={value}",
                f"{base}/stream?after={value}&run={run.key}",
                f"{base}/stream?run={value}",
            ):
                if path.endswith(f"after=&run={run.key}"):
                    continue
                response = await ada.open(path)
                if response.streaming:
                    await response.source.aclose()
                assert response.status_code < 500, (path, response.status_code)
            for prefer in ("respond-async;" + "x" * 99, ",,,;=", "respond-async,,", value[:99]):
                if not prefer.isascii() or "%" in prefer:
                    continue
                name = f"p{abs(hash((value, prefer)))}"
                reply = await ada.ask(
                    "/agui/agents/scripted/", run_input(f"t{name}", name, script=[]), prefer=prefer
                )
                assert reply.status < 500
            for path in ("/agui/agents/scripted/connect", "/agui/agents/scripted/"):
                response = await ada.open(f"{path}?thread={value}", run_input("t1", "zz"))
                if response.streaming:
                    await response.source.aclose()
                assert response.status_code < 500, (path, value)


class Careful(access.Policy):
    """Only owners stop runs."""

    def rights(self, identity: Any, thread: Thread) -> frozenset[str]:
        found = super().rights(identity, thread)
        return found if thread.scope == identity.scope else found - {"cancel"}


class TestCommands:
    async def test_run_now_steals_no_turn_of_other_threads(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        second = await turn(ada, "r2", {"$sleep": 3})
        here = engine.current()
        here.draining = True
        await stop(ada, "r1")
        await first.rest()
        here.draining = False
        await second.response.source.aclose()
        assert (await statuses())["r2"] == "queued"
        body = run_input("t9", "x1", messages=[said("u3")], script=[{"$sleep": 1.5}])
        done = await elsewhere(lambda: engine.run_now("scripted", body, user=ada.user))
        assert done.status == "success"
        run = await Run.objects.aget(run_id="r2")
        assert run.status == "queued"

    async def test_a_sweeper_claims_nothing_once_its_process_stops(
        self, ada: Person, monkeypatch: pytest.MonkeyPatch, settings: Any
    ) -> None:
        """SIGTERM comes while the sweeper is between two threads of a long list."""
        settings.AGUIAPP = {**settings.AGUIAPP, "DRAIN_SECONDS": 0.2, "SWEEP_SECONDS": 30.0}
        for n in range(3):
            more: dict[str, Any] = {"scope": f"user:{ada.user.pk}", "thread": f"t{n}"}
            body = json.dumps(run_input(f"t{n}", f"r{n}", script=[HANG]))
            opened = await store.call(
                store.open_run, scripts.opening(run=f"r{n}", **more, text=body)
            )
            await Run.objects.filter(pk=opened.run.pk).aupdate(status="queued", offset=None)
        here = engine.current()
        claim, begun, go = store.claim, threading.Event(), threading.Event()

        def slow(thread_id: int) -> Any:
            if not begun.is_set():
                begun.set()
                go.wait(5)
            return claim(thread_id)

        monkeypatch.setattr(store, "claim", slow)
        here.wake()
        await scripts.until(begun.is_set)
        drain = asyncio.create_task(here.drain())
        await asyncio.sleep(0.05)
        go.set()
        await drain
        found = {r.run_id: (r.status, r.error_code) async for r in Run.objects.all()}
        here.draining = False
        feed.current().closing = False
        assert set(found.values()) == {("queued", "")}, found
