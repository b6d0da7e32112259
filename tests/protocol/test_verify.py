import json
from typing import Any

import pytest

from aguiapp import protocol
from tests.protocol import cases

START = {"type": "RUN_STARTED", "threadId": "t1", "runId": "r1"}
FINISH = {"type": "RUN_FINISHED", "threadId": "t1", "runId": "r1"}


def bare(events: list[Any]) -> tuple[bool, int | None]:
    verifier = protocol.Verifier()
    for index, event in enumerate(events):
        try:
            verifier.feed(event)
        except protocol.ProtocolError:
            return False, index
    return True, None


@cases.each(cases.family("verify"), lambda case: case["rule"])
def test_every_stream_gets_the_official_verdict(case: cases.Case) -> None:
    expected = case if case["client_same"] else case["client"]
    verdict = protocol.check(case["events"])
    assert (verdict.accepts, verdict.error_index) == (expected["accepts"], expected["error_index"])
    assert (verdict.rule is None) == verdict.accepts
    if case["schema_valid"]:
        assert bare(case["events"]) == (case["accepts"], case["error_index"])


@cases.each(cases.family("verify"), lambda case: case["rule"])
def test_a_snapshot_at_any_point_goes_on_the_same_way(case: cases.Case) -> None:
    if not case["schema_valid"]:
        return
    verifier = protocol.Verifier()
    for index, event in enumerate(case["events"]):
        resumed = protocol.Verifier()
        resumed.restore(json.loads(json.dumps(verifier.snapshot())))
        outcomes = []
        for candidate in (verifier, resumed):
            try:
                candidate.feed(event)
                outcomes.append("accepted")
            except protocol.ProtocolError as problem:
                outcomes.append(problem.rule)
        assert outcomes[0] == outcomes[1], index
        assert verifier.snapshot() == resumed.snapshot()
        assert verifier.open_items == resumed.open_items
        if outcomes[0] != "accepted":
            break


def test_a_refused_event_leaves_the_verifier_as_it_was() -> None:
    verifier = protocol.Verifier()
    verifier.feed(START)
    verifier.feed({"type": "TEXT_MESSAGE_START", "messageId": "m1", "subagentRunId": "s1"})
    before = verifier.snapshot()
    for bad in (
        FINISH,
        START,
        {"type": "TEXT_MESSAGE_START", "messageId": "m1"},
        {"type": "TEXT_MESSAGE_END", "messageId": "m1", "subagentRunId": "s2"},
        {"type": "STEP_FINISHED", "stepName": "x"},
        {"type": "SUBAGENT_ERROR", "subagentRunId": "s1", "message": "no"},
    ):
        with pytest.raises(protocol.ProtocolError):
            verifier.feed(bad)
        assert verifier.snapshot() == before


def test_open_items_come_in_opening_order_with_their_owners() -> None:
    verifier = protocol.Verifier()
    openers: list[protocol.Event] = [
        {"type": "SUBAGENT_STARTED", "subagentRunId": "s1", "name": "helper"},
        {"type": "STEP_STARTED", "stepName": "plan"},
        {"type": "STEP_STARTED", "stepName": "plan", "subagentRunId": "s1"},
        {"type": "REASONING_START", "messageId": "q"},
        {"type": "REASONING_MESSAGE_START", "messageId": "q", "role": "reasoning"},
        {"type": "TEXT_MESSAGE_START", "messageId": "m", "subagentRunId": "s1"},
        {"type": "TOOL_CALL_START", "toolCallId": "c", "toolCallName": "f"},
    ]
    verifier.feed(START)
    for event in openers:
        verifier.feed(event)
    assert [item[:3] for item in verifier.open_items] == [
        ("subagent", "s1", None),
        ("step", "plan", None),
        ("step", "plan", "s1"),
        ("span", "q", None),
        ("reasoning", "q", None),
        ("text", "m", "s1"),
        ("tool", "c", None),
    ]
    assert [item.opener for item in verifier.open_items] == openers
    was_open = verifier.run_open
    verifier.feed({"type": "RUN_ERROR", "message": "boom"})
    assert verifier.open_items == []
    assert (was_open, verifier.run_open) == (True, False)
    assert verifier.phase == "failed"


DUTIES: list[tuple[str, list[protocol.Event]]] = [
    ("VERIFY-41", [START, {**FINISH, "runId": "r2"}]),
    ("VERIFY-42", [START, {**FINISH, "threadId": "t2"}]),
    ("VERIFY-42", [START, FINISH, {**START, "threadId": "t2", "runId": "r2"}]),
    ("VERIFY-43", [START, FINISH, START]),
    (
        "VERIFY-44",
        [
            START,
            {
                **FINISH,
                "outcome": {
                    "type": "interrupt",
                    "interrupts": [{"id": "i", "reason": "a"}, {"id": "i", "reason": "b"}],
                },
            },
        ],
    ),
    (
        "VERIFY-45",
        [START, {**FINISH, "outcome": {"type": "success", "pendingToolCallIds": ["c"]}}],
    ),
]


@pytest.mark.parametrize(("rule", "events"), DUTIES)
def test_a_producer_duty_is_refused_when_strict_and_noted_otherwise(
    rule: str, events: list[protocol.Event]
) -> None:
    strict, lenient = protocol.Verifier(strict=True), protocol.Verifier()
    for event in events[:-1]:
        strict.feed(event)
        lenient.feed(event)
    with pytest.raises(protocol.ProtocolError) as caught:
        strict.feed(events[-1])
    assert caught.value.rule == rule
    lenient.feed(events[-1])
    assert [finding.kind for finding in lenient.drain()] == [rule]
    assert lenient.warnings == []


def test_an_expected_run_and_thread_are_held_to() -> None:
    verifier = protocol.Verifier(strict=True, thread_id="t1", run_id="r1")
    for wrong in ({**START, "threadId": "x"}, {**START, "runId": "x"}):
        with pytest.raises(protocol.ProtocolError):
            verifier.feed(wrong)
    verifier.feed(START)
    assert verifier.run_open


def test_pending_calls_are_those_without_a_result_in_order() -> None:
    verifier = protocol.Verifier(strict=True)
    verifier.feed(START)
    for name in ("b", "a", "c"):
        verifier.feed({"type": "TOOL_CALL_START", "toolCallId": name, "toolCallName": "f"})
        verifier.feed({"type": "TOOL_CALL_END", "toolCallId": name})
    verifier.feed(
        {"type": "TOOL_CALL_RESULT", "messageId": "m", "toolCallId": "a", "content": "ok"}
    )
    assert verifier.pending_tool_calls == ["b", "c"]
    verifier.feed({**FINISH, "outcome": {"type": "success", "pendingToolCallIds": ["b", "c"]}})
    assert verifier.phase == "finished"
