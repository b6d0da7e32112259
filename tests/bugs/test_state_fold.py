"""State and activities as they are folded: failed deltas, lost frames, many snapshots."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from aguiapp import protocol
from aguiapp.engine.history import state_hash
from tests import scripts
from tests.bugs.world import (
    World,
    activity,
    activity_delta,
    case,
    delta,
    messages,
    recording,
    sibling,
    state,
)
from tests.scripts import Event, only_run, run_input, said, text

FAILED = "state_patch_failed"


async def everything_reads(w: World, reply: scripts.Reply) -> None:
    """Replay, the fold at every position, and another run on the thread."""
    logged = await w.replay(reply)
    assert logged == reply.logged
    for position in range(1, len(logged) + 1):
        at = await w.snapshot(reply, f"?at={position}")
        assert at["position"] == position
        assert at["unreadable"] == []
    again = await w.run(run_input(run="again", script=text("again", "x")))
    assert again.types[-1] == "RUN_FINISHED"


@case("STA-01")
async def test_a_replace_of_nothing_keeps_the_state(w: World) -> None:
    reply = await w.run()
    assert reply.types == ["RUN_STARTED", "STATE_DELTA", "STATE_DELTA", "RUN_FINISHED"]
    assert (await w.snapshot(reply))["state"] == {}
    assert await w.findings(reply) == [FAILED, FAILED]
    await everything_reads(w, reply)


@case("STA-02")
async def test_an_append_to_nothing_keeps_the_state(w: World) -> None:
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    assert (await w.snapshot(reply))["state"] == {}
    assert await w.findings(reply) == [FAILED]
    await everything_reads(w, reply)


@case("STA-03")
async def test_a_failed_delta_is_noted_once_whatever_its_length(w: World) -> None:
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    assert (await w.snapshot(reply))["state"] == {}
    assert await w.findings(reply) == [FAILED]


@sibling("STA-03")
async def test_the_helper_diffs_against_the_folded_state(w: World) -> None:
    async def agent(run: Any) -> None:
        await run.patch_state([{"op": "replace", "path": "/ns/query", "value": "lost"}])
        await run.update_state({"ns": {"entries": [], "query": "q"}})
        await run.update_state({"ns": {"entries": [1], "query": "q"}})

    with scripts.registered("helper", agent):
        reply = await w.run(run_input(), "helper")
    assert reply.types[-1] == "RUN_FINISHED"
    assert await w.findings(reply) == [FAILED]
    assert (await w.snapshot(reply))["state"] == {"ns": {"entries": [1], "query": "q"}}


@sibling("STA-03")
async def test_nothing_of_a_failed_delta_stays(w: World) -> None:
    bad = {"op": "remove", "path": "/missing"}
    good = {"op": "replace", "path": "/ns/n", "value": 2}
    script = [state({"ns": {"n": 1}}), delta(good, bad), delta(bad, good)]
    script += [activity({"ns": {"n": 1}}), activity_delta(good, bad)]
    reply, snapshot = await w.played(script)
    assert snapshot["state"] == {"ns": {"n": 1}}
    assert snapshot["messages"][0]["content"] == {"ns": {"n": 1}}
    assert await w.findings(reply) == [FAILED, FAILED, "activity_patch_failed"]


@case("STA-06")
async def test_the_last_snapshot_wins_and_the_step_back_is_seen(w: World) -> None:
    reply = await w.run()
    end = len(reply.events)
    states = [(await w.snapshot(reply, f"?at={at}"))["state"] for at in range(end - 3, end + 1)]
    assert states == [{"n": 0}, {"n": 5}, {"n": 0}, {"n": 0}]


@sibling("STA-06")
@pytest.mark.parametrize("value", [None, [], "text", 0, False, {"other": 1}])
async def test_a_snapshot_replaces_and_never_merges(w: World, value: Any) -> None:
    _, snapshot = await w.played([state({"n": 1, "deep": {"a": 1}}), state(value)])
    assert snapshot["state"] == value
    again = await w.run(run_input(run="r2", script=[]))
    assert (await w.snapshot(again))["state"] == value


@case("STA-08")
async def test_activity_deltas_without_their_activity_are_noted(w: World) -> None:
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    plan, message = (await w.snapshot(reply))["messages"]
    assert plan["content"] == {"steps": []}
    assert message == {"id": "m1", "role": "assistant", "content": "t"}
    expected = ["target_not_found", "activity_patch_failed", "id_is_not_activity"]
    assert await w.findings(reply) == expected
    await everything_reads(w, reply)


@sibling("STA-08")
@pytest.mark.parametrize(
    "held",
    [
        said("a1"),
        said("a1", role="system"),
        {"id": "a1", "role": "reasoning", "content": "x"},
        {"id": "a1", "role": "tool", "content": "x", "toolCallId": "c1"},
    ],
    ids=lambda message: str(message["role"]),
)
async def test_no_other_message_becomes_an_activity_by_a_delta(w: World, held: Event) -> None:
    add = {"op": "add", "path": "/x", "value": 1}
    reply, snapshot = await w.played([messages(held), activity_delta(add)])
    assert snapshot["messages"] == [held]
    assert await w.findings(reply) == ["id_is_not_activity"]


NO_OBJECT = {
    "replace with an array": [{"op": "replace", "path": "", "value": []}],
    "add a text": [{"op": "add", "path": "", "value": "x"}],
    "add null": [{"op": "add", "path": "", "value": None}],
    "remove the root": [{"op": "remove", "path": ""}],
    "copy a member": [{"op": "copy", "from": "/status", "path": ""}],
    "move a member": [{"op": "move", "from": "/list", "path": ""}],
}


async def no_object(w: World, operations: list[Any]) -> None:
    content = {"status": "running", "list": [1]}
    reply, snapshot = await w.played([activity(content), activity_delta(*operations)])
    assert "ACTIVITY_DELTA" not in reply.types
    assert reply.events[-1]["code"] == "protocol_violation"
    assert snapshot["messages"][0]["content"] == content
    await everything_reads(w, reply)


@case("STA-09")
async def test_an_activity_stays_an_object(w: World) -> None:
    (operations,) = [e["patch"] for e in w.input["agent_events"] if "patch" in e]
    await no_object(w, operations)


@sibling("STA-09")
@pytest.mark.parametrize("operations", NO_OBJECT.values(), ids=NO_OBJECT)
async def test_no_operation_makes_an_activity_anything_else(w: World, operations: Any) -> None:
    await no_object(w, operations)


@sibling("STA-09")
async def test_a_stored_activity_that_is_no_object_can_be_read(w: World) -> None:
    """Rows that were imported, or written before, break no reader."""
    events = [e for e in w.input["agent_events"] if not e["type"].startswith("RUN")]
    held = protocol.fold(events).messages
    assert held == [{"id": "a1", "role": "activity", "activityType": "plan", "content": []}]
    assert json.loads(protocol.dumps(held)) == held


@case("STA-11")
async def test_a_hole_is_seen_and_the_thread_can_be_read_again(w: World) -> None:
    reply = await w.run()
    frames = list(reply.frames)
    lost = frames.pop(w.input["drop_frame_index"])
    positions = [int(str(frame.id).split("-")[1]) for frame in frames]
    gaps = [a for a, b in pairwise(positions) if b != a + 1]
    assert gaps == [w.input["drop_frame_index"]]
    snapshot = await w.snapshot(reply)
    assert snapshot["state"] == {"n": 3}
    assert snapshot["cursor"] == frames[-1].id
    before = frames[gaps[0] - 1].id
    path = f"/agui/threads/{reply.headers['AGUI-Thread']}/stream"
    again = await w.ada.ask(f"{path}?after={before}&run={reply.headers['AGUI-Run']}")
    assert again.frames == [lost, *frames[gaps[0] :]]


@case("STA-12")
async def test_many_large_snapshots_grow_the_store_by_their_size_alone(w: World) -> None:
    """The API's part; the admin's pages are tested with the admin."""
    reply = await w.ada.run(w.play())
    assert reply.types[-1] == "RUN_FINISHED"
    run = await only_run()
    stored = await scripts.stored(run_id=run.pk)
    assert len(stored) == len(reply.events) == 302
    size = sum(map(len, stored))
    assert size == run.bytes
    assert size < 200 * 201 * 1024
    snapshot = (await w.ada.ask(f"/agui/threads/{reply.headers['AGUI-Thread']}/snapshot")).raw
    assert len(snapshot) < 220 * 1024
    assert len(json.loads(snapshot)["messages"]) == 100


# -- what every fold promises ----------------------------------------------------

EVERYTHING: list[Event] = [
    messages(said("u1"), {**said("m1", role="assistant"), "metadata": {"a": {"b": []}}}),
    *text("m1", "x", "y"),
    {"type": "TEXT_MESSAGE_START", "messageId": "m2", "metadata": {"k": [1]}},
    {"type": "TEXT_MESSAGE_END", "messageId": "m2", "metadata": {"k2": {}}},
    {"type": "TOOL_CALL_START", "toolCallId": "c1", "toolCallName": "f", "parentMessageId": "m1"},
    {"type": "TOOL_CALL_ARGS", "toolCallId": "c1", "delta": "{}", "metadata": {"n": 1}},
    {"type": "TOOL_CALL_END", "toolCallId": "c1"},
    activity({"steps": [{"s": "x"}]}),
    activity_delta({"op": "add", "path": "/steps/0/deep", "value": {"l": []}}),
    activity_delta({"op": "add", "path": "/steps/0/deep/l/-", "value": 1}),
    state({"deep": {"list": [{"n": 1}]}}),
    delta({"op": "add", "path": "/deep/list/-", "value": {"m": []}}),
    delta(
        {"op": "copy", "from": "/deep", "path": "/twin"},
        {"op": "add", "path": "/twin/list/1/m/-", "value": 1},
        {"op": "move", "from": "/deep/list/0", "path": "/moved"},
        {"op": "test", "path": "/twin/list/1/m", "value": [1]},
    ),
    delta({"op": "remove", "path": "/twin/list/0"}),
    messages(said("u1", "changed"), said("m3")),
    *text("m3", "z"),
]


@pytest.mark.parametrize("number", range(len(EVERYTHING)))
def test_folding_changes_no_event(number: int) -> None:
    events = copy.deepcopy(EVERYTHING)
    folder = protocol.Fold()
    for event in events[: number + 1]:
        folder.feed(event)
    seen = folder.snapshot()
    text_ = protocol.dumps([seen.messages, seen.state])
    for event in events[number + 1 :]:
        folder.feed(event)
    folder.snapshot()
    assert events == EVERYTHING
    assert protocol.dumps([seen.messages, seen.state]) == text_


def test_two_folds_of_the_same_rows_are_equal() -> None:
    made = recording()
    for event in copy.deepcopy(EVERYTHING):
        made.feed(event)
    rows = [json.loads(row) for _, row in made.drain()]
    first, second = protocol.fold(rows), protocol.fold(rows)
    assert first == second
    assert (first.messages, first.state) == (made.fold.snapshot().messages, made.fold.state)


@sibling("STA-06")
async def test_an_agent_may_go_on_using_what_it_sent(w: World) -> None:
    async def agent(run: Any) -> AsyncIterator[Event]:
        value: dict[str, Any] = {"list": [1]}
        yield state(value)
        value["list"].append(2)
        value["late"] = True
        yield {"type": "CUSTOM", "name": "n", "value": 1}

    with scripts.registered("mutable", agent):
        reply = await w.run(run_input(), "mutable")
    assert (await w.snapshot(reply))["state"] == {"list": [1]}
    run = await only_run(key=reply.headers["AGUI-Run"])
    assert run.fold_hash == state_hash({"list": [1]})
