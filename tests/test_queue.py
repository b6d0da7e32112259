"""One active run per thread: turns that wait, who goes first, and turns that take over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError
from django.utils import timezone

from aguiapp import agents, engine, protocol, store
from aguiapp.engine import recovery
from aguiapp.models import Run, Thread
from project import scripted
from tests import scripts
from tests.scripts import Person, Reply, Stream, legal, run_input, said, text

pytestmark = pytest.mark.django_db(transaction=True)

HANG = {"$hang": True}


@pytest.fixture
def ada(user: User) -> Person:
    return Person(user)


@pytest.fixture(autouse=True)
def agent() -> Iterator[None]:
    with scripts.registered("scripted", scripted.play, busy="enqueue"):
        yield


@contextmanager
def busy(mode: str) -> Iterator[None]:
    """The scripted agent with another way to take a post to a busy thread."""
    with scripts.registered("scripted", scripted.play, busy=mode):
        yield


async def turn(ada: Person, run: str, *script: Any, **more: Any) -> Stream:
    """A post that says `run` and plays a script."""
    given = run_input(run=run, **{"messages": [said(run, run)], "script": script, **more})
    return await ada.watch(given)


async def statuses() -> dict[str, str]:
    """The thread's runs with their status."""
    return {run.run_id: run.status async for run in Run.objects.order_by("pk")}


async def stop(ada: Person, run: str) -> Reply:
    """Cancel a run by its id."""
    found = await Run.objects.select_related("thread").aget(run_id=run)
    return await ada.ask(f"/agui/threads/{found.thread.key}/runs/{found.key}/cancel", {})


async def snapshot(ada: Person) -> Any:
    thread = await Thread.objects.aget()
    return (await ada.ask(f"/agui/threads/{thread.key}/snapshot")).json


async def users_said(ada: Person) -> list[str]:
    """What people said on the thread, in its order."""
    messages = (await snapshot(ada))["messages"]
    return [message["content"] for message in messages if message["role"] == "user"]


async def contiguous() -> None:
    """Runs that have a place follow one another without a hole."""
    end = 0
    async for run in Run.objects.filter(offset__isnull=False).order_by("offset"):
        assert run.offset == end
        end += run.last_seq
        legal(await scripts.events_of(run))


class TestWaiting:
    async def test_turns_run_in_the_order_in_which_they_came(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        others = [await turn(ada, f"r{n}", *text(f"m{n}", "done")) for n in (2, 3, 4)]
        assert list((await statuses()).values()) == ["running", "queued", "queued", "queued"]
        await stop(ada, "r1")
        assert (await first.rest()).types[-1] == "RUN_FINISHED"
        for n, stream in zip((2, 3, 4), others, strict=True):
            reply = await stream.rest()
            assert reply.logged == await scripts.stored(run__run_id=f"r{n}")
            legal(reply.events)
        assert await users_said(ada) == ["r1", "r2", "r3", "r4"]
        assert list((await statuses()).values()) == ["cancelled", *["success"] * 3]
        await contiguous()

    async def test_a_waiting_post_is_answered_at_once_without_a_cursor(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        second = await turn(ada, "r2")
        assert await second.until(bool) == b": aguiapp\n\n"
        assert "AGUI-Cursor" not in second.response.headers
        run = await Run.objects.aget(run_id="r2")
        assert second.response.headers["AGUI-Run"] == str(run.key)
        assert (run.status, run.offset, run.started_at) == ("queued", None, None)
        await stop(ada, "r1")
        await first.rest()
        assert (await second.rest()).types[-1] == "RUN_FINISHED"

    async def test_it_is_shown_what_it_missed_before_its_own_run(self, ada: Person) -> None:
        first = await turn(ada, "r1", *text("m1", "hi"), HANG)
        second = await turn(ada, "r2", *text("m2", "ho"))
        await stop(ada, "r1")
        await first.rest()
        reply = await second.rest()
        legal(reply.events)
        unlogged = [json.loads(frame.data) for frame in reply.frames if not frame.id]
        assert [event["type"] for event in unlogged[:2]] == ["RUN_STARTED", "MESSAGES_SNAPSHOT"]
        seen = protocol.fold(reply.events, messages=[said("r2", "r2")])
        assert {m["id"] for m in seen.messages} == {"r1", "m1", "r2", "m2"}

    async def test_the_queue_is_visible(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        streams = [await turn(ada, name) for name in ("r2", "r3")]
        queue = (await snapshot(ada))["queue"]
        assert [waiting["runId"] for waiting in queue] == ["r2", "r3"]
        assert all(waiting["agent"] == "scripted" and waiting["actor"] for waiting in queue)
        await stop(ada, "r1")
        await asyncio.gather(*(stream.rest() for stream in (first, *streams)))
        assert (await snapshot(ada))["queue"] == []

    async def test_no_more_than_the_limit_may_wait(self, ada: Person, settings: Any) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "QUEUE_RUNS": 1}
        first = await turn(ada, "r1", HANG)
        second = await turn(ada, "r2")
        refused = await ada.run(run_input(run="r3", script=[]))
        assert (refused.status, refused.code) == (409, "queue_full")
        await stop(ada, "r1")
        await asyncio.gather(first.rest(), second.rest())
        assert len(await statuses()) == 2

    async def test_a_json_document_waits_as_well(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        given = run_input(run="r2", messages=[said("r2")], script=text("m2", "ho"))
        waiting = asyncio.create_task(ada.run(given, query="?stream=0"))
        while "r2" not in await statuses():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await stop(ada, "r1")
        await first.rest()
        reply = await waiting
        legal(reply.events)
        assert [e["runId"] for e in reply.events if e["type"] == "RUN_FINISHED"] == ["r1", "r2"]
        logged = reply.json["events"][reply.json["unlogged"] :]
        assert [protocol.dumps(event) for event in logged] == await scripts.stored(run__run_id="r2")

    async def test_the_same_post_again_waits_for_the_same_turn(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        second, again = [await turn(ada, "r2", *text("m2", "ho")) for _ in range(2)]
        other = await ada.run(run_input(run="r2", script=[HANG]))
        assert (other.status, other.code) == (409, "run_id_taken")
        await stop(ada, "r1")
        await first.rest()
        assert (await second.rest()).raw == (await again.rest()).raw

    async def test_the_same_post_later_gets_the_same_stream(self, ada: Person) -> None:
        await (await turn(ada, "r1", *text("m1", "hi"))).rest()
        stale = run_input(run="r2", messages=[said("r2")], script=text("m2", "ho"))
        once, again = [await ada.run(stale) for _ in range(2)]
        assert once.raw == again.raw
        assert once.headers["AGUI-Unlogged"] == again.headers["AGUI-Unlogged"]

    async def test_an_agent_that_takes_no_queue_refuses(self, ada: Person) -> None:
        with busy("reject"):
            first = await turn(ada, "r1", HANG)
            refused = await ada.run(run_input(run="r2", script=[]))
            assert (refused.status, refused.code) == (409, "thread_busy")
            await stop(ada, "r1")
            await first.rest()
            assert list(await statuses()) == ["r1"]


class TestWithdrawing:
    async def test_a_cancelled_turn_leaves_no_trace_in_the_log(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        second = await turn(ada, "r2")
        third = await turn(ada, "r3")
        assert (await stop(ada, "r2")).json["status"] == "cancelled"
        reply = await second.rest()
        assert not reply.aborted
        assert reply.types == ["RUN_STARTED", "RUN_FINISHED"]
        assert [frame.id for frame in reply.frames] == [None, None]
        assert reply.events[-1]["outcome"] == {"type": "cancelled"}
        legal(reply.events)
        assert (await stop(ada, "r2")).json["status"] == "cancelled"
        await stop(ada, "r1")
        await asyncio.gather(first.rest(), third.rest())
        run = await Run.objects.aget(run_id="r2")
        assert (run.status, run.offset, run.last_seq) == ("cancelled", None, 0)
        assert await users_said(ada) == ["r1", "r3"]
        await contiguous()

    async def test_its_stream_is_over_for_who_comes_later(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        second = await turn(ada, "r2")
        await stop(ada, "r2")
        await second.rest()
        run = await Run.objects.select_related("thread").aget(run_id="r2")
        path = f"/agui/threads/{run.thread.key}/stream?run={run.key}"
        assert (await ada.ask(path)).status == 204
        again = await (await turn(ada, "r2")).rest()
        assert again.types == ["RUN_STARTED", "RUN_FINISHED"]
        await stop(ada, "r1")
        await first.rest()


class TestAnswersGoFirst:
    interrupts = [{"id": "i1", "reason": "ok?"}]

    def ends(self, outcome: Any) -> list[Any]:
        """A run that waits for the others to queue up, then ends so."""
        end = {"type": "RUN_FINISHED", "threadId": "t1", "runId": "r1", "outcome": outcome}
        return [*text("m1", "?"), {"$sleep": 0.3}, end]

    async def test_the_queue_waits_for_the_answer_to_an_interrupt(self, ada: Person) -> None:
        outcome = {"type": "interrupt", "interrupts": self.interrupts}
        first = await turn(ada, "r1", *self.ends(outcome))
        waiting = await turn(ada, "r2")
        await first.rest()
        assert await statuses() == {"r1": "interrupt", "r2": "queued"}
        assert await store.call(store.claim, (await Thread.objects.aget()).pk) is None
        refused = await ada.run(run_input(run="r3", script=[]))
        assert (refused.status, refused.code) == (409, "interrupts_open")
        answer = [{"interruptId": "i1", "status": "resolved"}]
        resumed = await ada.run(run_input(run="r4", script=[], resume=answer))
        assert resumed.types[-1] == "RUN_FINISHED"
        await waiting.rest()
        placed = Run.objects.order_by("offset").values_list("run_id", flat=True)
        assert [run async for run in placed] == ["r1", "r4", "r2"]

    async def test_the_queue_waits_for_the_answer_to_a_frontend_call(self, ada: Person) -> None:
        call = [
            {"type": "TOOL_CALL_START", "toolCallId": "c1", "toolCallName": "pick"},
            {"type": "TOOL_CALL_END", "toolCallId": "c1"},
        ]
        outcome = {"type": "success", "pendingToolCallIds": ["c1"]}
        first = await turn(ada, "r1", *call, *self.ends(outcome))
        waiting = await turn(ada, "r2")
        await first.rest()
        assert await statuses() == {"r1": "success", "r2": "queued"}
        behind = await turn(ada, "r3")
        answer = {"id": "a1", "role": "tool", "toolCallId": "c1", "content": "1001"}
        answered = await ada.run(run_input(run="r4", messages=[answer], script=[]))
        assert answered.types[-1] == "RUN_FINISHED"
        await asyncio.gather(waiting.rest(), behind.rest())
        placed = Run.objects.order_by("offset").values_list("run_id", flat=True)
        assert [run async for run in placed] == ["r1", "r4", "r2", "r3"]

    async def test_an_answer_does_not_wait_behind_a_run(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        answer = [{"interruptId": "i1", "status": "resolved"}]
        refused = await ada.run(run_input(run="r2", script=[], resume=answer))
        assert (refused.status, refused.code) == (409, "thread_busy")
        await stop(ada, "r1")
        await first.rest()


class TestInterrupting:
    async def test_the_new_turn_takes_over(self, ada: Person) -> None:
        with busy("interrupt"):
            first = await turn(ada, "r1", *text("m1", "a")[:2], HANG)
            second = await turn(ada, "r2", *text("m2", "b"))
            cut = await first.rest()
            assert cut.events[-1]["outcome"] == {"type": "cancelled"}
            assert (await second.rest()).types[-1] == "RUN_FINISHED"
            assert await statuses() == {"r1": "cancelled", "r2": "success"}
            await contiguous()

    async def test_of_many_the_last_one_answers_and_no_turn_is_lost(self, ada: Person) -> None:
        with busy("interrupt"):
            streams = [await turn(ada, "r0", HANG)]
            posts = (turn(ada, f"r{n}", *text(f"m{n}", "x"), {"$sleep": 0.2}) for n in range(1, 6))
            streams += await asyncio.gather(*posts)
            replies = await asyncio.gather(*(stream.rest() for stream in streams))
            assert all(reply.types[-1] == "RUN_FINISHED" for reply in replies)
            found = [run.status async for run in Run.objects.order_by("offset")]
            assert found == [*["cancelled"] * 5, "success"]
            assert sorted(await users_said(ada)) == [f"r{n}" for n in range(6)]
            await contiguous()


class TestStarting:
    @pytest.mark.parametrize("ended", [False, True])
    async def test_a_turn_survives_the_process_that_queued_it(
        self, ada: Person, settings: Any, ended: bool
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "SWEEP_SECONDS": 0.2}
        dead = await store.call(store.open_run, scripts.opening(scope=f"user:{ada.user.pk}"))
        waiting = await turn(ada, "r2", *text("m2", "ho"))
        past = timezone.now() - timedelta(seconds=1)
        lost = Run.objects.filter(pk=dead.run.pk)
        await lost.aupdate(lease_expires=past, lease_owner="elsewhere 1 b 1")
        if ended:  # by a command, which takes no turns
            await store.call(recovery.sweep)
        assert (await waiting.rest()).types[-1] == "RUN_FINISHED"
        assert await statuses() == {"r1": "error", "r2": "success"}

    async def test_a_draining_process_leaves_the_queue_to_others(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        second = await turn(ada, "r2")
        engine.current().draining = True
        await stop(ada, "r1")
        await first.rest()
        assert await statuses() == {"r1": "cancelled", "r2": "queued"}
        engine.current().draining = False
        thread = await Thread.objects.aget()
        run = await store.call(store.claim, thread.pk)
        assert run is not None
        assert await store.call(store.claim, thread.pk) is None
        engine.current().adopt(run)
        assert (await second.rest()).types[-1] == "RUN_FINISHED"

    async def test_an_edit_that_is_stale_when_its_turn_comes_edits_nothing(
        self, ada: Person
    ) -> None:
        first = await turn(ada, "r1", {"$sleep": 0.3}, *text("m1", "hi"))
        thread = await Thread.objects.aget()
        props = {"script": [], "aguiapp": {"base": f"{thread.epoch}-1"}}
        await first.until(lambda raw: len(scripts.frames(raw)) == 1)
        edit = run_input(run="r2", messages=[said("u9", "other")], forwardedProps=props)
        second = await ada.watch(edit)
        await first.rest()
        reply = await second.rest()
        assert (reply.types[-1], reply.events[-1]["code"]) == ("RUN_ERROR", "stale_history")
        messages = [message["id"] for message in (await snapshot(ada))["messages"]]
        assert messages == ["r1", "m1"]
        await contiguous()

    @pytest.mark.parametrize("why", ["gone", "not ready"])
    async def test_an_agent_that_is_not_there_when_its_turn_comes_ends_it(
        self, ada: Person, why: str
    ) -> None:
        state = {"ready": True}
        options: dict[str, Any] = {"busy": "enqueue", "ready": lambda: state["ready"]}
        with scripts.registered("guest", scripted.play, **options):
            first = await turn(ada, "r1", HANG)
            given = run_input(run="r2", messages=[said("r2", "r2")], script=[])
            second = await ada.watch(given, "guest")
            third = await turn(ada, "r3", *text("m3", "ho"))
            state["ready"] = False
            if why == "gone":
                agents.unregister("guest")
            await stop(ada, "r1")
            await first.rest()
            reply = await second.rest()
            assert (reply.types[-1], reply.events[-1]["code"]) == ("RUN_ERROR", "agent_not_ready")
            assert (await third.rest()).types[-1] == "RUN_FINISHED"
            assert await users_said(ada) == ["r1", "r2", "r3"]
            await contiguous()

    async def test_the_actor_is_who_asked_also_when_another_starts_it(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        second = await turn(ada, "r2")
        await stop(ada, "r1")
        replies = [await stream.rest() for stream in (first, second)]
        actors = [
            event["metadata"]["aguiapp"]["actor"]
            for reply in replies
            for event in reply.events
            if event["type"] == "RUN_STARTED" and "input" in event
        ]
        assert len(actors) == 2
        assert len(set(actors)) == 1

    async def test_a_finish_whose_answer_was_lost_still_names_the_next_run(
        self, ada: Person, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = await turn(ada, "r1", HANG)
        second = await turn(ada, "r2", *text("m2", "ho"))
        lost = lose_the_first_answer(monkeypatch)
        await stop(ada, "r1")
        await first.rest()
        assert (await second.rest()).types[-1] == "RUN_FINISHED"
        assert lost["times"] == 1
        await contiguous()


def lose_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The next finish is committed, but who asked for it hears of a lost connection."""
    finish, lost = store.finish, {"times": 0}

    def committed_unheard(*arguments: Any, **options: Any) -> Any:
        done = finish(*arguments, **options)
        if not lost["times"]:
            lost["times"] += 1
            raise OperationalError("the connection was lost in COMMIT")
        return done

    monkeypatch.setattr(store, "finish", committed_unheard)
    return lost


class TestAtOnce:
    async def test_of_many_posts_at_once_all_run_in_order(self, ada: Person) -> None:
        posts = (turn(ada, f"r{n}", *text(f"m{n}", "x")) for n in range(15))
        streams = await asyncio.gather(*posts)
        await asyncio.gather(*(stream.rest() for stream in streams))
        assert set((await statuses()).values()) == {"success"}
        assert sorted(await users_said(ada)) == sorted(f"r{n}" for n in range(15))
        by_place = [run.pk async for run in Run.objects.order_by("offset")]
        assert by_place == sorted(by_place)
        await contiguous()

    async def test_readers_of_the_thread_see_every_turn(self, ada: Person) -> None:
        first = await turn(ada, "r1", HANG)
        thread = await Thread.objects.aget()
        watching = Stream(await ada.open(f"/agui/threads/{thread.key}/stream"))
        streams = [await turn(ada, f"r{n}", *text(f"m{n}", "x")) for n in (2, 3)]
        await stop(ada, "r1")
        await asyncio.gather(*(stream.rest() for stream in (first, *streams)))
        total = len(await scripts.stored())
        raw = await watching.until(lambda raw: len(scripts.frames(raw)) == total)
        assert [frame.data for frame in scripts.frames(raw)] == await scripts.stored()


async def test_run_now_takes_no_other_turn(ada: Person) -> None:
    def whole() -> Run:
        return engine.run_now("scripted", run_input("t9", script=text("m1", "x")), user=ada.user)

    run = await scripts.elsewhere(whole)
    assert run.status == "success"
