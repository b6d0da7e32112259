"""The pure half of a run: what an agent hands over becomes text fit for the log."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings as hypothesis, strategies as st

from aguiapp import protocol
from aguiapp.engine.endings import Terminal
from aguiapp.engine.limits import LimitExceeded
from aguiapp.engine.recorder import Recorder
from tests.scripts import legal, text

IDS = {"threadId": "t1", "runId": "r1"}


def recorder(*, start: bool = True, held: protocol.Fold | None = None) -> Recorder:
    """A recorder of run r1 on thread t1."""
    made = Recorder(
        thread_id="t1", run_id="r1", run_key="key", folder=held or protocol.Fold(), now=lambda: 7
    )
    if start:
        made.write({"type": "RUN_STARTED", **IDS}, free=True)
    return made


def owed(status: str = "success", code: str = "") -> Terminal:
    return Terminal(
        status=status, thread_id="t1", run_id="r1", run_key="key", code=code, message="m"
    )


def events(made: Recorder) -> list[dict[str, Any]]:
    """Everything recorded, which is legal and coded as its type."""
    rows = made.drain()
    found = [json.loads(row) for _, row in rows]
    assert [protocol.TYPE_NAMES[code] for code, _ in rows] == [e["type"] for e in found]
    return found


def test_time_is_stamped_where_the_agent_gave_none() -> None:
    made = recorder()
    made.feed({"type": "CUSTOM", "name": "n", "value": 1})
    made.feed({"type": "CUSTOM", "name": "n", "value": 1, "timestamp": 5})
    assert [event["timestamp"] for event in events(made)] == [7, 7, 5]


def test_an_event_is_not_changed_under_the_agents_hands() -> None:
    made, event = recorder(), {"type": "STATE_SNAPSHOT", "snapshot": {"n": [1]}}
    made.feed(event)
    assert event == {"type": "STATE_SNAPSHOT", "snapshot": {"n": [1]}}


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m", "delta": "x"},
        {"type": "TEXT_MESSAGE_START"},
        {"type": "CUSTOM", "name": "n", "value": float("nan")},
        {"type": "CUSTOM", "name": "n", "value": object()},
        {"type": "RUN_STARTED", "threadId": "x", "runId": "r1"},
    ],
)
def test_a_refused_event_leaves_no_trace(bad: Any) -> None:
    made = recorder()
    made.drain()
    before = (made.events, made.bytes, dict(made.counts), made.verifier.open_items)
    with pytest.raises(protocol.ProtocolError):
        made.feed(bad)
    assert made.drain() == []
    assert (made.events, made.bytes, dict(made.counts), made.verifier.open_items) == before
    made.close(owed("error", "protocol_violation"))
    assert [e["type"] for e in events(made)] == ["RUN_ERROR"]


def test_bytes_and_counts_are_those_of_the_text() -> None:
    made = recorder()
    for event in text("m1", "é漢\U0001f600\u2028"):
        made.feed(event)
    rows = made.drain()
    assert made.bytes == sum(len(row.encode()) for _, row in rows)
    assert made.events == len(rows) == sum(made.counts.values())


def test_chunks_become_explicit_events() -> None:
    made = recorder()
    for delta in ("a", "b"):
        made.feed({"type": "TEXT_MESSAGE_CHUNK", "messageId": "m1", "delta": delta})
    made.close(owed())
    assert [e["type"] for e in events(made)] == [
        "RUN_STARTED",
        "TEXT_MESSAGE_START",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
        "RUN_FINISHED",
    ]


def test_unknown_parts_are_stripped_with_a_finding() -> None:
    made = recorder()
    made.feed({"type": "CUSTOM", "name": "n", "value": 1, "vendor": 1})
    made.feed({"type": "FUTURE"})
    assert len(made.findings) == 2
    assert "vendor" not in events(made)[-1]


def test_encrypted_value_types_are_kept() -> None:
    made = recorder()
    made.feed(
        {
            "type": "REASONING_ENCRYPTED_VALUE",
            "subtype": "message",
            "entityId": "m1",
            "encryptedValue": "x",
            "encryptedValueType": "vendor",
        }
    )
    assert events(made)[-1]["encryptedValueType"] == "vendor"


def test_a_state_too_large_is_taken_back(settings: Any) -> None:
    settings.AGUIAPP = {"STATE_BYTES": 1000}
    made = recorder()
    made.feed({"type": "STATE_SNAPSHOT", "snapshot": {"a": "x" * 800}})
    with pytest.raises(LimitExceeded) as caught:
        made.feed({"type": "STATE_DELTA", "delta": [{"op": "copy", "from": "/a", "path": "/b"}]})
    assert caught.value.code == "state_too_large"
    assert made.fold.state == {"a": "x" * 800}
    made.feed({"type": "STATE_DELTA", "delta": [{"op": "remove", "path": "/a"}]})
    assert made.fold.state == {}


def test_what_a_patch_frees_can_be_used_again(settings: Any) -> None:
    settings.AGUIAPP = {"STATE_BYTES": 1000}
    made = recorder()
    for _ in range(20):
        made.feed({"type": "STATE_SNAPSHOT", "snapshot": {"a": "x" * 500}})
    assert made.fold.state == {"a": "x" * 500}


@pytest.mark.parametrize("status", ["error", "cancelled"])
def test_a_full_run_can_still_end(status: str, settings: Any) -> None:
    settings.AGUIAPP = {"RUN_EVENTS": 3}
    made = recorder()
    for event in text("m1", "x")[:2]:
        made.feed(event)
    with pytest.raises(LimitExceeded):
        made.feed({"type": "CUSTOM", "name": "n", "value": 1})
    made.close(owed(status, "run_too_large"))
    found = events(made)
    legal(found)
    assert found[-2]["type"] == "TEXT_MESSAGE_END"


PIECES = st.lists(st.sampled_from(["a", "\ud83d", "\ude00", "\ud83d\ude00", "é", ""]), max_size=8)


@hypothesis(max_examples=200, deadline=None)
@given(first=PIECES, second=PIECES, dice=st.randoms())
def test_cut_characters_are_joined_and_no_text_is_lost(
    first: list[str], second: list[str], dice: Any
) -> None:
    made = recorder()
    made.feed(text("m1")[0])
    made.feed({"type": "TOOL_CALL_START", "toolCallId": "c1", "toolCallName": "f"})
    todo = [("m1", d) for d in first] + [("c1", d) for d in second]
    order = [0] * len(first) + [1] * len(second)
    dice.shuffle(order)
    streams = [iter(todo[: len(first)]), iter(todo[len(first) :])]
    for which in order:
        name, delta = next(streams[which])
        if name == "m1":
            made.feed({"type": "TEXT_MESSAGE_CONTENT", "messageId": name, "delta": delta})
        else:
            made.feed({"type": "TOOL_CALL_ARGS", "toolCallId": name, "delta": delta})
    made.feed(text("m1")[1])
    made.feed({"type": "TOOL_CALL_END", "toolCallId": "c1"})
    made.close(owed())
    found = events(made)
    legal(found)
    joined = {
        "TEXT_MESSAGE_CONTENT": protocol.join_halves("".join(first)),
        "TOOL_CALL_ARGS": protocol.join_halves("".join(second)),
    }
    for kind, expected in joined.items():
        deltas = [e["delta"] for e in found if e["type"] == kind]
        # Already whole: nothing is left for the reader to join.
        assert "".join(deltas) == expected
    assert protocol.fold(found).messages == made.fold.snapshot().messages


EVENTS = st.sampled_from(
    [
        *text("m1", "x"),
        *text("m2", "\ud83d"),
        {"type": "STEP_STARTED", "stepName": "s"},
        {"type": "STEP_FINISHED", "stepName": "s"},
        {"type": "TOOL_CALL_START", "toolCallId": "c1", "toolCallName": "f"},
        {"type": "TOOL_CALL_ARGS", "toolCallId": "c1", "delta": "{"},
        {"type": "TOOL_CALL_END", "toolCallId": "c1"},
        {"type": "TOOL_CALL_RESULT", "toolCallId": "c1", "messageId": "t1", "content": "ok"},
        {"type": "REASONING_START", "messageId": "g"},
        {"type": "REASONING_END", "messageId": "g"},
        {"type": "REASONING_MESSAGE_START", "messageId": "g", "role": "reasoning"},
        {"type": "REASONING_MESSAGE_CONTENT", "messageId": "g", "delta": "x"},
        {"type": "REASONING_MESSAGE_END", "messageId": "g"},
        {"type": "SUBAGENT_STARTED", "subagentRunId": "a1", "name": "h"},
        {"type": "SUBAGENT_FINISHED", "subagentRunId": "a1"},
        {**text("m3")[0], "subagentRunId": "a1"},
        {"type": "STEP_STARTED", "stepName": "s", "subagentRunId": "a1"},
        {"type": "TEXT_MESSAGE_CHUNK", "messageId": "m4", "delta": "x"},
        {"type": "TOOL_CALL_CHUNK", "toolCallId": "c2", "toolCallName": "f", "delta": "x"},
        {"type": "STATE_DELTA", "delta": [{"op": "add", "path": "/n", "value": 1}]},
        {"type": "MESSAGES_SNAPSHOT", "messages": []},
        {"type": "RUN_STARTED", **IDS},
        {"type": "RUN_FINISHED", **IDS},
        {"type": "RUN_ERROR", "message": "m"},
    ]
)


@hypothesis(max_examples=400, deadline=None)
@given(
    st.lists(EVENTS, max_size=14),
    st.sampled_from(["error", "cancelled", "success"]),
)
def test_whatever_an_agent_does_the_log_is_legal_and_ends_once(
    script: list[dict[str, Any]], status: str
) -> None:
    made = recorder()
    refused = False
    for event in script:
        try:
            made.feed(event)
        except protocol.ProtocolError:
            refused = True
            break
    if made.terminal is None:
        if refused or made.verifier.open_items or made.agent_started:
            status = "error" if status == "success" else status
        made.close(owed(status, "incomplete" if status == "error" else ""))
    found = events(made)
    legal(found)
    assert [e["type"] in protocol.TERMINAL for e in found].count(True) == 1
    assert found[-1]["type"] in protocol.TERMINAL
    # Half an argument is never closed before an error.
    closers = {"TOOL_CALL_END", "TOOL_CALL_CHUNK"} & {e["type"] for e in script}
    if found[-1]["type"] == "RUN_ERROR" and not closers:
        assert "TOOL_CALL_END" not in [e["type"] for e in found]
    assert protocol.fold(found).messages == made.fold.snapshot().messages
