"""What stages do with events that nobody judged before them."""

from __future__ import annotations

from typing import Any

import pytest

from aguiapp import protocol
from aguiapp.protocol.opened import Opened
from aguiapp.protocol.owners import Owners
from aguiapp.protocol.trace import RunTrace

START = {"type": "RUN_STARTED", "threadId": "t", "runId": "r"}


def test_what_leaves_no_trace_is_passed_over() -> None:
    trace, opened, owners = RunTrace(), Opened(), Owners()
    before = trace.dump()
    for follow in (trace.follow, opened.track, owners.follow):
        follow({"type": "CUSTOM", "name": "n", "value": 1})
    assert (trace.dump(), opened.items()) == (before, [])
    assert owners.dump() == before["owners"]


@pytest.mark.parametrize(
    ("event", "rule"),
    [
        ({"type": "SUBAGENT_STARTED", "subagentRunId": "s"}, "VERIFY-28"),
        ({"type": "SUBAGENT_STARTED", "subagentRunId": "s", "name": 1}, "VERIFY-28"),
        (
            {"type": "SUBAGENT_STARTED", "subagentRunId": "s", "name": "n", "description": None},
            "VERIFY-08",
        ),
        ({"type": "SUBAGENT_FINISHED", "subagentRunId": "s", "outcome": []}, "VERIFY-08"),
        (
            {
                "type": "SUBAGENT_FINISHED",
                "subagentRunId": "s",
                "outcome": {"type": "suspended", "interruptIds": [1]},
            },
            "VERIFY-08",
        ),
        ({"type": "SUBAGENT_ERROR", "subagentRunId": "s"}, "VERIFY-29"),
        ({"type": "CUSTOM", "name": "n", "value": 1, "subagentRunId": None}, "VERIFY-07"),
        (
            {
                "type": "MESSAGES_SNAPSHOT",
                "messages": [{"id": "m", "role": "user", "subagentRunId": None}],
            },
            "VERIFY-07",
        ),
        ({**START, "runId": "r2", "input": {"messages": []}}, "VERIFY-04"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["type"],
)
def test_a_verifier_alone_judges_producers_of_this_process(event: Any, rule: str) -> None:
    verifier = protocol.Verifier()
    verifier.feed(START)
    with pytest.raises(protocol.ProtocolError) as caught:
        verifier.feed(event)
    assert caught.value.rule == rule


def test_findings_wait_until_they_are_drained() -> None:
    fold = protocol.Fold()
    fold.feed({"type": "TOOL_CALL_END", "toolCallId": "c"})
    assert [finding.kind for finding in fold.warnings] == ["target_not_found"]
    assert fold.drain() == [protocol.Finding("target_not_found", "no tool call 'c'")]
    assert fold.warnings == []


def test_an_event_that_fights_back_is_malformed() -> None:
    class Hostile(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            raise KeyError("no")

    verdict = protocol.check([START, Hostile()])
    assert (verdict.error_index, verdict.rule) == (1, "malformed")


def test_an_activity_is_found_by_its_id_and_nothing_else_is() -> None:
    fold = protocol.Fold(messages=[{"id": "u", "role": "user", "content": "x"}])
    fold.feed(
        {"type": "ACTIVITY_SNAPSHOT", "messageId": "a", "activityType": "p", "content": {"n": 1}}
    )
    found = fold.activity("a")
    assert found is not None
    assert found["content"] == {"n": 1}
    assert (fold.activity("u"), fold.activity("none")) == (None, None)


def test_a_join_names_no_call_where_no_message_is_left() -> None:
    tag = {"toolCallId": "c", "subagentRunId": "s"}
    before: list[protocol.Event] = [
        START,
        {"type": "TOOL_CALL_START", "toolCallName": "f", **tag},
        {"type": "TOOL_CALL_END", **tag},
        {"type": "MESSAGES_SNAPSHOT", "messages": []},
    ]
    prologue = protocol.join(protocol.fold(before), START)
    assert protocol.check(prologue).accepts
    assert [event.get("input") for event in prologue if event["type"] == "RUN_STARTED"] == [
        None
    ] * 2
