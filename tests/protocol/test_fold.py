import copy
import json
from typing import Any

from aguiapp import protocol
from tests.protocol import cases

CASES = cases.family("fold")
START = {"type": "RUN_STARTED", "threadId": "t1", "runId": "r1"}
FINISH = {"type": "RUN_FINISHED", "threadId": "t1", "runId": "r1"}
# We also note what the client passes over in silence, as the specification recommends.
QUIET = {
    *("target_not_found", "activity_not_object"),
    *("state_patch_failed", "activity_patch_failed"),
}


def renamed(messages: Any, like: Any) -> Any:
    """Minted ids differ in their number only."""
    return [
        {**mine, "id": theirs["id"]} if str(theirs["id"]).startswith("$minted") else mine
        for mine, theirs in zip(messages, like, strict=True)
    ]


@cases.each(CASES, lambda case: case["group"])
def test_the_fold_equals_the_official_client(case: cases.Case) -> None:
    before = copy.deepcopy((case["initial"], case["events"]))
    client = cases.Client(case)
    assert client.run(case["events"]) == case["error_index"]
    snapshot = client.fold.snapshot()
    final = case["final"]
    assert len(snapshot.messages) == len(final["messages"])
    assert cases.same(renamed(snapshot.messages, final["messages"]), final["messages"])
    assert cases.same(snapshot.state, final["state"])
    assert cases.same(snapshot.interrupts, case["pendingInterrupts"])
    told = ("outcome", "pendingToolCallIds")
    assert client.runs == [{key: run[key] for key in told if key in run} for run in case["runs"]]
    assert (case["initial"], case["events"]) == before


@cases.each(CASES, lambda case: case["group"])
def test_what_the_client_warns_about_is_a_finding(case: cases.Case) -> None:
    client = cases.Client(case)
    client.run(case["events"])
    kinds = [*client.kinds, *(f.kind for f in client.upgrader.drain())]
    kinds += [finding.kind for finding in client.fold.drain()]
    # VERIFY-41 to 45 are not the client's business.
    noted = [finding.kind for finding in client.verifier.drain()]
    kinds += [kind for kind in noted if not kind.startswith("VERIFY")]
    wanted = [warning["kind"] for warning in case.get("warnings", [])]
    assert sorted(set(kinds) - QUIET) == sorted(set(wanted) - QUIET)


def explicit(case: cases.Case) -> list[protocol.Event]:
    client = cases.Client(case)
    seen: list[protocol.Event] = []
    feed = client.fold.feed

    def record(event: protocol.Event) -> None:
        seen.append(event)
        feed(event)

    client.fold.feed = record  # type: ignore[method-assign]
    client.run(case["events"])
    return seen


@cases.each(CASES[::2], lambda case: case["group"])
def test_going_on_from_any_snapshot_ends_in_the_same_place(case: cases.Case) -> None:
    events = explicit(case)
    whole = protocol.fold(events, **case["initial"])
    fold = protocol.Fold(**case["initial"])
    for event in events:
        saved = protocol.Snapshot(*json.loads(json.dumps(fold.snapshot())))
        fold = protocol.Fold.from_snapshot(saved)
        fold.feed(event)
    assert fold.snapshot() == whole


@cases.each(CASES[1::2], lambda case: case["group"])
def test_looking_changes_nothing_and_a_snapshot_stays(case: cases.Case) -> None:
    events = explicit(case)
    watched = protocol.Fold(**case["initial"])
    taken: list[tuple[protocol.Snapshot, str]] = []
    for event in events:
        watched.feed(event)
        snapshot = watched.snapshot()
        taken.append((snapshot, json.dumps(snapshot)))
    for length, (snapshot, text) in enumerate(taken, 1):
        assert json.dumps(snapshot) == text
        if length % 3 == 0:
            assert protocol.fold(events[:length], **case["initial"]) == snapshot


def text(*deltas: str) -> str:
    events: list[protocol.Event] = [START, {"type": "TEXT_MESSAGE_START", "messageId": "m"}]
    events += [
        {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m", "delta": delta} for delta in deltas
    ]
    content = protocol.fold(events).messages[0]["content"]
    assert isinstance(content, str)
    return content


def test_halves_of_a_character_join_over_deltas_and_single_ones_stay() -> None:
    assert text("a\ud83d", "\ude00b") == "a\U0001f600b"
    assert text("\ud83d", "", "\ude00") == "\U0001f600"
    assert text("\ude00", "\ud83d") == "\ude00\ud83d"
    assert text("\ud83d", "x") == "\ud83dx"


def test_a_long_message_costs_its_length_once() -> None:
    fold = protocol.Fold()
    fold.feed({"type": "TEXT_MESSAGE_START", "messageId": "m"})
    for _ in range(50_000):
        fold.feed(
            {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m", "delta": "twenty characters.."}
        )
    assert len(fold.snapshot().messages[0]["content"]) == 950_000


def test_a_failed_delta_keeps_the_state_and_is_noted() -> None:
    fold = protocol.Fold(state={"a": {"b": 1}})
    held = fold.state
    fold.feed(
        {
            "type": "STATE_DELTA",
            "delta": [
                {"op": "replace", "path": "/a/b", "value": 42},
                {"op": "test", "path": "/a/b", "value": "C"},
            ],
        }
    )
    assert fold.state is held
    assert [finding.kind for finding in fold.drain()] == ["state_patch_failed"]
    assert fold.warnings == []


def test_a_copy_bomb_is_stopped_and_named() -> None:
    fold = protocol.Fold(state={"a": [0]})
    bomb = [{"op": "copy", "from": "/a", "path": "/a/-"}] * 40
    fold.feed({"type": "STATE_DELTA", "delta": bomb})
    assert fold.state == {"a": [0]}
    assert [finding.kind for finding in fold.warnings] == ["patch_limit"]


def test_an_activity_that_stops_being_an_object_is_noted() -> None:
    fold = protocol.Fold()
    fold.feed({"type": "ACTIVITY_SNAPSHOT", "messageId": "a", "activityType": "P", "content": {}})
    patch = [{"op": "replace", "path": "", "value": []}]
    fold.feed({"type": "ACTIVITY_DELTA", "messageId": "a", "activityType": "P", "patch": patch})
    assert fold.snapshot().messages[0]["content"] == []
    assert [finding.kind for finding in fold.warnings] == ["activity_not_object"]


def test_known_ids_can_be_asked_for() -> None:
    fold = protocol.Fold(messages=[{"id": "u", "role": "user", "content": "hi"}])
    fold.feed({"type": "TOOL_CALL_START", "toolCallId": "c", "toolCallName": "f"})
    assert fold.has_message("u")
    assert fold.has_message("c")
    assert not fold.has_message("x")
    assert fold.has_tool_call("c")
    assert not fold.has_tool_call("u")


def test_an_encrypted_value_keeps_its_type_and_a_new_one_without_type_loses_it() -> None:
    fold = protocol.Fold(messages=[{"id": "m", "role": "reasoning", "content": ""}])
    value = {"type": "REASONING_ENCRYPTED_VALUE", "subtype": "message", "entityId": "m"}
    fold.feed({**value, "encryptedValue": "opaque==", "encryptedValueType": "v/1"})
    assert fold.snapshot().messages[0]["encryptedValueType"] == "v/1"
    fold.feed({**value, "encryptedValue": "other"})
    assert "encryptedValueType" not in fold.snapshot().messages[0]


def test_open_items_and_pending_calls_follow_the_run() -> None:
    fold = protocol.Fold()
    fold.feed(START)
    fold.feed({"type": "TOOL_CALL_START", "toolCallId": "c", "toolCallName": "f"})
    snapshot = fold.snapshot()
    assert [(item.kind, item.id) for item in snapshot.open_items] == [("tool", "c")]
    assert snapshot.pending_tool_calls == ["c"]
    fold.feed({"type": "TOOL_CALL_END", "toolCallId": "c"})
    fold.feed(FINISH)
    assert fold.snapshot().open_items == []
    assert fold.snapshot().pending_tool_calls == ["c"]
    assert [item.kind for item in snapshot.open_items] == ["tool"]
