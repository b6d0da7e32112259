"""Joining a thread without having watched it: connect, gaps, runs without a stream, old streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User

from aguiapp import engine, feed, protocol, store
from aguiapp.models import Participant, Run, RunEvent, Thread
from project import scripted
from tests import scripts
from tests.scripts import Event, Person, Reply, Stream, legal, run_input, said, text

pytestmark = pytest.mark.django_db(transaction=True)

NESTED: list[Event] = [
    {"type": "STEP_STARTED", "stepName": "s"},
    {"type": "TEXT_MESSAGE_START", "messageId": "m1", "role": "assistant"},
    {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m1", "delta": "a"},
    {
        "type": "TOOL_CALL_START",
        "toolCallId": "c1",
        "toolCallName": "lookup",
        "parentMessageId": "m1",
    },
    {"type": "TOOL_CALL_ARGS", "toolCallId": "c1", "delta": '{"q"'},
    {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m1", "delta": "b"},
    {"type": "TOOL_CALL_ARGS", "toolCallId": "c1", "delta": ":1}"},
    {"type": "STATE_SNAPSHOT", "snapshot": {"n": 1}},
    {"type": "TOOL_CALL_END", "toolCallId": "c1"},
    {"type": "TEXT_MESSAGE_END", "messageId": "m1"},
    {"type": "STATE_DELTA", "delta": [{"op": "replace", "path": "/n", "value": 2}]},
    {"type": "STEP_FINISHED", "stepName": "s"},
]
HISTORIES: dict[str, list[Event]] = {
    "empty": [],
    "prefix": [said("u0", "before")],
    "stale": [said("u9", "never sent"), said("u0", "before")],
}


@pytest.fixture
def ada(user: User) -> Person:
    return Person(user)


@pytest.fixture(autouse=True)
def agent() -> Iterator[None]:
    with scripts.registered("scripted", scripted.play):
        yield


async def connect(ada: Person, body: Event | None = None, query: str = "", **headers: str) -> Any:
    """The response to who joins."""
    given = run_input("t1", "joiner") if body is None else body
    return await ada.open(f"/agui/agents/scripted/connect{query}", given, **headers)


async def joined(ada: Person, body: Event | None = None, query: str = "", **headers: str) -> Reply:
    """The whole join, or its refusal."""
    given = run_input("t1", "joiner") if body is None else body
    return await ada.ask(f"/agui/agents/scripted/connect{query}", given, **headers)


async def view(events: list[Event], held: list[Event]) -> None:
    """Who held those messages and read that stream sees what the thread holds."""
    legal(events)
    seen = protocol.fold(events, messages=held)
    thread = await Thread.objects.aget()
    fold = (await store.call(store.snapshot, thread)).fold
    assert seen.messages == fold.messages
    assert seen.state == fold.state
    assert seen.interrupts == fold.interrupts
    if events[-1]["outcome"]["type"] == "success" and fold.trace["phase"] == "finished":
        assert seen.pending_tool_calls == fold.pending_tool_calls


class TestConnect:
    @pytest.mark.parametrize("history", HISTORIES)
    async def test_at_every_moment_of_a_run(self, ada: Person, history: str) -> None:
        before = run_input(run="r0", messages=[said("u0", "before")], script=text("m0", "hi"))
        await ada.run(before)
        step, done = asyncio.Queue[bool](), asyncio.Event()

        async def paced(run: Any) -> AsyncIterator[Event]:
            for event in NESTED:
                await step.get()
                yield event
            await done.wait()

        held = HISTORIES[history]
        with scripts.registered("paced", paced):
            given = run_input(run="r1", messages=[said("u1")])
            run = await ada.watch(given, "paced")
            joins = []
            for count in range(1, len(NESTED) + 2):
                await run.until(_holds(count))
                body = run_input("t1", "joiner", messages=held)
                joins.append(Stream(await connect(ada, body)))
                await joins[-1].until(lambda raw: len(scripts.frames(raw)) >= 3)
                step.put_nowait(True)
            done.set()
            await run.rest()
        for join in joins:
            reply = await join.rest()
            await view(reply.events, held)
            assert reply.logged == (await scripts.stored(run__run_id="r1"))[-len(reply.logged) :]
            assert int(reply.headers["AGUI-Unlogged"]) == len(reply.events) - len(reply.logged)
            cursors = [frame.id for frame in reply.frames if frame.id]
            assert cursors[0] == reply.headers["AGUI-Cursor"]

    @pytest.mark.parametrize("history", HISTORIES)
    @pytest.mark.parametrize(
        "outcome",
        [
            {"type": "success"},
            {"type": "interrupt", "interrupts": [{"id": "i1", "reason": "ok?"}]},
            {"type": "cancelled"},
        ],
    )
    async def test_when_no_run_is_active(self, ada: Person, history: str, outcome: Any) -> None:
        end = {"type": "RUN_FINISHED", "threadId": "t1", "runId": "r1", "outcome": outcome}
        given = run_input(messages=[said("u0", "before")], script=[*NESTED, end])
        await ada.run(given)
        held = HISTORIES[history]
        reply = await joined(ada, run_input("t1", "joiner", messages=held))
        await view(reply.events, held)
        assert reply.types[-1] == "RUN_FINISHED"
        assert reply.logged == []
        assert "AGUI-Cursor" not in reply.headers

    async def test_after_a_failed_run_it_never_ends_in_an_error(self, ada: Person) -> None:
        await ada.run(run_input(messages=[said("u0")], script=[*NESTED[:6], {"$raise": "OSError"}]))
        reply = await joined(ada)
        assert (reply.types[0], reply.types[-1]) == ("RUN_STARTED", "RUN_FINISHED")
        await view(reply.events, [])

    async def test_before_the_run_has_said_anything(self, ada: Person) -> None:
        opened = await store.call(store.open_run, scripts.opening(scope=f"user:{ada.user.pk}"))
        response = await connect(ada)
        assert response["AGUI-Run"] == str(opened.run.key)
        engine.current().spawn(_finish(opened.run), "the run")
        reply = await Stream(response).rest()
        assert reply.types == ["RUN_STARTED", "RUN_FINISHED"]
        assert reply.logged == await scripts.stored()

    async def test_a_thread_that_is_not_there_yet_is_empty(self, ada: Person) -> None:
        reply = await joined(ada)
        assert (reply.status, reply.events, reply.aborted) == (200, [], False)
        document = await joined(ada, query="?stream=0")
        assert document.json == {"events": []}
        assert await Thread.objects.acount() == 0

    async def test_a_history_of_more_than_ten_mebibytes(self, ada: Person) -> None:
        for n in range(3):
            moved = {"$repeat": 4, "events": text(f"m{n}-$i", "x" * 900_000)}
            await ada.run(run_input(run=f"r{n}", script=[moved]))
        reply = await joined(ada)
        assert max(len(frame.data) for frame in reply.frames) < 2 * 1024 * 1024
        assert sum(len(frame.data) for frame in reply.frames) > 10 * 1024 * 1024
        await view(reply.events, [])

    @pytest.mark.parametrize("accept", ["application/json", "application/vnd.ag-ui.event+proto"])
    async def test_in_other_forms(self, ada: Person, accept: str) -> None:
        await ada.run(run_input(messages=[said("u0")], script=NESTED))
        reply = await joined(ada, accept=accept)
        if accept == "application/json":
            assert reply.json["unlogged"] == len(reply.events)
            await view(reply.events, [])
            return
        decoder = protocol.ProtoDecoder()
        events = decoder.feed(reply.raw)
        decoder.close()
        await view(events, [])

    async def test_others_threads_are_not_there(self, ada: Person, other: User) -> None:
        await ada.run(run_input(script=NESTED))
        bob = Person(other)
        assert (await joined(bob)).events == []
        thread = await Thread.objects.aget()
        hidden = await joined(bob, query=f"?thread={thread.key}")
        assert (hidden.status, hidden.code) == (404, "not_found")
        await Participant.objects.acreate(thread=thread, user=other, role="viewer")
        await view((await joined(bob, query=f"?thread={thread.key}")).events, [])
        wrong = await joined(bob, run_input("t2"), query=f"?thread={thread.key}")
        assert (wrong.status, wrong.code) == (422, "invalid_input")

    async def test_refusals(self, ada: Person) -> None:
        assert (await joined(Person())).status == 401
        assert (await joined(ada, {"threadId": ""})).status == 422
        assert (await ada.ask("/agui/agents/nobody/connect", run_input())).status == 404
        assert (await ada.ask("/agui/agents/scripted/connect")).status == 405

    async def test_the_echo_of_the_run_is_not_told_again(self, ada: Person) -> None:
        given = run_input(script=[], context=[{"description": "d", "value": "secret"}])
        await ada.run(given)
        assert b"secret" not in (await joined(ada)).raw


def _holds(count: int) -> Callable[[bytes], bool]:
    return lambda raw: len(scripts.frames(raw)) >= count


async def _finish(run: Run) -> None:
    """Somebody elsewhere ends the run."""
    ids = {"threadId": "t1", "runId": "r1"}
    rows = [scripts.row(1, {"type": "RUN_STARTED", **ids})]
    rows.append(scripts.row(2, {"type": "RUN_FINISHED", **ids}))
    ending = store.Ending(status="success")
    await store.call(store.finish, run.pk, run.lease_token or 0, rows, 1, ending)
    feed.current().announce(run.thread_id)


async def prune(run_id: str, seq: int) -> Run:
    """What retention leaves of a run."""
    run = await Run.objects.select_related("thread").aget(run_id=run_id)
    await RunEvent.objects.filter(run_id=run.pk, seq__lte=seq).adelete()
    await Run.objects.filter(pk=run.pk).aupdate(pruned_to=seq)
    return run


class TestGaps:
    async def three_runs(self, ada: Person) -> Thread:
        """Three runs of six events; the first is gone, and half of the second."""
        for n in range(3):
            await ada.run(run_input(run=f"r{n}", script=text(f"m{n}", "a", "b")))
        await prune("r0", 6)
        run = await prune("r1", 6)
        return run.thread

    async def test_a_stream_says_what_is_missing_and_goes_on(self, ada: Person) -> None:
        thread = await self.three_runs(ada)
        cursor = f"{thread.epoch}-2"
        path = f"/agui/threads/{thread.key}/stream"
        whole = await scripts.stored()
        stream = Stream(await ada.open(path, **{"last-event-id": cursor}))
        raw = await stream.until(lambda raw: b"\nid:" in raw or raw.startswith(b"id:"))
        raw = await stream.until(
            lambda raw: sum(1 for f in scripts.frames(raw) if f.id) == len(whole)
        )
        frames = scripts.frames(raw)
        unlogged = [json.loads(frame.data) for frame in frames if not frame.id]
        assert unlogged[0]["type"] == "RUN_STARTED"
        assert unlogged[1]["name"] == "aguiapp.gap"
        assert unlogged[1]["value"] == {"from": 3, "to": 12}
        assert [frame.data for frame in frames if frame.id] == whole
        assert next(frame.id for frame in frames if frame.id) == f"{thread.epoch}-13"
        assert int(stream.response.headers["AGUI-Unlogged"]) == len(unlogged)
        legal([json.loads(frame.data) for frame in frames])

    @pytest.mark.parametrize("accept", ["application/x-ndjson", "application/json"])
    async def test_a_page_says_what_is_missing_and_goes_on(self, ada: Person, accept: str) -> None:
        thread = await self.three_runs(ada)
        path = f"/agui/threads/{thread.key}/events?after={thread.epoch}-2"
        reply = await ada.ask(path, accept=accept)
        count = int(reply.headers["AGUI-Unlogged"])
        whole = await scripts.stored()
        assert reply.headers["AGUI-Cursor"] == f"{thread.epoch}-13"
        assert reply.headers["AGUI-Next"] == f"{thread.epoch}-{12 + len(whole)}"
        if accept == "application/json":
            assert reply.json["gap"] == {"from": 3, "to": 12}
            events = [protocol.dumps(event) for event in reply.json["events"]]
        else:
            events = reply.raw.decode().splitlines()
            assert json.loads(events[0]) == {"type": "aguiapp.gap", "from": 3, "to": 12}
        assert events[count:] == whole

    async def test_without_a_cursor_it_begins_with_what_is_kept(self, ada: Person) -> None:
        thread = await self.three_runs(ada)
        whole = await scripts.stored()
        stream = Stream(await ada.open(f"/agui/threads/{thread.key}/stream"))
        raw = await stream.until(lambda raw: len(scripts.frames(raw)) == len(whole))
        assert scripts.frames(raw)[0].id == f"{thread.epoch}-13"
        reply = await ada.ask(f"/agui/threads/{thread.key}/events")
        assert reply.raw.decode().splitlines() == whole

    async def test_a_cursor_behind_the_gap_is_as_ever(self, ada: Person) -> None:
        thread = await self.three_runs(ada)
        reply = await ada.ask(f"/agui/threads/{thread.key}/events?after={thread.epoch}-14")
        assert "AGUI-Unlogged" not in reply.headers
        assert reply.raw.decode().splitlines() == (await scripts.stored())[2:]

    async def test_a_pruned_run_alone_has_nothing_left(self, ada: Person) -> None:
        thread = await self.three_runs(ada)
        run = await Run.objects.aget(run_id="r0")
        assert (await ada.ask(f"/agui/threads/{thread.key}/stream?run={run.key}")).status == 204

    async def test_a_reader_whom_retention_overtakes_is_aborted(self, ada: Person) -> None:
        with scripts.registered("scripted", scripted.play):
            many = [{"$repeat": 40, "event": {"type": "CUSTOM", "name": "n", "value": "$i"}}]
            await ada.run(run_input(script=many))
        thread = await Thread.objects.aget()
        follower = feed.Follower(thread, 0)
        assert len(await follower.read(5)) == 1
        await prune("r1", 20)
        with pytest.raises(feed.Pruned):
            await follower.read(5)


class TestRespondAsync:
    @pytest.mark.parametrize("prefer", ["respond-async", "wait=10, Respond-Async;x=1"])
    async def test_a_run_is_started_and_its_addresses_told(self, ada: Person, prefer: str) -> None:
        given = run_input(messages=[said("u1")], script=text("m1", "hi"))
        reply = await ada.run(given, prefer=prefer)
        thread, run = await Thread.objects.aget(), await Run.objects.aget()
        assert reply.status == 202
        assert reply.headers["Preference-Applied"] == "respond-async"
        assert reply.headers["AGUI-Cursor"] == f"{thread.epoch}-1"
        found = reply.json
        assert (found["thread"], found["run"]) == (str(thread.key), str(run.key))
        assert (found["threadId"], found["runId"]) == ("t1", "r1")
        assert found["status"] in ("running", "success")
        assert found["urls"]["events"] == reply.headers["Location"]
        stream = await ada.ask(found["urls"]["stream"])
        assert stream.logged == await scripts.stored()
        events = await ada.ask(found["urls"]["events"])
        assert events.raw.decode().splitlines() == await scripts.stored()
        # Who polls a run learns that nothing more will come.
        address = f"{found['urls']['events']}&wait=20&after={events.headers['AGUI-Next']}"
        assert (await ada.ask(address)).status == 204
        assert (await ada.ask(found["urls"]["snapshot"])).json["messages"]
        cancelled = await ada.ask(found["urls"]["cancel"], {})
        assert cancelled.json["status"] == "success"
        assert run.mode == "async"

    async def test_it_is_never_answered_so_unasked(self, ada: Person) -> None:
        for prefer in ("", "wait=5", "handling=lenient", "xrespond-async"):
            run = f"r{len(prefer)}"
            assert (await ada.run(run_input(run=run, script=[]), prefer=prefer)).status == 200

    async def test_a_refusal_is_a_refusal(self, ada: Person) -> None:
        refused = await ada.run({"threadId": ""}, prefer="respond-async")
        assert refused.status == 422


class TestAge:
    @pytest.fixture(autouse=True)
    def short(self, settings: Any) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "STREAM_SECONDS": 0.2}

    async def test_a_stream_that_resumes_ends_marked(self, ada: Person) -> None:
        script = [{"$repeat": 12, "events": [*text("m$i", "x"), {"$sleep": 0.05}]}]
        run = await ada.watch(run_input(script=script))
        thread = await Thread.objects.aget()
        path, cursor = f"/agui/threads/{thread.key}/stream", f"{thread.epoch}-0"
        got: list[str] = []
        streams = 0
        whole = asyncio.create_task(run.rest())
        while not whole.done() or len(got) < len(whole.result().logged):
            reply = await ada.ask(path, **{"last-event-id": cursor})
            assert not reply.aborted
            got += reply.logged
            cursor = reply.raw.rstrip().rpartition(b" ")[2].decode()
            streams += 1
        assert streams > 1
        assert got == (await whole).logged == await scripts.stored()

    async def test_others_are_left_alone(self, ada: Person) -> None:
        reply = await ada.run(run_input(script=[{"$sleep": 0.6}]))
        assert (reply.types[-1], reply.aborted) == ("RUN_FINISHED", False)
