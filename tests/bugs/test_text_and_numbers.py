"""Odd characters, numbers, depth and size, from the agent to every reader."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from ag_ui.core import RunFinishedEvent, RunStartedEvent, StateSnapshotEvent

from aguiapp import conf
from aguiapp.feed import hints
from aguiapp.models import Run, RunEvent
from tests import scripts
from tests.bugs.world import World, case, nested, nothing_stored
from tests.scripts import Reply, only_run, run_input


@case("TXT-01")
async def test_nul_and_lone_halves_stay_as_escapes(w: World) -> None:
    """NUL and lone halves stay, as escapes; the same text on every database."""
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    deltas = [e["delta"] for e in scripts.of(reply.events, "TEXT_MESSAGE_CONTENT")]
    content = "before\0aftercut \ud83dok \U0001f600"
    assert "".join(deltas) == content
    assert all(line.isprintable() for line in reply.logged)
    assert "\\ud83d" in "".join(reply.logged)
    assert await w.replay(reply) == reply.logged
    snapshot = await w.snapshot(reply)
    assert [m["content"] for m in snapshot["messages"]] == [content, "tool\0out"]
    assert snapshot["state"] == {"k\0ey": "v\0"}


@case("TXT-02")
async def test_a_written_escape_is_not_read_twice(w: World) -> None:
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    deltas = [e["delta"] for e in reply.events if "delta" in e]
    assert deltas == ["path C:\\u0000dir", '{"s":"a\\u0000b"}']
    assert await w.replay(reply) == reply.logged
    called = (await w.snapshot(reply))["messages"][-1]["toolCalls"][0]
    assert called["function"]["arguments"] == '{"s":"a\\u0000b"}'


async def poison(reply: Reply, payload: str) -> int:
    """Put a text into the row of the run's third event; the number of the row."""
    rows = RunEvent.objects.filter(run__key=reply.headers["AGUI-Run"], seq=3)
    assert await rows.aupdate(payload=payload) == 1
    return 3


@case("TXT-03")
async def test_an_odd_row_breaks_no_read_and_no_run(w: World) -> None:
    """The API's part: threads, snapshot, replay, and a new run on the same thread."""
    for number, odd in enumerate(("\\u0000", "\\ud800")):
        thread = f"t{number}"
        reply = await w.run(run_input(thread, script=scripts.text("m1", "good")))
        bad = f'{{"type":"TEXT_MESSAGE_CONTENT","messageId":"m1","delta":"a {odd} b"}}'
        await poison(reply, bad)
        assert (await w.replay(reply))[2] == bad
        snapshot = await w.snapshot(reply)
        assert snapshot["messages"][0]["content"] == json.loads(f'"a {odd} b"')
        listed = await w.ada.ask("/agui/threads/")
        assert len(listed.json["threads"]) == number + 1
        again = await w.run(run_input(thread, "r2", script=scripts.text("m2", "next")))
        assert again.types[-1] == "RUN_FINISHED"


@case("TXT-06")
async def test_a_row_of_an_older_writer_can_be_read(w: World) -> None:
    """The API's part: reads are total."""
    reply = await w.run(run_input(script=scripts.text("m1", "good")))
    row = json.dumps(w.input["legacy_row"])
    await poison(reply, row)
    assert (await w.snapshot(reply))["messages"][0]["content"] == "a \udb8d b"
    assert (await w.replay(reply))[2] == row
    path = f"/agui/threads/{reply.headers['AGUI-Thread']}/stream?run={reply.headers['AGUI-Run']}"
    assert (await w.ada.ask(path)).logged[2] == row


@case("TXT-07")
async def test_unicode_line_ends_break_no_frame(w: World) -> None:
    reply = await w.run()
    delta = w.input["agent_events"][2]["delta"]
    assert reply.events[2]["delta"] == delta
    body = reply.raw.decode()
    assert body.splitlines() == body.split("\n")[:-1]
    for escape in ("\\u2028", "\\u2029", "\\u0085"):
        assert escape in reply.logged[2]
    assert (await w.snapshot(reply))["messages"][0]["content"] == delta


@case("TXT-09")
async def test_nan_and_infinity_are_refused_before_they_are_stored(w: World) -> None:
    """Refused before it is stored, from the agent and from the body."""

    async def agent(run: Any) -> AsyncIterator[Any]:
        yield RunStartedEvent(thread_id="t1", run_id="r1")
        yield StateSnapshotEvent(snapshot={"a": float("nan"), "b": float("inf")})
        yield RunFinishedEvent(thread_id="t1", run_id="r1")

    refused = await w.ada.run(w.input["raw_body"].encode())
    assert refused.status in (400, 422)
    assert "NaN" in refused.raw.decode()
    assert refused.code
    infinite = await w.ada.run(w.input["raw_body"].replace("NaN", "1").encode())
    assert infinite.status in (400, 422)
    assert infinite.code == refused.code
    await nothing_stored()
    for value in ("nan", "inf"):

        async def plain(run: Any, value: str = value) -> AsyncIterator[Any]:
            yield {"type": "STATE_SNAPSHOT", "snapshot": {"a": float(value)}}

        with scripts.registered("numbers", plain):
            reply = await w.run(run_input(value), agent="numbers")
        assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
    with scripts.registered("numbers", agent):
        reply = await w.run(run_input(), agent="numbers")
    assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "protocol_violation"
    assert (await w.snapshot(reply))["state"] == {}


class RecordingLayer:
    """A channel layer that several processes might share, and what was sent through it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    async def new_channel(self, prefix: str = "") -> str:
        return "channel"

    async def group_add(self, group: str, channel: str) -> None: ...

    async def group_discard(self, group: str, channel: str) -> None: ...

    async def group_send(self, group: str, message: dict[str, Any]) -> None:
        self.sent.append((group, message))

    async def receive(self, channel: str) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@case("TXT-11")
async def test_big_numbers_never_pass_the_channel_layer(w: World) -> None:
    layer = RecordingLayer()
    w.monkeypatch.setattr(hints, "_shared_layer", lambda: layer)
    reply = await w.run()
    snapshot = w.input["agent_events"][1]["snapshot"]
    assert snapshot == {"u": 2**64, "g": 10**30}
    assert reply.events[1]["snapshot"] == snapshot
    assert (await w.snapshot(reply))["state"] == snapshot
    assert await w.replay(reply) == reply.logged
    assert layer.sent
    for group, message in layer.sent:
        assert set(message) <= {"type", "thread", "run", "seq"}
        assert all(isinstance(value, int | str) for value in message.values())
        assert group.replace(".", "").replace("-", "").isalnum()
        assert len(group) < 100


@case("TXT-12")
async def test_key_order_and_number_forms_survive(w: World) -> None:
    reply = await w.run()
    value = reply.events[1]["value"]
    assert list(value.items()) == list(w.input["agent_events"][1]["value"].items())
    assert str(value["z"]) == "-0.0"
    assert isinstance(value["n"], float)
    assert await w.replay(reply) == reply.logged
    path = f"/agui/threads/{reply.headers['AGUI-Thread']}/stream?run={reply.headers['AGUI-Run']}"
    assert (await w.ada.ask(path)).frames == reply.frames


@case("TXT-13")
async def test_a_body_too_deep_is_refused(w: World) -> None:
    for depth in w.input["raw_body_gen"]["depth"]:
        refused = await w.ada.run(nested(w, depth))
        assert (refused.status, refused.code) == (422, "too_deep")
    await nothing_stored()
    assert (await w.run(run_input())).types[-1] == "RUN_ERROR"


@case("TXT-15")
async def test_the_limit_of_depth_is_exact(w: World) -> None:
    """This interpreter's part; the measure is a walk, so all of them give the same verdict."""
    for depth in w.input["depths"]:
        reply = await w.ada.run(nested(w, depth).replace(b'"r1"', b'"r%d"' % depth), "echo")
        if depth < conf.get().JSON_DEPTH:
            assert reply.status == 200
            assert reply.types[-1] == "RUN_FINISHED"
        else:
            assert (reply.status, reply.code) == (422, "too_deep")
    assert await Run.objects.acount() == 1


@case("TXT-16")
async def test_long_arguments_are_stored_whole(w: World) -> None:
    """The stored value; how it is shown is the admin's part."""
    reply = await w.run()
    arguments = "".join(e["delta"] for e in scripts.of(reply.events, "TOOL_CALL_ARGS"))
    assert len(arguments) >= 100_000
    snapshot = await w.snapshot(reply)
    assert snapshot["messages"][-1]["toolCalls"][0]["function"]["arguments"] == arguments
    assert snapshot["pendingToolCallIds"] == ["c1"]
    assert await w.replay(reply) == reply.logged


@case("TXT-18")
async def test_an_event_too_large_for_clients_is_refused(w: World) -> None:
    """The log's part: an event that a stock client cannot take is refused, at a setting."""
    assert conf.get().EVENT_BYTES < 10 * conf.MIB
    assert conf.get().STATE_BYTES <= 8 * conf.MIB
    reply = await w.run()
    assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "event_too_large"
    assert (await only_run()).error_code == "event_too_large"


@case("TXT-19")
async def test_keys_that_are_no_strings_never_fork_the_state(w: World) -> None:
    async def typed(run: Any) -> AsyncIterator[Any]:
        yield RunStartedEvent(thread_id="typed", run_id="r1")
        yield StateSnapshotEvent(snapshot={1: "a", None: "b"})
        yield RunFinishedEvent(thread_id="typed", run_id="r1")

    async def plain(run: Any) -> AsyncIterator[Any]:
        yield {"type": "STATE_SNAPSHOT", "snapshot": {1: "a", None: "b"}}

    for name, agent in (("typed", typed), ("plain", plain)):
        with scripts.registered("keys", agent):
            reply = await w.run(run_input(name), agent="keys")
        state = (await w.snapshot(reply))["state"]
        if reply.types[-1] == "RUN_ERROR":
            assert reply.events[-1]["code"] == "protocol_violation"
            assert state == {}
        else:
            assert reply.events[1]["snapshot"] == state
            assert state["1"] == "a"
        assert await w.replay(reply) == reply.logged
