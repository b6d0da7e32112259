import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from aguiapp import protocol

START = {"type": "RUN_STARTED", "threadId": "t1", "runId": "r1"}
FINISH = {"type": "RUN_FINISHED", "threadId": "t1", "runId": "r1"}


def test_a_verdict_names_the_rule_the_event_and_what_was_noted() -> None:
    verdict = protocol.check(
        [START, {"type": "FUTURE"}, {"type": "TEXT_MESSAGE_END", "messageId": "m"}]
    )
    assert not verdict.accepts
    assert (verdict.error_index, verdict.rule) == (2, "VERIFY-10")
    assert verdict.message == "TEXT_MESSAGE_END for text message 'm', which is not open"
    assert [(found.kind, found.index) for found in verdict.warnings] == [("drop_event", 1)]


def test_a_good_stream_has_no_error() -> None:
    assert protocol.check([START, FINISH]) == protocol.Verdict(True)
    assert protocol.check([]).accepts


def test_warnings_of_every_stage_carry_their_event() -> None:
    verdict = protocol.check(
        [
            START,
            {"type": "STATE_DELTA", "delta": [{"op": "remove", "path": "/x"}], "rawEvent": None},
            {**FINISH, "runId": "other"},
        ]
    )
    assert verdict.accepts
    assert [(found.kind, found.index) for found in verdict.warnings] == [
        ("compat", 1),
        ("state_patch_failed", 1),
        ("VERIFY-41", 2),
    ]


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
FIELDS = [
    *("messageId", "toolCallId", "toolCallName", "delta", "role", "content", "messages", "input"),
    *("outcome", "patch", "snapshot", "subagentRunId", "metadata", "rawEvent", "replace", "name"),
]
EVENTS = st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=5).flatmap(
    lambda fields: st.sampled_from(sorted(protocol.TYPES)).map(
        lambda kind: {**fields, "type": kind}
    )
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS | ODD, max_size=6))
def test_any_input_gets_a_verdict_and_never_an_exception(events: list[Any]) -> None:
    for stream in (events, [START, *events]):
        verdict = protocol.check(stream)
        assert verdict.accepts == (verdict.error_index is None)


def test_deep_values_get_a_verdict() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    for event in (
        {"type": "STATE_SNAPSHOT", "snapshot": deep},
        {"type": "STATE_DELTA", "delta": [{"op": "add", "path": "", "value": deep}]},
        {"type": "MESSAGES_SNAPSHOT", "messages": deep},
        {"type": deep},
    ):
        protocol.check([START, event])


FORBIDDEN = {
    *("django", "channels", "asgiref", "asyncio", "time", "threading", "socket", "random"),
    *("datetime", "os", "logging", "uuid"),
}


@pytest.mark.parametrize(
    "path", sorted(Path(protocol.__file__).parent.glob("*.py")), ids=lambda path: path.name
)
def test_the_ground_does_no_io(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] not in FORBIDDEN
            assert not name.startswith("aguiapp") or name.startswith("aguiapp.protocol")
