"""The harness itself: what is no case is refused by name, and every expectation can fail."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import corpus, expectation, relaxed, runner

START = {"type": "RUN_STARTED", "threadId": "t", "runId": "r"}
FINISH = {"type": "RUN_FINISHED", "threadId": "t", "runId": "r"}
TEXT = [
    {"type": "TEXT_MESSAGE_START", "messageId": "m-1", "role": "assistant"},
    {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m-1", "delta": "a", "later": None},
    {"type": "TEXT_MESSAGE_END", "messageId": "m-1"},
]
STATE = {"type": "STATE_SNAPSHOT", "snapshot": {"n": 1, "on": True, "none": None, "list": [{}]}}
CALL = [
    {"type": "TOOL_CALL_START", "toolCallId": "c-1", "toolCallName": "look"},
    {"type": "TOOL_CALL_END", "toolCallId": "c-1"},
]
ASK = {"type": "interrupt", "interrupts": [{"id": "i-1", "reason": "ask"}]}
WHOLE = [START, *TEXT, STATE, *CALL, FINISH]
STRAY = {"type": "TEXT_MESSAGE_END", "messageId": "m-9"}


def case(stream: list[Any], expect: dict[str, Any], *, own: bool = False, **more: Any) -> Any:
    value = {"name": "x", "area": "a", "description": "d", "stream": stream, "expect": expect}
    return corpus.parse({**value, **more}, "x.json", "x", own=own)


def seen(stream: list[Any], **given: Any) -> runner.Seen:
    return runner.run(case(stream, {"messageCount": 0}, input=given))


GOOD: list[tuple[str, Any, list[Any], Any]] = [
    # key, what holds, of which stream, what does not hold
    ("outcome", "completed", WHOLE, "failed"),
    ("outcome", "failed", [START, STRAY], "completed"),
    ("errorContains", "m-9", [START, STRAY], "m-8"),
    ("errorContains", "", WHOLE, "m-9"),
    ("errorWords", ["m-9"], [START, STRAY], ["m-9", "m-8"]),
    ("errorIndex", 1, [START, STRAY], 2),
    ("rule", "VERIFY-10", [START, STRAY], "VERIFY-15"),
    ("runError", True, [{"type": "RUN_ERROR", "message": "no quota"}], False),
    ("runError", "quota", [{"type": "RUN_ERROR", "message": "no quota"}], "boom"),
    ("runError", False, WHOLE, True),
    ("eventTypes", ["RUN_STARTED", "RUN_FINISHED"], [START, FINISH], ["RUN_STARTED"]),
    ("eventTypesAbsent", ["CUSTOM"], WHOLE, ["CUSTOM", "RUN_FINISHED"]),
    ("eventPaths", {"4.snapshot.list.0": {}, "4.snapshot.none": None}, WHOLE, {"4.snapshot": {}}),
    ("eventPaths", {"4.snapshot.n": 1}, WHOLE, {"4.snapshot.n": True}),
    ("eventPaths", {"4.snapshot.on": True}, WHOLE, {"4.snapshot.on": 1}),
    ("eventPaths", {"0.runId": "r"}, WHOLE, {"0.parentRunId": None}),
    ("eventAbsentPaths", ["2.later", "4.snapshot.list.1", "9"], WHOLE, ["4.snapshot.none"]),
    ("eventAbsentPaths", ["0.keys", "4.snapshot.list.-1"], WHOLE, ["4.snapshot.list.0"]),
    ("warnings", ["/later", "TEXT_MESSAGE_CONTENT"], WHOLE, ["/later", "/sooner"]),
    ("warnings", [], [START, FINISH], [""]),
    ("noWarnings", True, [START, FINISH], None),
    ("messageCount", 2, WHOLE, 1),
    ("messages", [{"id": "m-1", "content": "a"}, {}], WHOLE, [{"id": "m-1"}]),
    ("messages", [{}, {"toolCalls": [{"id": "c-1"}]}], WHOLE, [{}, {"toolCalls": []}]),
    ("messageAbsentPaths", ["1.content"], WHOLE, ["0.content"]),
    ("state", {"n": 1}, WHOLE, {"n": True}),
    ("state", {}, WHOLE, []),
    ("state", {"none": None}, WHOLE, {"nothing": None}),
    ("state", None, [START, {"type": "STATE_SNAPSHOT", "snapshot": None}, FINISH], 0),
    ("state", 0, [START, {"type": "STATE_SNAPSHOT", "snapshot": 0}, FINISH], False),
    ("stateAbsentPaths", ["m"], WHOLE, ["none"]),
    ("interrupts", [{"id": "i-1"}], [START, {**FINISH, "outcome": ASK}], []),
    ("pendingToolCalls", ["c-1"], WHOLE, []),
    ("request", {"threadId": "t", "runId": "r", "messages": []}, WHOLE, {"threadId": "r"}),
    ("requestAbsentPaths", ["tools"], WHOLE, ["messages"]),
]


@pytest.mark.parametrize(("key", "holds", "stream", "fails"), GOOD)
def test_every_expectation_holds_and_can_fail(
    key: str, holds: Any, stream: list[Any], fails: Any
) -> None:
    assert expectation.mismatches({key: holds}, seen(stream)) == {}
    if key == "noWarnings":
        assert key in expectation.mismatches({key: True}, seen(WHOLE))
    else:
        assert key in expectation.mismatches({key: fails}, seen(stream))


def test_every_key_a_case_may_use_is_compared_and_tried() -> None:
    tried = {key for key, *_ in GOOD}
    assert tried == expectation.KEYS
    assert corpus.EXPECT | {"errorWords"} == expectation.KEYS


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"name": "y"}, "name is 'y'"),
    ({"stream": {}}, "stream must be an array"),
    ({"expect": {"outcome": "fine"}}, "expect.outcome must be"),
    ({"expect": {"outcome": "completed"}}, "nothing beside the outcome"),
    ({"expect": {"messageCount": True}}, "expect.messageCount must be a count"),
    ({"expect": {"noWarnings": 1}}, "expect.noWarnings must be true or false"),
    ({"expect": {"messageCuont": 1}}, "unknown key expect.messageCuont"),
    ({"expect": {"rule": "VERIFY-01"}}, "unknown key expect.rule"),
    ({"rules": ["VERIFY-01"]}, "unknown key rules"),
    ({"client": {"maxVersion": "1"}}, "unknown key client.maxVersion"),
    ({"client": {"strict": True}}, "unknown key client.strict"),
    ({"input": {"mesages": []}}, "unknown key input.mesages"),
    ({"input": {"messages": {}}}, "input.messages must be an array"),
    ({"expectOverrides": {"dotnet": {"messageCount": 1}}}, "dotnet.intentional is missing"),
    (
        {"expectOverrides": {"dotnet": {"intentional": "x", "messageCuont": 1}}},
        "unknown key expectOverrides.dotnet.messageCuont",
    ),
]


@pytest.mark.parametrize(("change", "said"), MALFORMED)
def test_a_malformed_case_is_refused_by_file_and_key(change: dict[str, Any], said: str) -> None:
    with pytest.raises(corpus.CaseError, match=r"x\.json: ") as caught:
        case(**{"stream": WHOLE, "expect": {"messageCount": 1}, **change})
    assert said in str(caught.value)


@pytest.mark.parametrize("key", ["name", "area", "description", "stream", "expect"])
def test_a_missing_key_is_named(key: str) -> None:
    value = {"name": "x", "area": "a", "description": "d", "stream": [], "expect": {"state": 1}}
    del value[key]
    with pytest.raises(corpus.CaseError, match=f"{key} is missing"):
        corpus.parse(value, "x.json", "x", own=False)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(corpus.CaseError, match=r"x\.json: not JSON"):
        corpus.read(path)


def test_overrides_replace_keys_of_our_lanes_alone() -> None:
    overrides = {
        "dotnet": {"intentional": "a gap", "messageCount": 9},
        "typescript": {"intentional": "more is known", "eventTypes": ["RUN_ERROR"]},
    }
    found = case(WHOLE, {"messageCount": 2, "state": None}, expectOverrides=overrides)
    assert found.expect == {"messageCount": 2, "state": None, "eventTypes": ["RUN_ERROR"]}


def test_a_foreign_folder_is_judged_like_our_own(tmp_path: Path) -> None:
    value = {
        "name": "x",
        "area": "streaming",
        "description": "d",
        "specPage": "/spec/x#y",
        "kill": "k",
        "stream": [{**START, "protocolVersion": "1.1"}, STRAY],
        "expect": {"outcome": "failed", "errorContains": "No active text message 'm-9' found"},
    }
    path = tmp_path / "streaming" / "x.json"
    path.parent.mkdir()
    path.write_text(json.dumps(value))
    assert corpus.files(tmp_path) == [path]
    noted = len(relaxed.NOTES)
    found = relaxed.relax(corpus.read(path))
    assert found.expect == {"outcome": "failed", "errorWords": ["m-9"]}
    assert found.stream[0]["protocolVersion"] == "1.0"
    assert expectation.mismatches(found.expect, runner.run(found)) == {}
    assert [(name, key) for name, key, _ in relaxed.NOTES[noted:]] == [
        ("x", "errorContains"),
        ("x", "stream"),
    ]
    del relaxed.NOTES[noted:]


def test_a_foreign_expectation_is_relaxed_no_further_than_stated() -> None:
    noted = len(relaxed.NOTES)
    found = relaxed.relax(
        case(
            WHOLE,
            {
                "warnings": ["Dropped '/later' of TEXT_MESSAGE_CONTENT", "something"],
                "noWarnings": False,
                "request": {"protocolVersion": "1.1", "messages": []},
                "requestAbsentPaths": ["protocolVersion", "tools"],
                "eventPaths": {"0.protocolVersion": "1.1", "0.runId": "1.1"},
                "messageCount": 2,
            },
        )
    )
    del relaxed.NOTES[noted:]
    assert found.expect == {
        "warnings": ["", "/later", "TEXT_MESSAGE_CONTENT"],
        "noWarnings": False,
        "request": {"messages": []},
        "requestAbsentPaths": ["tools"],
        "eventPaths": {"0.protocolVersion": "1.0", "0.runId": "1.1"},
        "messageCount": 2,
    }


def test_a_pinned_peer_and_an_admitted_gap_are_relaxed_by_name() -> None:
    noted = len(relaxed.NOTES)
    pinned = corpus.Case(
        name="era-0-0-39-flattens-content",
        stream=WHOLE,
        expect={"outcome": "completed", "warnings": ["x"], "request": {"messages": []}},
        own=False,
        client={"maxProtocolVersion": "0.0.39"},
    )
    assert relaxed.relax(pinned).expect == {"outcome": "completed"}
    gap = corpus.Case(
        name="truncated-run-reported-as-completed",
        stream=[START, *TEXT],
        expect={"outcome": "completed", "messageCount": 1},
        own=False,
    )
    told = relaxed.relax(gap)
    assert told.expect == {"outcome": "failed", "messageCount": 1}
    assert expectation.mismatches(told.expect, runner.run(told)) == {}
    assert len(relaxed.NOTES) == noted + 3
    del relaxed.NOTES[noted:]


def test_history_and_threads_come_from_the_case() -> None:
    history = [{"id": "u-1", "role": "user", "content": "hi"}]
    found = seen([START, FINISH], messages=history, state={"n": 1})
    assert (found.messages, found.state) == (history, {"n": 1})
    assert found.request == {"threadId": "t", "runId": "r", "messages": history, "state": {"n": 1}}
    assert case([], {"state": 1}).first_run() == {"threadId": "thread", "runId": "run"}


def test_an_input_that_cannot_be_sent_is_a_failure_before_the_stream() -> None:
    found = seen([START, FINISH], messages=[{"id": "u-1", "role": "user", "content": 5}])
    assert (found.outcome, found.index, found.events) == ("failed", None, [])
