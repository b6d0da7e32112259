"""What opens, closes and answers what, within a run and over the runs of a thread."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aguiapp import protocol
from tests import scripts
from tests.bugs.world import (
    World,
    call,
    caller,
    case,
    interrupt,
    messages,
    result,
    sibling,
)
from tests.scripts import Event, run_input, said, text


def calls_of(snapshot: Any) -> list[Any]:
    """All tool calls that the messages of a snapshot hold."""
    return [c for message in snapshot["messages"] for c in message.get("toolCalls", ())]


async def refused(w: World, script: list[Event], run: str = "r1", **more: Any) -> Any:
    """The snapshot after a run that broke a rule."""
    reply = await w.run(run_input(run=run, script=script, **more))
    assert reply.events[-1]["code"] == "protocol_violation"
    return await w.snapshot(reply)


@case("PAR-05")
async def test_a_call_that_is_complete_is_not_started_again(w: World) -> None:
    """The official client accepts it and doubles the arguments: `check` accepts, we refuse."""
    assert protocol.check(w.input["agent_events"]).accepts
    doubled = protocol.fold(w.input["agent_events"]).messages[1]["toolCalls"][0]
    assert doubled["function"]["arguments"] == '{"q":1}{"q":1}'
    reply = await w.run()
    assert reply.types == ["RUN_STARTED", "MESSAGES_SNAPSHOT", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "protocol_violation"
    (held,) = calls_of(await w.snapshot(reply))
    assert held["function"]["arguments"] == '{"q":1}'


AGAIN = {
    "triple": call("c1", '{"q":1}'),
    "triple of another parent": call("c1", '{"q":1}', parentMessageId="m9"),
    "chunk": [{"type": "TOOL_CALL_CHUNK", "toolCallId": "c1", "toolCallName": "f", "delta": "{"}],
    "of a subagent": [
        {"type": "SUBAGENT_STARTED", "subagentRunId": "s1", "name": "helper"},
        *call("c1", subagentRunId="s1"),
    ],
}


@sibling("PAR-05")
@pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
@pytest.mark.parametrize("first", ["this run", "an earlier run", "cut off", "a snapshot"])
async def test_no_form_of_a_second_start_doubles_a_call(
    w: World, again: list[Event], first: str
) -> None:
    whole = call("c1", '{"q":1}')
    before = {
        "this run": whole,
        "an earlier run": whole,
        "cut off": [*whole[:2], {"$raise": "RuntimeError", "message": "x"}],
        "a snapshot": [messages(caller("m1", ("c1", '{"q":1}')))],
    }[first]
    if first in ("an earlier run", "cut off"):
        await w.run(run_input(script=before))
        before = []
    snapshot = await refused(w, [*before, *again], "r2")
    (held,) = calls_of(snapshot)
    assert held["function"]["arguments"] == '{"q":1}'


@case("PAR-06")
async def test_empty_deltas_are_no_error(w: World) -> None:
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    assert (await w.snapshot(reply))["messages"][0]["content"] == "a  "
    positions = [int(str(frame.id).split("-")[1]) for frame in reply.frames]
    assert positions == list(range(1, len(positions) + 1))


EMPTIES = {
    "reasoning": [
        {"type": "REASONING_START", "messageId": "g1"},
        {"type": "REASONING_MESSAGE_START", "messageId": "g1", "role": "reasoning"},
        {"type": "REASONING_MESSAGE_CONTENT", "messageId": "g1", "delta": ""},
        {"type": "REASONING_MESSAGE_END", "messageId": "g1"},
        {"type": "REASONING_END", "messageId": "g1"},
    ],
    "arguments": call("c1", ""),
    "text chunk": [{"type": "TEXT_MESSAGE_CHUNK", "messageId": "m1", "delta": ""}],
    "tool chunk": [
        {"type": "TOOL_CALL_CHUNK", "toolCallId": "c1", "toolCallName": "f", "delta": ""}
    ],
    "no delta": text("m1"),
    "result": [*call("c1"), result("c1", "t1", "")],
}


@sibling("PAR-06")
@pytest.mark.parametrize("script", EMPTIES.values(), ids=EMPTIES)
async def test_empty_items_of_every_kind_are_kept(w: World, script: list[Event]) -> None:
    reply, snapshot = await w.played(script)
    assert reply.types[-1] == "RUN_FINISHED"
    assert snapshot["messages"]
    assert await w.replay(reply) == reply.logged


@case("PAR-07")
async def test_a_stray_end_is_refused_and_leaves_the_call_alone(w: World) -> None:
    first, second = w.input["runs"]
    await w.run(run_input(script=first["agent_events"]))
    props = {"script": second["agent_events"]}
    reply = await w.run({**second["run_input"], "forwardedProps": props})
    assert reply.events[-1]["code"] == "protocol_violation"
    assert not {"TOOL_CALL_END", "TOOL_CALL_RESULT"} & set(reply.types)
    (held,) = calls_of(await w.snapshot(reply))
    assert (held["id"], held["function"]["arguments"]) == ("c1", "{}")


@sibling("PAR-07")
async def test_a_result_finds_the_call_of_an_earlier_run(w: World) -> None:
    first, second = w.input["runs"]
    await w.run(run_input(script=first["agent_events"]))
    script = [e for e in second["agent_events"] if e["type"] != "TOOL_CALL_END"]
    reply = await w.run({**second["run_input"], "forwardedProps": {"script": script}})
    assert reply.types[-1] == "RUN_FINISHED"
    snapshot = await w.snapshot(reply)
    roles = [(m["role"], m["id"]) for m in snapshot["messages"]]
    assert roles == [("assistant", "c1"), ("tool", "t1"), ("user", "u1")]
    assert snapshot["messages"][1]["toolCallId"] == "c1"
    assert snapshot["interrupts"] == []
    assert snapshot["pendingToolCallIds"] == []


@sibling("PAR-07")
@pytest.mark.parametrize(
    "stray",
    [
        {"type": "TOOL_CALL_ARGS", "toolCallId": "c1", "delta": "{}"},
        {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m1", "delta": "x"},
        {"type": "TEXT_MESSAGE_END", "messageId": "m1"},
        {"type": "REASONING_MESSAGE_END", "messageId": "g1"},
        {"type": "STEP_FINISHED", "stepName": "s"},
        {"type": "SUBAGENT_FINISHED", "subagentRunId": "a1"},
    ],
    ids=lambda event: str(event["type"]),
)
async def test_nothing_is_open_beyond_its_run(w: World, stray: Event) -> None:
    opened = [
        *call("c1")[:2],
        *text("m1", "x")[:2],
        {"type": "REASONING_MESSAGE_START", "messageId": "g1", "role": "reasoning"},
        {"type": "STEP_STARTED", "stepName": "s"},
        {"type": "SUBAGENT_STARTED", "subagentRunId": "a1", "name": "helper"},
        {"$raise": "RuntimeError", "message": "x"},
    ]
    await w.run(run_input(script=opened))
    snapshot = await refused(w, [stray], "r2")
    assert snapshot["openItems"] == []


@case("PAR-09")
async def test_reasoning_without_text_keeps_its_encrypted_value(w: World) -> None:
    reply = await w.run()
    (message,) = (await w.snapshot(reply))["messages"]
    assert message == {
        "id": "g1",
        "role": "reasoning",
        "content": "",
        "encryptedValue": "opaque==",
    }
    assert '"encryptedValue":"opaque=="' in "".join(await w.replay(reply))
    sent_back = run_input(run="r2", messages=[message, said("u2")], script=[])
    again = await w.run(sent_back)
    assert "AGUI-Unlogged" not in again.headers
    assert (await w.snapshot(again))["messages"] == [message, said("u2")]


@sibling("PAR-09")
@pytest.mark.parametrize(("subtype", "entity"), [("message", "m1"), ("tool-call", "c1")])
async def test_other_entities_keep_their_encrypted_value(
    w: World, subtype: str, entity: str
) -> None:
    value = {
        "type": "REASONING_ENCRYPTED_VALUE",
        "subtype": subtype,
        "entityId": entity,
        "encryptedValue": "opaque==\u2028",
    }
    _, snapshot = await w.played([*text("m1", "x"), *call("c1", parentMessageId="m1"), value])
    (message,) = snapshot["messages"]
    holder = message if subtype == "message" else message["toolCalls"][0]
    assert holder["encryptedValue"] == "opaque==\u2028"


@sibling("PAR-09")
@pytest.mark.parametrize(
    ("subtype", "entity"), [("message", "m1"), ("tool-call", "c1"), ("tool-call", "m1")]
)
async def test_an_encrypted_value_of_nothing_is_noted(w: World, subtype: str, entity: str) -> None:
    value = {"subtype": subtype, "entityId": entity, "encryptedValue": "x"}
    reply, snapshot = await w.played([{"type": "REASONING_ENCRYPTED_VALUE", **value}])
    assert reply.types[-1] == "RUN_FINISHED"
    assert snapshot["messages"] == []
    assert await w.findings(reply) == ["target_not_found"]


@case("PAR-12")
async def test_chunks_are_expanded_once_before_they_are_stored(w: World) -> None:
    reply = await w.run()
    text_, tool = ["START", "CONTENT", "END"], ["START", "ARGS", "END"]
    expected = [
        *(f"TEXT_MESSAGE_{kind}" for kind in text_),
        *(f"TOOL_CALL_{kind}" for kind in tool),
    ]
    assert reply.types == ["RUN_STARTED", *expected, *expected, "RUN_FINISHED"]
    assert await w.replay(reply) == reply.logged
    snapshot = await w.snapshot(reply)
    assert snapshot["openItems"] == []
    assert [m["id"] for m in snapshot["messages"]] == ["m1", "m2", "c2"]
    assert [m.get("content") for m in snapshot["messages"]] == ["Let ", "\n", None]
    arguments = [c["function"]["arguments"] for c in calls_of(snapshot)]
    assert arguments == ['{"a":', "{}"]


@sibling("PAR-12")
@pytest.mark.parametrize(
    "last",
    [
        {"type": "STEP_STARTED", "stepName": "s"},
        {"type": "REASONING_MESSAGE_CHUNK", "messageId": "g1", "delta": "x"},
        {"type": "TEXT_MESSAGE_CHUNK", "messageId": "m1", "delta": "x"},
        {"$raise": "RuntimeError", "message": "x"},
        interrupt("i1"),
    ],
    ids=["step", "reasoning", "the first message again", "exception", "interrupt"],
)
async def test_whatever_follows_a_chunk_no_item_stays_open(w: World, last: Event) -> None:
    first = [
        {"type": "TEXT_MESSAGE_CHUNK", "messageId": "m1", "delta": "Let "},
        {"type": "TEXT_MESSAGE_CHUNK", "messageId": "m2", "delta": "\n"},
    ]
    reply, snapshot = await w.played([*first, last])
    assert snapshot["openItems"] == []
    for kind in ("TEXT_MESSAGE", "REASONING_MESSAGE"):
        starts, ends = (reply.types.count(f"{kind}_{edge}") for edge in ("START", "END"))
        assert starts == ends


@case("PAR-13")
async def test_two_readers_from_the_start_read_the_same(w: World) -> None:
    """A frame's (run, seq) is its cursor; the snapshot is the other way to attach."""
    ((run),) = w.input["runs"]
    reply = await w.run(run_input(script=run["agent_events"]))
    key = reply.headers["AGUI-Thread"]
    path = f"/agui/threads/{key}/stream?run={reply.headers['AGUI-Run']}"
    frames = [(await w.ada.ask(path)).frames for op in w.input["ops"] if op["do"] == "attach"]
    assert frames == [reply.frames, reply.frames]
    folds = [protocol.fold([json.loads(f.data) for f in attached]) for attached in frames]
    assert folds[0] == folds[1]
    ids = [frame.id for frame in frames[0]]
    epoch = str(ids[0]).split("-")[0]
    assert ids == [f"{epoch}-{n}" for n in range(1, len(ids) + 1)]
    snapshot = await w.snapshot(reply)
    assert snapshot["messages"] == folds[0].messages
    assert snapshot["cursor"] == ids[-1]
    assert len(calls_of(snapshot)) == 1


@sibling("PAR-13")
@pytest.mark.parametrize("seen", [1, 3, 5])
async def test_what_was_read_twice_is_known_by_its_cursor(w: World, seen: int) -> None:
    ((run),) = w.input["runs"]
    first = await w.run(run_input(script=run["agent_events"]))
    second = await w.run(run_input(run="r2", script=text("m2", "x")))
    frames = [frame for frame in first.frames + second.frames if frame.id]
    path = f"/agui/threads/{first.headers['AGUI-Thread']}/stream?after={frames[seen - 1].id}"
    stream = scripts.Stream(await w.ada.open(path))
    raw = await stream.until(lambda raw: len(scripts.frames(raw)) >= len(frames) - seen)
    assert scripts.frames(raw) == frames[seen:]
    # At least once: whoever had read two frames more drops them by their cursors.
    had = frames[: seen + 2]
    known = {frame.id for frame in had}
    assert had + [f for f in scripts.frames(raw) if f.id not in known] == frames
