"""One run's life: driving, slowing, ending, cancelling, fencing, sweeping; no server needed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.utils import timezone
from django.utils.translation import gettext_lazy

from aguiapp import RunContext, RunError, engine, errors, feed, protocol, store
from aguiapp.engine import leases, recovery
from aguiapp.models import InputMessage, Run, RunEvent, Thread
from aguiapp.store import sql
from project import scripted
from tests import scripts
from tests.scripts import drive, events_of, legal, of, only_run, request, run_input, said, text

pytestmark = pytest.mark.django_db(transaction=True)

STARTED = {"type": "RUN_STARTED", "threadId": "t1", "runId": "r1"}
FINISHED = {"type": "RUN_FINISHED", "threadId": "t1", "runId": "r1"}
CALL = {"type": "TOOL_CALL_START", "toolCallId": "c1", "toolCallName": "lookup"}
OPEN = [
    {"type": "STEP_STARTED", "stepName": "s1"},
    {"type": "SUBAGENT_STARTED", "subagentRunId": "a1", "name": "helper"},
    CALL,
    {"type": "TOOL_CALL_ARGS", "toolCallId": "c1", "delta": '{"half'},
    {"type": "REASONING_START", "messageId": "g1"},
    {"type": "REASONING_MESSAGE_START", "messageId": "g1", "role": "reasoning"},
    {"type": "TEXT_MESSAGE_START", "messageId": "m1", "role": "assistant"},
]


@pytest.fixture(autouse=True)
def scripted_agent() -> Iterator[None]:
    with scripts.registered("scripted", scripted.play):
        yield


async def play(*script: Any, run: str = "r1", thread: str = "t1", **more: Any) -> Run:
    """A whole run of a script."""
    return await drive(run_input(thread, run, script=script, **more))


async def kinds(run: Run) -> list[str]:
    """The types of the run's events; they are legal."""
    events = await events_of(run)
    legal(events)
    return [event["type"] for event in events]


async def begun(agent: Any, body: Any = None, *, marker: str = "CUSTOM") -> engine.Started:
    """A run that goes on, once an event of that type was delivered."""
    started = await engine.start(request(run_input() if body is None else body, agent=agent))
    async with asyncio.timeout(scripts.SECONDS):
        async for payload in scripts.follow(started.thread, 0, started.run):
            if f'"type":"{marker}"' in payload:
                break
    return started


async def over(started: engine.Started) -> Run:
    """The run, once driver and agent are gone."""
    assert started.task is not None
    await asyncio.wait_for(asyncio.shield(started.task), scripts.SECONDS)
    return await only_run(pk=started.run.pk)


# -- terminals -------------------------------------------------------------------


class TestTerminals:
    async def test_a_quiet_agent_gets_both_ends(self) -> None:
        run = await play(*text("m1", "hi"))
        events = await events_of(run)
        assert events[0]["type"] == "RUN_STARTED"
        assert events[0]["protocolVersion"] == "1.0"
        assert events[-1]["type"] == "RUN_FINISHED"
        assert events[-1]["outcome"] == {"type": "success"}
        assert (run.status, run.last_seq, run.offset) == ("success", 5, 0)
        assert run.counts == {
            "RUN_STARTED": 1,
            "TEXT_MESSAGE_START": 1,
            "TEXT_MESSAGE_CONTENT": 1,
            "TEXT_MESSAGE_END": 1,
            "RUN_FINISHED": 1,
        }
        assert all(isinstance(event["timestamp"], int) for event in events)
        assert run.bytes == sum(len(p.encode()) for p in await scripts.stored(run_id=run.pk))

    @pytest.mark.parametrize("count", [1, 3000])
    async def test_the_row_tells_when_the_first_event_came(self, count: int) -> None:
        event = {"type": "CUSTOM", "name": "n", "value": "x" * 100}
        run = await play({"$repeat": count, "event": event})
        assert run.started_at is not None
        assert run.finished_at is not None
        assert run.first_event_at is not None
        assert run.started_at - timedelta(seconds=1) <= run.first_event_at <= run.finished_at

    async def test_the_echo_holds_ids_and_new_messages_only(self) -> None:
        tool = {"name": "secret_tool", "description": "d", "parameters": {}}
        run = await play(
            messages=[said("u1")], tools=[tool], context=[{"description": "d", "value": "v"}]
        )
        start = (await events_of(run))[0]
        assert start["input"] == {"threadId": "t1", "runId": "r1", "messages": [said("u1")]}
        assert start["metadata"]["aguiapp"]["actor"] == "p1"
        assert "secret_tool" not in json.dumps(await events_of(run))

    @pytest.mark.parametrize(
        "after",
        [
            text("late", "never heard"),
            [{"$raise": "RuntimeError", "message": "too late"}],
            [{"$raise": "SystemExit"}],
            [{"type": "RUN_ERROR", "message": "second"}],
            [FINISHED],
            [STARTED],
            [{"type": "CUSTOM"}],
            [{"type": "STATE_SNAPSHOT", "snapshot": {"late": 1}}],
        ],
    )
    @pytest.mark.parametrize("end", [FINISHED, {"type": "RUN_ERROR", "message": "no"}])
    async def test_after_the_terminal_nothing_changes_the_wire(
        self, end: Any, after: list[Any]
    ) -> None:
        run = await play(STARTED, end, *after)
        assert await kinds(run) == ["RUN_STARTED", end["type"]]
        assert run.status == ("success" if end is FINISHED else "error")
        assert (await store.call(store.snapshot, run.thread)).fold.state == {}
        assert run.findings

    async def test_findings_after_the_end_are_bounded(self) -> None:
        run = await play(
            FINISHED, {"$repeat": 500, "event": {"type": "CUSTOM", "name": "$i", "value": 1}}
        )
        assert 1 <= len(run.findings) <= 100

    async def test_an_agent_that_never_stops_after_its_end_is_stopped(self) -> None:
        """It could not be heard any more, but it would hold its task for ever."""
        run = await play(FINISHED, {"$forever": [{"type": "CUSTOM", "name": "n", "value": 1}]})
        assert run.status == "success"

    @pytest.mark.parametrize("name", sorted(scripted.EXCEPTIONS))
    async def test_every_exception_ends_the_run_in_public_words(self, name: str) -> None:
        run = await play(*text("m1", "x")[:2], {"$raise": name, "message": "secret words"})
        assert await kinds(run) == [
            "RUN_STARTED",
            "TEXT_MESSAGE_START",
            "TEXT_MESSAGE_CONTENT",
            "TEXT_MESSAGE_END",
            "RUN_ERROR",
        ]
        last = (await events_of(run))[-1]
        assert last["code"] == run.error_code == "agent_failed"
        assert last["message"]
        assert "secret words" not in json.dumps(last)
        assert last["metadata"]["aguiapp"]["runKey"] == str(run.key)

    async def test_run_error_is_how_an_agent_speaks_to_people(self) -> None:
        run = await play({"$raise": "aguiapp.RunError", "message": "No order.", "code": "no_order"})
        last = (await events_of(run))[-1]
        assert (last["message"], last["code"]) == ("No order.", "no_order")
        assert last["metadata"]["aguiapp"]["runKey"] == str(run.key)
        assert (run.status, run.error_code, run.error_message) == ("error", "no_order", "No order.")

    @pytest.mark.parametrize("message", [gettext_lazy("Enter a number."), "a\0b\ud800"])
    async def test_run_error_takes_any_text_of_django(self, message: Any) -> None:
        async def agent(run: RunContext) -> None:
            raise RunError(message, code="x" * 100)

        with scripts.registered("lazy", agent):
            run = await drive(run_input(), agent="lazy")
        last = (await events_of(run))[-1]
        assert (last["type"], last["message"]) == ("RUN_ERROR", str(message))
        assert last["code"] == "x" * 100
        assert run.status == "error"

    async def test_an_error_event_before_a_normal_return_is_the_status(self) -> None:
        run = await play(*text("m1", "x")[:2], {"type": "RUN_ERROR", "message": "m", "code": "c"})
        assert (run.status, run.error_code) == ("error", "c")
        assert (await kinds(run))[-2:] == ["TEXT_MESSAGE_END", "RUN_ERROR"]

    async def test_whoever_starts_the_run_owes_its_end(self) -> None:
        run = await play(STARTED, *text("m1", "x"))
        assert (run.status, run.error_code) == ("error", "incomplete")
        assert (await kinds(run)).count("RUN_STARTED") == 1

    @pytest.mark.parametrize(
        "left",
        [OPEN[:1], OPEN[1:2], OPEN[2:3], OPEN[4:5], OPEN[4:6], OPEN[6:7]],
        ids=lambda left: str(left[0]["type"]),
    )
    async def test_success_only_if_nothing_is_open(self, left: list[Any]) -> None:
        run = await play(*left)
        assert (run.status, run.error_code) == ("error", "incomplete")

    async def test_an_error_closes_text_reasoning_and_steps_but_no_call(self) -> None:
        run = await play(*OPEN, {"$raise": "ValueError"})
        assert (await kinds(run))[1 + len(OPEN) :] == [
            "TEXT_MESSAGE_END",
            "REASONING_MESSAGE_END",
            "REASONING_END",
            "STEP_FINISHED",
            "RUN_ERROR",
        ]

    async def test_a_cancellation_closes_everything_in_order(self) -> None:
        started = await begun(
            "scripted", run_input(script=[*OPEN, {"$hang": True}]), marker="TEXT_MESSAGE_START"
        )
        ended = await asyncio.wait_for(engine.cancel(started.run, "p1"), scripts.SECONDS)
        assert ended.status == "cancelled"
        run = await over(started)
        assert (await kinds(run))[1 + len(OPEN) :] == [
            "TEXT_MESSAGE_END",
            "REASONING_MESSAGE_END",
            "REASONING_END",
            "TOOL_CALL_END",
            "TOOL_CALL_RESULT",
            "STEP_FINISHED",
            "SUBAGENT_ERROR",
            "RUN_FINISHED",
        ]
        events = await events_of(run)
        assert "rror" in of(events, "TOOL_CALL_RESULT")[0]["content"]
        assert of(events, "SUBAGENT_ERROR")[0]["code"] == "cancelled"
        assert events[-1]["outcome"] == {"type": "cancelled"}

    async def test_pending_calls_are_named_in_the_outcome(self) -> None:
        run = await play(CALL, {"type": "TOOL_CALL_END", "toolCallId": "c1"})
        last = (await events_of(run))[-1]
        assert last["outcome"] == {"type": "success", "pendingToolCallIds": ["c1"]}


# -- what an agent may yield -----------------------------------------------------


class TestViolations:
    @pytest.mark.parametrize(
        ("bad", "rule"),
        [
            ([{**STARTED, "threadId": "other"}], "VERIFY-42"),
            ([{**STARTED, "runId": "other"}], "VERIFY-4"),
            ([{**FINISHED, "runId": "other"}], "VERIFY-41"),
            ([{"type": "TEXT_MESSAGE_CONTENT", "messageId": "m", "delta": "x"}], "VERIFY-10"),
            ([{"type": "TEXT_MESSAGE_CONTENT", "messageId": "m", "delta": "\ud83d"}], "VERIFY-10"),
            ([*text("m1", "x")[:1], FINISHED], "VERIFY-33"),
            ([{"type": "TEXT_MESSAGE_START"}], "malformed"),
            ([{"type": "STATE_SNAPSHOT", "snapshot": {}}, STARTED], "VERIFY-04"),
            ([CALL, {"type": "TOOL_CALL_END", "toolCallId": "c1"}, CALL], "repeated_call"),
        ],
    )
    async def test_a_violation_names_its_rule_and_is_not_stored(
        self, bad: list[Any], rule: str
    ) -> None:
        run = await play(*bad)
        events = await events_of(run)
        legal(events)
        assert run.error_code == "protocol_violation"
        assert rule in events[-1]["message"]
        assert rule in run.error_detail
        closers = of(events, "TEXT_MESSAGE_END")
        assert len(events) - len(closers) <= len(bad) + 1
        assert not of(events, "RUN_FINISHED")

    @pytest.mark.parametrize("odd", [1, None, object(), "{", "[]", '{"type":1}', b"\xff", {}])
    async def test_what_is_no_event_ends_the_run(self, odd: Any) -> None:
        async def agent(run: RunContext) -> AsyncIterator[Any]:
            yield odd

        with scripts.registered("odd", agent):
            run = await drive(run_input(), agent="odd")
        assert await kinds(run) == ["RUN_STARTED", "RUN_ERROR"]
        assert run.error_code == "protocol_violation"

    async def test_an_agent_that_swallows_the_refusal_is_stopped_all_the_same(self) -> None:
        async def agent(run: RunContext) -> None:
            for _ in range(3):
                try:
                    await run.emit({"type": "CUSTOM"})
                except Exception as error:
                    seen.append(error)
            await run.emit({"type": "CUSTOM", "name": "n", "value": 1})

        seen: list[Exception] = []
        with scripts.registered("deaf", agent):
            run = await drive(run_input(), agent="deaf")
        assert run.error_code == "protocol_violation"
        assert await kinds(run) == ["RUN_STARTED", "RUN_ERROR"]

    async def test_the_agents_finally_runs_before_the_run_is_over(self) -> None:
        async def agent(run: RunContext) -> AsyncIterator[Any]:
            try:
                yield {"type": "CUSTOM"}
            finally:
                await asyncio.sleep(0)
                closed.append(asyncio.current_task())

        closed: list[Any] = []
        with scripts.registered("tidy", agent):
            await drive(run_input(), agent="tidy")
        assert len(closed) == 1

    async def test_a_pair_cut_across_two_deltas_is_joined_before_storage(self) -> None:
        whole = "\U0001f600"
        high, low = "\ud83d", "\ude00"
        run = await play(*text("m1", f"a{high}", f"{low}b{high}", high, low, f"{high}x"))
        deltas = [e["delta"] for e in of(await events_of(run), "TEXT_MESSAGE_CONTENT")]
        assert "".join(deltas) == f"a{whole}b{high}{whole}{high}x"
        assert (await store.call(store.snapshot, run.thread)).fold.messages[0][
            "content"
        ] == f"a{whole}b{high}{whole}{high}x"

    @pytest.mark.parametrize("ending", [[], [{"$raise": "ValueError"}], [FINISHED]])
    async def test_a_half_at_the_very_end_is_kept(self, ending: list[Any]) -> None:
        run = await play(*text("m1", "a\ud83d")[: 3 if ending == [FINISHED] else 2], *ending)
        messages = (await store.call(store.snapshot, run.thread)).fold.messages
        assert messages[0]["content"] == "a\ud83d"
        await kinds(run)

    async def test_a_patch_that_does_not_apply_is_noted(self) -> None:
        """Clients ignore it with a warning; nobody should have to guess why."""
        bad = [{"op": "replace", "path": "/nope/deep", "value": 1}]
        run = await play({"type": "STATE_DELTA", "delta": bad})
        assert run.status == "success"
        assert run.findings


class TestLimits:
    async def test_an_event_too_large_ends_legally(self, settings: Any) -> None:
        settings.AGUIAPP = {"EVENT_BYTES": 2000}
        run = await play(*text("m1", "x" * 100, "y" * 3000))
        assert run.error_code == "event_too_large"
        assert (await kinds(run))[-2:] == ["TEXT_MESSAGE_END", "RUN_ERROR"]

    @pytest.mark.parametrize("limit", [{"RUN_EVENTS": 20}, {"RUN_BYTES": 2000}])
    async def test_a_run_too_large_ends_legally(self, limit: Any, settings: Any) -> None:
        settings.AGUIAPP = limit
        event = {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m1", "delta": "x"}
        run = await play(*text("m1")[:1], {"$repeat": 1000, "event": event})
        assert run.error_code == "run_too_large"
        assert (await kinds(run))[-2:] == ["TEXT_MESSAGE_END", "RUN_ERROR"]
        assert run.last_seq < 40

    async def test_an_outcome_too_large_ends_legally(self, settings: Any) -> None:
        settings.AGUIAPP = {"EVENT_BYTES": 2000}
        run = await play(STARTED, {**FINISHED, "result": "x" * 3000})
        assert run.error_code == "event_too_large"
        assert await kinds(run) == ["RUN_STARTED", "RUN_ERROR"]

    @pytest.mark.parametrize(
        "bomb",
        [
            [{"op": "copy", "from": "", "path": "/a"}] * 120,
            [{"op": "copy", "from": "/l", "path": "/l/-"}] * 30,
        ],
    )
    async def test_a_copy_bomb_is_no_state(self, bomb: list[Any], settings: Any) -> None:
        settings.AGUIAPP = {"STATE_BYTES": 10_000}
        state = {"l": ["x" * 50]}
        run = await play(
            {"type": "STATE_SNAPSHOT", "snapshot": state}, {"type": "STATE_DELTA", "delta": bomb}
        )
        assert run.status == "error"
        assert run.error_code == "state_too_large"
        assert (await store.call(store.snapshot, run.thread)).fold.state == state

    @pytest.mark.parametrize("pieces", [1, 20])
    async def test_a_state_grows_to_its_limit_and_no_further(
        self, pieces: int, settings: Any
    ) -> None:
        settings.AGUIAPP = {"STATE_BYTES": 10_000}
        add = {"type": "STATE_DELTA", "delta": [{"op": "add", "path": "/k$i", "value": "x" * 600}]}
        run = await play({"$repeat": 30, "event": add})
        assert run.error_code == "state_too_large"
        fold = (await store.call(store.snapshot, run.thread)).fold
        assert len(json.dumps(fold.state)) <= 10_500
        assert len(fold.state) >= 14

    async def test_a_state_of_earlier_runs_counts(self, settings: Any) -> None:
        """Each run alone stays below the limit; the thread's state must as well."""
        settings.AGUIAPP = {"STATE_BYTES": 10_000}
        for number in range(4):
            add = {"op": "add", "path": f"/k{number}", "value": "x" * 4000}
            await play({"type": "STATE_DELTA", "delta": [add]}, run=f"r{number}")
        thread = await Thread.objects.aget()
        fold = (await store.call(store.snapshot, thread)).fold
        assert len(json.dumps(fold.state)) <= 10_000

    async def test_a_state_nested_by_many_patches_ends_legally(self) -> None:
        """Every event is shallow; what they build must still be written, hashed and shown."""

        async def agent(run: RunContext) -> None:
            path = ""
            for _ in range(1200):
                path += "/a"
                await run.patch_state([{"op": "add", "path": path, "value": {}}])

        with scripts.registered("digger", agent):
            run = await drive(run_input(), agent="digger")
        assert run.ended
        assert run.error_code != "store_failed"
        await kinds(run)
        again = await play(run="r2")
        assert again.status == "success"


# -- pace ------------------------------------------------------------------------


class TestPace:
    async def test_an_agent_waits_while_too_much_is_uncommitted(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings.AGUIAPP = {"UNCOMMITTED_BYTES": 20_000}
        gate, original = threading.Event(), scripts.writer.commit
        sent: list[int] = []

        def commit(jobs: Any) -> Any:
            assert gate.wait(scripts.SECONDS)
            return original(jobs)

        async def eager(run: RunContext) -> AsyncIterator[Any]:
            for number in range(200):
                sent.append(number)
                yield {"type": "CUSTOM", "name": "n", "value": "x" * 900}

        monkeypatch.setattr(scripts.writer, "commit", commit)
        with scripts.registered("eager", eager):
            started = await engine.start(request(run_input(), agent="eager"))
            driver = engine.current().drivers[started.run.pk]
            await scripts.until(lambda: driver.lane.uncommitted > 20_000)
            for _ in range(50):
                await asyncio.sleep(0)
            assert 15 < len(sent) < 30
            assert driver.lane.uncommitted < 23_000
            gate.set()
            run = await over(started)
        assert len(sent) == 200
        assert run.last_seq == 202

    async def test_an_agent_that_never_waits_lets_others_live(self) -> None:
        turns = 0

        async def greedy(run: RunContext) -> AsyncIterator[Any]:
            for number in range(2000):
                yield {"type": "CUSTOM", "name": "n", "value": number}

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.ensure_future(count())
        with scripts.registered("greedy", greedy):
            await drive(run_input(), agent="greedy")
        counter.cancel()
        assert turns > 5

    async def test_nobody_sees_what_is_not_committed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, original = threading.Event(), scripts.writer.commit

        def commit(jobs: Any) -> Any:
            assert gate.wait(scripts.SECONDS)
            return original(jobs)

        monkeypatch.setattr(scripts.writer, "commit", commit)
        started = await engine.start(request(run_input(script=text("m1", "x"))))
        seen: list[str] = []

        async def read() -> None:
            async for payload in scripts.follow(started.thread, 0, started.run):
                seen.append(payload)

        reader = asyncio.ensure_future(read())
        for _ in range(50):
            await asyncio.sleep(0)
        assert seen == []
        gate.set()
        await asyncio.wait_for(reader, scripts.SECONDS)
        assert seen == await scripts.stored()


# -- fencing, leases, the dead ---------------------------------------------------


async def forever(run: RunContext) -> AsyncIterator[Any]:
    """An agent that says one thing and waits."""
    yield {"type": "CUSTOM", "name": "n", "value": 1}
    await asyncio.Event().wait()


class TestFence:
    async def test_a_revoked_token_stops_the_driver_and_no_row_follows(self) -> None:
        go, cancelled = asyncio.Event(), asyncio.Event()

        async def stubborn(run: RunContext) -> AsyncIterator[Any]:
            yield {"type": "CUSTOM", "name": "n", "value": 1}
            await go.wait()
            try:
                for number in range(10**6):
                    yield {"type": "CUSTOM", "name": "n", "value": number}
                    await asyncio.sleep(0)
            finally:
                cancelled.set()

        with scripts.registered("stubborn", stubborn):
            started = await begun("stubborn")
            assert await store.call(
                recovery.take_over, await only_run_now(), status="error", code="orphaned"
            )
            before = await scripts.stored()
            go.set()
            run = await over(started)
        assert cancelled.is_set()
        assert await scripts.stored() == before
        assert (run.status, run.error_code) == ("error", "orphaned")
        legal([json.loads(payload) for payload in before])

    async def test_a_silent_run_notices_at_the_lease_renewal(self, settings: Any) -> None:
        settings.AGUIAPP = {"LEASE_SECONDS": 0.5}
        with scripts.registered("forever", forever):
            started = await begun("forever")
            await Run.objects.aupdate(lease_token=1)
            run = await over(started)
        assert run.status == "running"
        assert len(await scripts.stored()) == 2

    async def test_leases_are_renewed_while_the_run_goes_on(self, settings: Any) -> None:
        settings.AGUIAPP = {"LEASE_SECONDS": 0.5}
        with scripts.registered("forever", forever):
            started = await begun("forever")
            first = (await Run.objects.aget()).lease_expires
            async with asyncio.timeout(scripts.SECONDS):
                while (run := await Run.objects.aget()).lease_expires == first:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert run.last_seq == 2
            assert run.bytes > 0
            await engine.cancel(started.run, "p1")
            await over(started)

    async def test_an_expired_lease_is_swept_into_an_error(self) -> None:
        opened = await store.call(store.open_run, scripts.opening())
        driver_rows = [scripts.row(1, STARTED), *(scripts.row(n, e) for n, e in enumerate(OPEN, 2))]
        await store.call(store_rows, opened.run, driver_rows)
        past = timezone.now() - timedelta(seconds=1)
        await Run.objects.aupdate(lease_expires=past, lease_owner="elsewhere 1 b 1")
        (swept,) = await store.call(recovery.sweep)
        assert swept.pk == opened.run.pk
        run = await only_run()
        assert (run.status, run.error_code) == ("error", "orphaned")
        assert (await kinds(run))[-2:] == ["STEP_FINISHED", "RUN_ERROR"]
        assert run.last_seq == len(await scripts.stored())
        assert await store.call(recovery.sweep) == []

    async def test_a_run_without_any_event_is_swept_as_well(self) -> None:
        await store.call(store.open_run, scripts.opening())
        await Run.objects.aupdate(lease_expires=timezone.now() - timedelta(seconds=1))
        await store.call(recovery.sweep)
        run = await only_run()
        assert run.status == "error"
        assert await kinds(run) == ["RUN_STARTED", "RUN_ERROR"]
        assert (await play(run="r2")).status == "success"
        assert await kinds(run) == ["RUN_STARTED", "RUN_ERROR"]

    async def test_one_unreadable_run_does_not_keep_the_others_from_being_swept(self) -> None:
        for name in ("a", "b", "c"):
            opened = await store.call(store.open_run, scripts.opening(thread=name))
            row = scripts.row(1, {**STARTED, "threadId": name})
            broken = row._replace(payload="{broken") if name == "b" else row
            await store.call(store_rows, opened.run, [broken])
        await Run.objects.aupdate(lease_expires=timezone.now() - timedelta(seconds=1))
        await store.call(quietly, recovery.sweep)
        await Run.objects.filter(status="running").aupdate(
            lease_expires=timezone.now() - timedelta(seconds=1)
        )
        await store.call(quietly, recovery.sweep)
        assert not await Run.objects.filter(status="running").aexists()

    async def test_a_dead_owner_gives_way_to_the_next_post_at_once(self) -> None:
        opened = await store.call(store.open_run, scripts.opening(scope="system"))
        await store.call(
            store_rows, opened.run, [scripts.row(1, STARTED), scripts.row(2, OPEN[-1])]
        )
        owner = f"{socket.gethostname()} 1 another-boot 1"
        await Run.objects.aupdate(lease_owner=owner)
        run = await play(*text("m2", "next"), run="r2")
        assert run.status == "success"
        first = await only_run(run_id="r1")
        assert (first.status, first.error_code) == ("error", "orphaned")
        assert (first.last_seq, run.offset) == (4, 4)
        legal([json.loads(payload) for payload in await scripts.stored()])

    async def test_a_post_waits_for_a_takeover_that_is_under_way(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first post after a crash comes just when this process sweeps."""
        opened = await store.call(store.open_run, scripts.opening(scope="system"))
        await store.call(store_rows, opened.run, [scripts.row(1, STARTED)])
        await Run.objects.aupdate(lease_owner=f"{socket.gethostname()} 1 another-boot 1")
        taken, gate, tried = threading.Event(), threading.Event(), threading.Event()
        end_stored, open_run = recovery.end_stored, store.open_run

        def slow(*args: Any, **kwargs: Any) -> None:
            taken.set()
            assert gate.wait(scripts.SECONDS)
            end_stored(*args, **kwargs)

        def counted(*args: Any) -> Any:
            try:
                return open_run(*args)
            finally:
                tried.set()

        monkeypatch.setattr(recovery, "end_stored", slow)
        monkeypatch.setattr(store, "open_run", counted)
        sweep = asyncio.ensure_future(asyncio.to_thread(closing_connection, recovery.sweep))
        await asyncio.to_thread(taken.wait, scripts.SECONDS)
        post = asyncio.ensure_future(engine.start(request(run_input(run="r2", script=[]))))
        await asyncio.to_thread(tried.wait, scripts.SECONDS)
        gate.set()
        await sweep
        started = await asyncio.wait_for(post, scripts.SECONDS)
        assert (await over(started)).status == "success"

    async def test_the_followers_of_an_orphan_see_its_end(self, settings: Any) -> None:
        settings.AGUIAPP = {"POLL_SECONDS": 0.05}
        opened = await store.call(store.open_run, scripts.opening())
        await store.call(store_rows, opened.run, [scripts.row(1, STARTED)])
        await Run.objects.aupdate(lease_expires=timezone.now() - timedelta(seconds=1))
        engine.current().wake()
        async with asyncio.timeout(scripts.SECONDS):
            seen = [p async for p in scripts.follow(opened.thread, 0, opened.run)]
        assert "RUN_ERROR" in seen[-1]


async def only_run_now() -> Run:
    """The one run, as it is, with its thread."""
    return await Run.objects.select_related("thread").aget()


def store_rows(run: Run, rows: list[store.Row]) -> None:
    """Rows of a run that some process wrote before it died."""
    found = sql.connection()
    with sql.writing(found):
        sql.insert(found, [(run.pk, rows)])


def closing_connection(function: Any) -> Any:
    """Work of a thread that is not the store's."""
    try:
        return function()
    finally:
        connections.close_all()


def quietly(function: Any) -> None:
    """What a sweeper does with an exception."""
    try:
        function()
    except Exception as error:
        logging.getLogger("aguiapp").warning("sweep failed: %s", error)


class TestStoreFailures:
    async def test_the_end_of_a_run_outlasts_a_lock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original, refusals = store.finish, iter(range(3))

        def locked(*args: Any, **kwargs: Any) -> None:
            if next(refusals, None) is not None:
                raise OperationalError("canceling statement due to lock timeout")
            original(*args, **kwargs)

        monkeypatch.setattr(store, "finish", locked)
        run = await play(*text("m1", "kept"))
        assert run.status == "success"
        assert await kinds(run) == [
            "RUN_STARTED",
            "TEXT_MESSAGE_START",
            "TEXT_MESSAGE_CONTENT",
            "TEXT_MESSAGE_END",
            "RUN_FINISHED",
        ]

    async def test_a_locked_run_is_left_to_whoever_holds_it(self) -> None:
        if connection.vendor != "postgresql":
            pytest.skip("SQLite has no row locks")
        opened = await store.call(store.open_run, scripts.opening())
        holding, done = threading.Event(), threading.Event()

        def hold() -> None:
            with transaction.atomic():
                Run.objects.select_for_update().get(pk=opened.run.pk)
                holding.set()
                done.wait(scripts.SECONDS)

        holder = asyncio.ensure_future(asyncio.to_thread(closing_connection, hold))
        await asyncio.to_thread(holding.wait, scripts.SECONDS)
        try:
            assert await store.call(store.take, opened.run) is None
            with pytest.raises(OperationalError):
                await store.call(store.command, opened.run, "cancel", "p1")
        finally:
            done.set()
            await holder
        assert await store.call(store.take, opened.run)

    @pytest.mark.parametrize("arrived", [True, False])
    async def test_a_connection_lost_at_any_commit_costs_and_doubles_nothing(
        self, arrived: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original, count = scripts.writer._commit_together, iter(range(100))

        def lossy(jobs: Any) -> Any:
            if next(count) % 2:
                return original(jobs)
            if arrived:
                original(jobs)
            raise OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(scripts.writer, "_commit_together", lossy)
        script = [{"$repeat": 20, "events": [*text("m$i", "x"), {"$sleep": 0.002}]}]
        started = await engine.start(request(run_input(script=script)))
        seen = [p async for p in scripts.follow(started.thread, 0, started.run)]
        run = await over(started)
        assert run.status == "success"
        assert seen == await scripts.stored()
        assert len(seen) == 62
        assert run.last_seq == 62

    async def test_what_cannot_be_stored_ends_the_run_from_what_was(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def agent(run: RunContext) -> AsyncIterator[Any]:
            for event in text("m1", "kept", "lost")[:3]:
                if "lost" in str(event):
                    monkeypatch.setattr(scripts.writer, "commit", refuse)
                yield event
                await asyncio.wait_for(store.writer().below(lane(), 0), scripts.SECONDS)

        def refuse(jobs: Any) -> Any:
            return [ValueError("disk full of secrets") for _ in jobs]

        def lane() -> store.Lane:
            (driver,) = engine.current().drivers.values()
            return driver.lane

        with scripts.registered("unlucky", agent):
            run = await drive(run_input(), agent="unlucky")
        events = await events_of(run)
        legal(events)
        assert run.error_code == "store_failed"
        assert [e["type"] for e in events][-2:] == ["TEXT_MESSAGE_END", "RUN_ERROR"]
        assert "lost" not in json.dumps(events)
        assert "secrets" not in json.dumps(events)
        assert "secrets" in run.error_detail
        assert not engine.current().drivers

    async def test_an_agent_that_cannot_be_prepared_frees_the_thread(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine.history, "merge", lambda *a, **k: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                await engine.start(request(run_input()))
        assert (await only_run()).status == "error"
        assert (await play(run="r2")).status == "success"


# -- one run per thread ----------------------------------------------------------


class TestSlot:
    async def test_a_busy_thread_is_409(self) -> None:
        with scripts.registered("forever", forever):
            started = await begun("forever")
            with pytest.raises(errors.ThreadBusy) as caught:
                await engine.start(request(run_input(run="r2"), agent="forever"))
            assert caught.value.details["runId"] == "r1"
            await engine.cancel(started.run, "p1")
            await over(started)

    async def test_of_many_posts_at_once_exactly_one_wins(self) -> None:
        with scripts.registered("forever", forever):
            answers = await asyncio.gather(
                *(engine.start(request(run_input(run=f"r{n}"), agent="forever")) for n in range(8)),
                return_exceptions=True,
            )
            won = [a for a in answers if isinstance(a, engine.Started)]
            lost = [a for a in answers if isinstance(a, errors.ThreadBusy)]
            assert (len(won), len(lost)) == (1, 7)
            assert await Run.objects.acount() == 1
            assert await Thread.objects.acount() == 1
            await engine.cancel(won[0].run, "p1")
            await over(won[0])

    async def test_the_same_post_many_times_is_one_run_with_one_stream(self) -> None:
        body = run_input(messages=[said("u1")], script=[*text("m1", "x"), {"$sleep": 0.01}])
        started = await asyncio.gather(*(engine.start(request(body)) for _ in range(6)))
        assert len({s.run.pk for s in started}) == 1
        assert [s.attached for s in started].count(False) == 1
        streams = [
            [p async for p in scripts.follow(s.thread, s.run.offset or 0, s.run)] for s in started
        ]
        streams.append([p async for p in scripts.follow(started[0].thread, 0, started[0].run)])
        late = await engine.start(request(body))
        streams.append([p async for p in scripts.follow(late.thread, 0, late.run)])
        assert all(stream == streams[0] for stream in streams)
        assert await Run.objects.acount() == 1
        assert await InputMessage.objects.acount() == 1

    async def test_the_same_id_with_another_input_is_409(self) -> None:
        await play()
        with pytest.raises(errors.RunIdTaken):
            await engine.start(request(run_input(messages=[said("u1")], script=[])))

    async def test_numbers_that_javascript_holds_equal_are_the_same_post(self) -> None:
        first = await engine.start(request(run_input(script=[], state={"n": 1})))
        await over(first)
        again = await engine.start(request(run_input(script=[], state={"n": 1.0})))
        assert again.attached

    async def test_interrupts_want_answers(self) -> None:
        outcome = {"type": "interrupt", "interrupts": [{"id": "i1", "reason": "approval"}]}
        run = await play({**FINISHED, "outcome": outcome})
        assert run.status == "interrupt"
        with pytest.raises(errors.InterruptsOpen):
            await engine.start(request(run_input(run="r2")))
        answer = [{"interruptId": "other", "status": "resolved"}]
        with pytest.raises(errors.InvalidInput):
            await engine.start(request(run_input(run="r2", resume=answer)))
        assert await Run.objects.acount() == 1
        answer = [{"interruptId": "i1", "status": "resolved"}]
        resumed = await play(run="r2", resume=answer)
        assert resumed.status == "success"
        assert (await play(run="r3")).status == "success"


# -- cancel ----------------------------------------------------------------------


class TestCancel:
    async def test_what_an_agent_writes_while_it_cleans_up_is_logged(self) -> None:
        script: list[Any] = [
            {"$on_cancel": [{"type": "CUSTOM", "name": "cleaned", "value": 1}]},
            {"type": "CUSTOM", "name": "n", "value": 1},
            {"$hang": True},
        ]
        started = await begun("scripted", run_input(script=script))
        assert (await engine.cancel(started.run, "p1")).status == "cancelled"
        run = await over(started)
        assert [e.get("name") for e in await events_of(run)] == [None, "n", "cleaned", None]

    async def test_an_agent_that_ignores_it_is_never_heard_again(self, settings: Any) -> None:
        settings.AGUIAPP = {"CANCEL_SECONDS": 0.05}
        go = asyncio.Event()

        async def deaf(run: RunContext) -> AsyncIterator[Any]:
            yield {"type": "CUSTOM", "name": "n", "value": 1}
            while not go.is_set():
                try:
                    await go.wait()
                except asyncio.CancelledError:
                    continue
            yield {"type": "CUSTOM", "name": "late", "value": 2}

        with scripts.registered("deaf", deaf):
            started = await begun("deaf")
            assert (await engine.cancel(started.run, "p1")).status == "cancelled"
            before = await scripts.stored()
            assert "cancelled" in before[-1]
            go.set()
            run = await over(started)
        assert await scripts.stored() == before
        assert any("after_terminal" in str(finding) for finding in run.findings)

    async def test_twice_is_once(self) -> None:
        with scripts.registered("forever", forever):
            started = await begun("forever")
            ends = await asyncio.gather(*(engine.cancel(started.run, "p1") for _ in range(3)))
            assert {run.status for run in ends} == {"cancelled"}
            assert (await engine.cancel(ends[0], "p1")).status == "cancelled"
            run = await over(started)
        assert (await kinds(run)).count("RUN_FINISHED") == 1

    async def test_a_run_of_an_unreachable_process_is_ended_by_whoever_cancels(
        self, settings: Any
    ) -> None:
        settings.AGUIAPP = {"COMMAND_SECONDS": 0.05, "CANCEL_SECONDS": 0.05}
        opened = await store.call(store.open_run, scripts.opening())
        await store.call(store_rows, opened.run, [scripts.row(1, STARTED), scripts.row(2, CALL)])
        ended = await engine.cancel(opened.run, "p1")
        assert ended.status == "cancelled"
        assert (await kinds(await only_run()))[2:] == [
            "TOOL_CALL_END",
            "TOOL_CALL_RESULT",
            "RUN_FINISHED",
        ]

    async def test_even_before_its_first_event(self, settings: Any) -> None:
        settings.AGUIAPP = {"COMMAND_SECONDS": 0.05, "CANCEL_SECONDS": 0.05}
        opened = await store.call(store.open_run, scripts.opening())
        assert (await engine.cancel(opened.run, "p1")).status == "cancelled"
        assert await kinds(await only_run()) == ["RUN_STARTED", "RUN_FINISHED"]

    async def test_a_command_of_another_process_arrives(self, settings: Any) -> None:
        settings.AGUIAPP = {"COMMAND_SECONDS": 0.02}
        with scripts.registered("forever", forever):
            started = await begun("forever")
            await store.call(store.command, started.run, "cancel", "p2")
            run = await over(started)
        assert run.status == "cancelled"


# -- the process -----------------------------------------------------------------


class TestDrain:
    async def test_a_drain_ends_what_does_not_end_by_itself(self, settings: Any) -> None:
        settings.AGUIAPP = {"DRAIN_SECONDS": 0.05, "CANCEL_SECONDS": 0.05}
        with scripts.registered("forever", forever):
            started = await begun("forever")
            await asyncio.wait_for(engine.current().drain(), scripts.SECONDS)
        run = await only_run()
        assert (run.status, run.error_code) == ("error", "shutdown")
        assert (await kinds(run))[-1] == "RUN_ERROR"
        with pytest.raises(errors.Draining):
            await engine.start(request(run_input(run="r2")))
        assert not engine.current().drivers
        assert started.task is not None

    async def test_a_drain_waits_for_those_that_end(self) -> None:
        started = await begun(
            "scripted",
            run_input(script=[{"type": "CUSTOM", "name": "n", "value": 1}, {"$sleep": 0.05}]),
        )
        await asyncio.wait_for(engine.current().drain(), scripts.SECONDS)
        assert (await only_run(pk=started.run.pk)).status == "success"

    async def test_nothing_is_left_when_all_runs_are_over(self) -> None:
        await play(*text("m1", "x"))
        assert engine.current().drivers == {}
        assert feed.current().tails == {}
        await scripts.until(lambda: not leases.leases._drivers)
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not any(name.startswith(("run ", "agent ")) for name in names)


async def test_a_run_sees_a_context_of_its_own() -> None:
    import contextvars

    variable: contextvars.ContextVar[str] = contextvars.ContextVar("v", default="clean")
    seen: list[str] = []

    async def agent(run: RunContext) -> None:
        seen.append(variable.get())
        seen.append(await run.call(variable.get))

    variable.set("request")
    with scripts.registered("context", agent):
        await drive(run_input(), agent="context")
    assert seen == ["clean", "clean"]


# -- the log line ----------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("run ended")]


class TestLogLine:
    async def test_one_line_with_numbers_and_without_content(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "aguiapp")
        run = await play(*text("m1", "very private"), messages=[said("u1", "also private")])
        (line,) = lines(caplog)
        for part in (
            f"thread={run.thread.key}",
            f"run={run.key}",
            "agent=scripted",
            "mode=sse",
            "transport=http",
            "status=success",
            "events=5",
            "RUN_STARTED:1",
            "TEXT_MESSAGE_CONTENT:1",
            f"bytes={run.bytes}",
        ):
            assert part in line
        assert re.search(r"first_event_ms=\d+\.\d", line)
        assert re.search(r"total_ms=\d+\.\d", line)
        assert "private" not in caplog.text

    async def test_an_error_has_its_line_too(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "aguiapp")
        await play({"$raise": "aguiapp.RunError", "message": "private words", "code": "mine"})
        (line,) = lines(caplog)
        assert "status=error code=mine" in line
        assert "private" not in caplog.text

    async def test_a_cancelled_run_has_its_line_too(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "aguiapp")
        with scripts.registered("forever", forever):
            started = await begun("forever")
            await engine.cancel(started.run, "p1")
            await over(started)
        (line,) = lines(caplog)
        assert "status=cancelled" in line

    async def test_a_run_that_could_not_be_stored_has_its_line_too(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.INFO, "aguiapp")
        monkeypatch.setattr(scripts.writer, "commit", lambda jobs: [ValueError("x") for _ in jobs])
        with scripts.registered("forever", forever):
            await drive(run_input(), agent="forever")
        (line,) = lines(caplog)
        assert "status=error code=store_failed" in line


# -- several runs on a thread ----------------------------------------------------


async def test_positions_over_several_runs_have_no_gap() -> None:
    for number in range(4):
        bad = [{"$raise": "ValueError"}] if number == 2 else []
        await play(*text(f"m{number}", "x", "y"), *bad, run=f"r{number}")
    position = 0
    async for run in Run.objects.order_by("pk"):
        assert run.offset == position
        seqs = [
            seq
            async for seq in RunEvent.objects.filter(run=run)
            .order_by("seq")
            .values_list("seq", flat=True)
        ]
        assert seqs == list(range(1, run.last_seq + 1))
        position += run.last_seq
    thread = await Thread.objects.aget()
    assert await store.call(store.end_position, thread.pk) == position
    assert (
        protocol.fold([json.loads(p) for p in await scripts.stored()]).messages
        == (await store.call(store.snapshot, thread)).fold.messages
    )


async def test_odd_text_survives_everywhere_on_every_database() -> None:
    odd = "a\0b\ud800"
    run = await play(
        {"type": "FUTURE" + odd},
        {"type": "CUSTOM", "name": odd, "value": {odd: odd}, odd: 1},
        {"type": "STATE_SNAPSHOT", "snapshot": {odd: odd}},
        {**FINISHED, "result": {odd: [odd]}, "outcome": {"type": "success"}},
        {"type": odd},
        messages=[said("u1", odd)],
    )
    assert run.status == "success"
    events = await events_of(run)
    assert events[-1]["result"] == {odd: [odd]}
    assert events[0]["input"]["messages"] == [said("u1", odd)]
    assert run.findings
    failed = await play({"$raise": "RuntimeError", "message": odd}, thread="t2")
    assert failed.error_code == "agent_failed"
    refused = await play(
        {"type": "TEXT_MESSAGE_CONTENT", "messageId": odd, "delta": ""}, thread="t3"
    )
    assert refused.error_code == "protocol_violation"
    spoken = await play({"type": "RUN_ERROR", "message": odd, "code": odd}, thread="t4")
    assert (spoken.status, (await events_of(spoken))[-1]["message"]) == ("error", odd)


class TestChunksAtTheEnd:
    """What chunks left open is closed by the engine when the agent returns."""

    async def test_a_close_that_is_not_allowed_ends_the_run_by_its_rule(self) -> None:
        run = await play(
            {"type": "SUBAGENT_STARTED", "subagentRunId": "s1", "name": "s"},
            {
                "type": "TEXT_MESSAGE_CHUNK",
                "messageId": "m",
                "delta": "x",
                "subagentRunId": "s1",
            },
            {"type": "TEXT_MESSAGE_END", "messageId": "m"},
            messages=[said("u1")],
        )
        assert run.ended
        assert run.error_code in ("protocol_violation", "incomplete")
        assert (await kinds(run))[0] == "RUN_STARTED"
        fold = (await store.call(store.snapshot, run.thread)).fold
        assert fold.messages[0]["id"] == "u1"

    async def test_a_full_run_can_still_end(self, settings: Any) -> None:
        settings.AGUIAPP = {"RUN_EVENTS": 4}
        chunk = {"type": "TEXT_MESSAGE_CHUNK", "messageId": "m", "delta": "x"}
        run = await play(chunk, chunk)
        assert run.status == "success"
        assert (await kinds(run))[-2:] == ["TEXT_MESSAGE_END", "RUN_FINISHED"]
