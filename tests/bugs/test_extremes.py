"""Depth and odd characters on every way in and out: nothing raises, and every reader agrees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import CustomEvent, StateSnapshotEvent, ToolCallArgsEvent

from aguiapp import conf, protocol, store
from aguiapp.engine.limits import LimitExceeded
from tests import scripts
from tests.bugs.world import (
    World,
    activity,
    activity_delta,
    call,
    caller,
    delta,
    messages,
    nothing_stored,
    recording,
    result,
    sibling,
    state,
)
from tests.scripts import Event, Reply, only_run, registered, run_input, said, text

DEPTH = conf.Settings.JSON_DEPTH


def nest(levels: int) -> Any:
    """So many objects within each other."""
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def levels(value: Any) -> int:
    """The inverse of `nest`."""
    found = 0
    while isinstance(value, dict):
        found, value = found + 1, value.get("a")
    return found


async def readers(w: World, reply: Reply) -> dict[str, Any]:
    """Live, polled, resumed and stored are the same bytes; the snapshot is their fold."""
    stored = await scripts.stored(run__thread__key=reply.headers["AGUI-Thread"])
    key, run = reply.headers["AGUI-Thread"], reply.headers["AGUI-Run"]
    assert await w.replay(reply) == stored
    resumed = await w.ada.ask(f"/agui/threads/{key}/stream?run={run}")
    assert resumed.logged == reply.logged == await scripts.stored(run__key=run)
    document = await w.ada.ask(f"/agui/threads/{key}/events", accept="application/json")
    assert document.json["events"] == [json.loads(line) for line in stored]
    snapshot: dict[str, Any] = await w.snapshot(reply)
    folded = protocol.fold(map(json.loads, stored))
    assert protocol.dumps(snapshot["messages"], max_depth=DEPTH + 9) == protocol.dumps(
        folded.messages, max_depth=DEPTH + 9
    )
    assert protocol.dumps(snapshot["state"]) == protocol.dumps(folded.state)
    assert snapshot["unreadable"] == []
    return snapshot


# -- depth -----------------------------------------------------------------------

HOLDERS: dict[str, Any] = {
    "state": state,
    "activity": activity,
    "patch": lambda value: delta({"op": "add", "path": "/z", "value": value}),
    "test": lambda value: delta({"op": "test", "path": "/z", "value": value}),
    "activity patch": lambda v: activity_delta({"op": "add", "path": "/z", "value": v}),
    "messages": lambda value: messages({**said("u1"), "metadata": value}),
    "custom": lambda value: {"type": "CUSTOM", "name": "n", "value": value},
    "raw": lambda value: {"type": "RAW", "event": value},
    "metadata": lambda value: {"type": "CUSTOM", "name": "n", "value": 1, "metadata": value},
    "outcome": lambda value: {
        "type": "RUN_FINISHED",
        "threadId": "t1",
        "runId": "r1",
        "result": value,
    },
}


@sibling("TXT-13")
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
async def test_no_event_too_deep_gets_in(w: World, holder: Any) -> None:
    for number, depth in enumerate((DEPTH + 1, 1_000, 20_000)):
        deep = holder(nest(depth))

        async def agent(run: Any, deep: Any = deep) -> AsyncIterator[Any]:
            yield deep

        async def textual(run: Any, depth: int = depth) -> AsyncIterator[Any]:
            marked = json.dumps(holder("X"))
            yield marked.replace('"X"', '{"a":' * depth + "1" + "}" * depth)

        for kind, target in (("dict", agent), ("text", textual)):
            with registered("deep", target):
                reply = await w.run(run_input(f"{kind}{number}"), "deep")
            assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
            assert reply.events[-1]["code"] == "protocol_violation"


@sibling("TXT-13")
async def test_a_model_too_deep_does_not_get_in(w: World) -> None:
    for number, depth in enumerate((DEPTH + 1, 1_000)):

        async def agent(run: Any, depth: int = depth) -> AsyncIterator[Any]:
            yield StateSnapshotEvent(snapshot=nest(depth))

        with registered("deep", agent):
            reply = await w.run(run_input(f"t{number}"), "deep")
        assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
        assert reply.events[-1]["code"] == "protocol_violation"


def deepening(event: Any, count: int) -> list[Event]:
    """Deltas of which each puts one object below the last one."""
    return [event({"op": "add", "path": "/a" * n, "value": {}}) for n in range(1, count + 1)]


@sibling("TXT-13")
async def test_a_state_cannot_be_made_too_deep_step_by_step(w: World) -> None:
    reply = await w.run(run_input(script=[state({}), *deepening(delta, 10_000 // 50)]))
    assert reply.events[-1]["code"] == "state_too_large"
    assert levels((await readers(w, reply))["state"]) <= DEPTH


def deepest(event: Any, most: int) -> tuple[list[Event], Any]:
    """The deltas that were taken, and what they made."""
    made, taken = recording(), []
    made.feed(activity({}) if event is activity_delta else state({}))
    for step in deepening(event, most):
        try:
            made.feed(step)
        except LimitExceeded:
            break
        taken.append(step)
    found = made.fold.snapshot()
    return taken, found.messages[0]["content"] if event is activity_delta else found.state


def test_ten_thousand_steps_deeper_are_never_taken() -> None:
    taken, reached = deepest(delta, 10_000)
    assert len(taken) < levels(reached) <= DEPTH


def test_nor_are_they_for_an_activity() -> None:
    _, reached = deepest(activity_delta, 2 * DEPTH)
    assert levels(reached) <= DEPTH


async def answer(w: World, body: Any) -> str:
    """How a post ended: its terminal event, the code of its refusal, or what went wrong."""
    try:
        async with asyncio.timeout(3):
            reply = await w.ada.run(body)
    except (protocol.ProtocolError, TimeoutError) as error:
        return repr(error)
    return reply.types[-1] if reply.status == 200 else reply.code


@sibling("TXT-13")
@pytest.mark.parametrize("sent_back", [True, False])
async def test_the_deepest_state_can_be_sent_back_and_healed(w: World, sent_back: bool) -> None:
    script = [state({}), *deepest(delta, 2 * DEPTH)[0], *text("m1", "x")]
    first = await w.run(run_input(script=script))
    held = await readers(w, first)
    mine = {"state": held["state"], "messages": held["messages"]} if sent_back else {}
    assert await answer(w, run_input(run="r2", script=[], **mine)) == "RUN_FINISHED"


DEEP_ACTIVITIES = pytest.mark.parametrize(
    "depth",
    [
        DEPTH - 3,
        DEPTH - 2,
        DEPTH - 1,
    ],
)


async def deep_activity(w: World, depth: int, *more: Event) -> None:
    """A first run that leaves an activity so deep."""

    async def agent(run: Any) -> AsyncIterator[Event]:
        for event in (activity(nest(depth)), *more):
            yield event

    with registered("deep", agent):
        assert (await w.run(run_input(), "deep")).types[-1] == "RUN_FINISHED"


@sibling("TXT-13")
@DEEP_ACTIVITIES
async def test_the_deepest_activity_can_be_healed(w: World, depth: int) -> None:
    await deep_activity(w, depth, *text("m1", "x"))
    assert await answer(w, run_input(run="r2", script=[])) == "RUN_FINISHED"


@sibling("TXT-13")
@DEEP_ACTIVITIES
async def test_history_with_the_deepest_activity_can_be_edited(w: World, depth: int) -> None:
    await deep_activity(w, depth)
    for number in (2, 3):
        body = run_input(run=f"r{number}", messages=[said("u1")], script=text("m1", "x"))
        assert await answer(w, body) == "RUN_FINISHED"


def body_of_depth(depth: int) -> dict[str, Any]:
    """A body so deep, by the metadata of its message."""
    return run_input(messages=[{**said("u1"), "metadata": nest(depth - 3)}], script=text("m1", "y"))


@sibling("TXT-13")
@pytest.mark.parametrize("room", [1, 2, 3])
async def test_a_deep_body_runs(w: World, room: int) -> None:
    assert await answer(w, body_of_depth(DEPTH - room)) == "RUN_FINISHED"


@sibling("TXT-13")
async def test_a_body_one_level_too_deep_is_refused(w: World) -> None:
    assert await answer(w, body_of_depth(DEPTH + 1)) == "too_deep"


@sibling("TXT-13")
async def test_the_deepest_body_runs_or_is_refused(w: World) -> None:
    assert await answer(w, body_of_depth(DEPTH)) in ("RUN_FINISHED", "too_deep")


# -- characters and numbers ------------------------------------------------------

TEXTS = {
    "high half": "a\ud83d",
    "low half": "\ude00b",
    "halves the wrong way": "\ude00\ud83d",
    "pair of halves": "\ud83d\ude00",
    "nul": "a\0b",
    "controls": "\x01\x1f\x7f\x80\x9f",
    "line ends": "\u2028\u2029\x85\r\n\n",
    "written escapes": "\\u0000\\ud83d\\n",
    "no characters": "\ufffe\uffff\U0010ffff",
    "bom": "\ufeffx",
}


def named(prefix: str, odd: str) -> str:
    """An id with the text in it, where ids may have it."""
    return prefix + odd if protocol.is_id(prefix + odd) else prefix


def everywhere(odd: str) -> list[Event]:
    """Events with a text at every place that an agent can put one."""
    return [
        *text(named("m", odd), odd, odd),
        {"type": "STEP_STARTED", "stepName": odd},
        {"type": "STEP_FINISHED", "stepName": odd},
        *call(named("c", odd), odd),
        result(named("c", odd), named("t", odd), odd),
        {"type": "CUSTOM", "name": odd, "value": {odd: [odd]}},
        {"type": "RAW", "event": {odd: odd}, "source": odd},
        state({odd: odd, "deep": [{odd: odd}]}),
        delta({"op": "add", "path": "/added", "value": {odd: odd}}),
        activity({odd: odd}, named("a", odd)),
        activity_delta({"op": "add", "path": "/added", "value": odd}, name=named("a", odd)),
        {"type": "REASONING_MESSAGE_START", "messageId": named("g", odd), "role": "reasoning"},
        {"type": "REASONING_MESSAGE_CONTENT", "messageId": named("g", odd), "delta": odd},
        {"type": "REASONING_MESSAGE_END", "messageId": named("g", odd)},
        {
            "type": "REASONING_ENCRYPTED_VALUE",
            "subtype": "message",
            "entityId": named("g", odd),
            "encryptedValue": odd,
        },
        {"type": "SUBAGENT_STARTED", "subagentRunId": odd, "name": odd},
        {"type": "SUBAGENT_FINISHED", "subagentRunId": odd, "result": odd},
        messages(said(named("u", odd), odd), caller(named("n", odd), (named("d", odd), odd))),
    ]


def whole(value: Any) -> Any:
    """A value as it is once halves that meet in one text are joined."""
    return json.loads(json.dumps(value))


@sibling("TXT-01")
@pytest.mark.parametrize("odd", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("form", ["dict", "text"])
async def test_an_odd_text_is_the_same_for_every_reader(w: World, odd: str, form: str) -> None:
    events = everywhere(odd)

    async def agent(run: Any) -> AsyncIterator[Any]:
        for event in events:
            yield event if form == "dict" else json.dumps(event)

    with registered("odd", agent):
        reply = await w.run(run_input(messages=[said("u0", odd)], state={"s": odd}), "odd")
    assert reply.types[-1] == "RUN_FINISHED"
    snapshot = await readers(w, reply)
    assert all(
        line.isprintable() or "\x7f" in odd or "\ufffe" in odd or "\ufeff" in odd
        for line in reply.logged
    )
    assert snapshot["state"] == whole({odd: odd, "deep": [{odd: odd}], "added": {odd: odd}})
    (custom,) = scripts.of(reply.events, "CUSTOM")
    assert (custom["name"], custom["value"]) == (whole(odd), whole({odd: [odd]}))
    held = [m for m in snapshot["messages"] if m["role"] == "assistant"]
    assert held[0]["toolCalls"][0]["function"]["arguments"] == whole(odd)


@sibling("TXT-01")
@pytest.mark.parametrize("odd", TEXTS.values(), ids=TEXTS)
async def test_an_odd_text_in_the_ending_is_kept(w: World, odd: str) -> None:
    """The columns of the run, its findings and its outcome, too."""
    ends: list[Event] = [
        {"type": "RUN_ERROR", "message": odd, "code": odd},
        {"type": "RUN_FINISHED", "result": {odd: odd}},
        {
            "type": "RUN_FINISHED",
            "outcome": {
                "type": "interrupt",
                "interrupts": [{"id": odd, "reason": odd, "message": odd}],
            },
        },
        {"type": "RUN_FINISHED", "usage": [{"model": odd}]},
        {"$raise": "RuntimeError", "message": odd},
        {"$raise": "RunError", "message": odd, "code": odd},
        {"type": odd},
        {"type": "CUSTOM", "name": "n", "value": 1, odd: odd},
        {"type": "TEXT_MESSAGE_END", "messageId": odd},
        {"type": "RUN_STARTED", "threadId": odd, "runId": odd},
    ]
    for number, end in enumerate(ends):
        thread = f"t{number}"
        ids = {"threadId": thread, "runId": "r1"} if end.get("type") == "RUN_FINISHED" else {}
        reply = await w.ada.run(run_input(thread, script=[{**end, **ids}]))
        assert reply.status == 200
        assert reply.types[-1] in protocol.TERMINAL, end
        assert reply.events[-1].get("code") != "store_failed", end
        await readers(w, reply)
        run = await only_run(key=reply.headers["AGUI-Run"])
        assert run.ended
        if end.get("type") == "RUN_ERROR":
            assert reply.events[-1]["message"] == whole(odd)
            assert reply.events[-1]["code"] == whole(odd)
        if end.get("result"):
            assert reply.events[-1]["result"] == whole({odd: odd})


@sibling("TXT-01")
@pytest.mark.parametrize("odd", TEXTS.values(), ids=TEXTS)
async def test_an_odd_text_in_the_body_is_kept_or_refused(w: World, odd: str) -> None:
    body = run_input(
        messages=[
            {"id": "u1", "role": "user", "content": odd, "name": odd},
            {"id": "u2", "role": "user", "content": [{"type": "text", "text": odd}]},
            {"id": "t2", "role": "tool", "content": odd, "toolCallId": odd},
            said("s1", odd, "system"),
        ],
        state={odd: odd},
        tools=[{"name": odd, "description": odd, "parameters": {odd: odd}}],
        context=[{"description": odd, "value": odd}],
        forwardedProps={odd: odd, "script": text("m1", "x")},
    )
    reply = await w.run(body)
    assert reply.types[-1] == "RUN_FINISHED"
    snapshot = await readers(w, reply)
    assert snapshot["messages"][:3] == whole(body["messages"][:3])
    assert snapshot["state"] == whole({odd: odd})
    run = await only_run()
    rebuilt = await store.call(store.rebuild_input, run)
    assert rebuilt.encode() == scripts.wire(body)
    same = await w.ada.run(body)
    assert same.headers["AGUI-Run"] == reply.headers["AGUI-Run"]


@sibling("TXT-01")
@pytest.mark.parametrize("odd", TEXTS.values(), ids=TEXTS)
async def test_an_odd_id_in_the_body_is_refused_or_works(w: World, odd: str) -> None:
    for number, member in enumerate(("threadId", "runId", "parentRunId")):
        body = run_input(f"t{number}", script=text("m1", "x"))
        reply = await w.ada.run({**body, member: odd})
        if reply.status == 200:
            assert reply.events[0][member] == whole(odd)
            await readers(w, reply)
        else:
            assert (reply.status, reply.code) == (422, "invalid_input")


@sibling("TXT-01")
@pytest.mark.parametrize("odd", ["a\ud83d", "a\0b", "\x01", "", "x" * 256], ids=repr)
async def test_what_an_agent_named_can_be_sent_back(w: World, odd: str) -> None:
    """Either the id is refused, or a client that holds it may go on."""
    reply = await w.run(run_input(messages=[said("u1")], script=text(odd, "x")))
    held = (await w.snapshot(reply))["messages"]
    body = run_input(run="r2", messages=[*held, said("u2")], script=[])
    assert await answer(w, body) == "RUN_FINISHED"


NUMBERS = [2**53 - 1, 2**53, 2**53 + 1, 2**63, 2**64, -(2**64), 10**30, 1e22, -0.0, 0.1, 5e-324]


@sibling("TXT-11")
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
async def test_a_number_is_the_same_for_every_reader(w: World, number: Any) -> None:
    events = [state({"n": [number]}), {"type": "CUSTOM", "name": "n", "value": number}]
    forms: dict[str, list[Any]] = {
        "dict": events,
        "text": [json.dumps(event) for event in events],
        "model": [
            StateSnapshotEvent(snapshot={"n": [number]}),
            CustomEvent(name="n", value=number),
        ],
    }
    for form, yielded in forms.items():

        async def agent(run: Any, yielded: list[Any] = yielded) -> AsyncIterator[Any]:
            for event in yielded:
                yield event

        with registered("numbers", agent):
            reply = await w.run(run_input(form), "numbers")
        assert reply.types[-1] == "RUN_FINISHED"
        snapshot = await readers(w, reply)
        assert repr(snapshot["state"]["n"]) == repr([number])
        (custom,) = scripts.of(reply.events, "CUSTOM")
        assert repr(custom["value"]) == repr(number)
        # As the client sends it back, it is the thread's state.
        again = await w.run(run_input(form, "r2", state={"n": [number]}, script=[]))
        assert not any("STATE_SNAPSHOT" in line for line in again.logged)


@sibling("TXT-09")
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
async def test_what_is_no_number_is_refused_everywhere(w: World, holder: Any) -> None:
    for constant in ("NaN", "Infinity", "-Infinity", "1e400"):
        plain = holder({"n": [float(constant)]})
        textual = json.dumps(holder({"n": ["X"]})).replace('"X"', constant)
        for form, event in (("dict", plain), ("text", textual)):

            async def agent(run: Any, event: Any = event) -> AsyncIterator[Any]:
                yield event

            with registered("numbers", agent):
                reply = await w.run(run_input(f"{form} {constant}"), "numbers")
            assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
            assert reply.events[-1]["code"] == "protocol_violation"


@sibling("TXT-09")
@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
async def test_what_is_no_number_is_refused_in_a_body(w: World, constant: str) -> None:
    for member in ("state", "messages", "forwardedProps", "tools", "context", "resume", "more"):
        body = json.dumps({**run_input(), member: "X"}).replace('"X"', constant)
        refused = await w.ada.run(body.encode())
        assert refused.status == 400
        assert refused.code == "bad_json"
    await nothing_stored()


@sibling("TXT-09")
async def test_a_half_in_a_model_is_judged_like_a_half_in_a_dict(w: World) -> None:
    """Where the model takes it; most of its texts do not."""

    async def agent(run: Any) -> AsyncIterator[Any]:
        yield CustomEvent(name="n", value={"\ud83d": "\ude00"})

    with registered("halves", agent):
        reply = await w.run(run_input(), "halves")
    await readers(w, reply)
    if reply.types[-1] == "RUN_FINISHED":
        assert reply.events[1]["value"] == {"\ud83d": "\ude00"}
    else:
        assert reply.events[-1]["code"] in ("protocol_violation", "agent_failed")


def test_models_and_dicts_give_one_text() -> None:
    odd = "\0\u2028\x85\U0001f600"
    plain = {"type": "TOOL_CALL_ARGS", "toolCallId": "c1", "delta": odd}
    model = ToolCallArgsEvent(tool_call_id="c1", delta=odd)
    texts = {protocol.dumps(protocol.to_wire(e)) for e in (plain, json.dumps(plain), model)}
    assert len(texts) == 1
