"""What holds for every stream, legal or spoilt."""

import copy
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from aguiapp import protocol
from aguiapp.protocol import Event
from tests.protocol.streams import Stream, legal_streams
from tests.protocol.values import LEAVES, happens, json_value

START: Event = {"type": "RUN_STARTED", "threadId": "t", "runId": "r"}
CALL: Event = {"type": "TOOL_CALL_START", "toolCallId": "c", "toolCallName": "f"}
CALLED: Event = {"type": "TOOL_CALL_END", "toolCallId": "c"}
RESULT: Event = {"type": "TOOL_CALL_RESULT", "messageId": "o", "toolCallId": "c", "content": ""}
CHOOSERS = st.randoms(use_true_random=False)


def deep(levels: int) -> Any:
    value: Any = None
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


HUGE: tuple[Any, ...] = (2**64, 10**400, 1.5e308, "x" * 10_000, [[]] * 1000, deep(150), deep(5000))


def through_json(snapshot: protocol.Snapshot) -> protocol.Snapshot:
    return protocol.Snapshot(*protocol.loads(protocol.dumps(snapshot)))


def explicit(stream: Stream) -> list[Event]:
    expander = protocol.Expander()
    return [one for event in stream.events for one in expander.feed(event)]


def cuts(choose: Random, length: int) -> set[int]:
    return {choose.randrange(length + 1) for _ in range(3)}


# -- spoilt streams ---------------------------------------------------------------------


def containers(events: list[Any]) -> list[Any]:
    """Every container with something in it that is not too deep for an ordinary walk."""
    found: list[Any] = []
    pending: list[tuple[Any, int]] = [(events, 0)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, dict | list) and value and depth < 20:
            found.append(value)
            members = value.values() if isinstance(value, dict) else value
            pending += [(member, depth + 1) for member in members]
    return found


def spoil(choose: Random, events: list[Event], *, huge: bool = True) -> list[Any]:
    """Drop, rename, empty or retype a member somewhere, or move whole events about."""
    spoilt: list[Any] = copy.deepcopy(events)
    for _ in range(1 + choose.randrange(3)):
        if happens(choose, 4) and len(spoilt) > 1:
            at = choose.randrange(len(spoilt) - 1)
            spoilt[at], spoilt[at + 1] = spoilt[at + 1], spoilt[at]
        elif happens(choose, 8):
            spoilt.insert(choose.randrange(len(spoilt) + 1), json_value(choose))
        elif found := containers(spoilt):
            _spoil_member(choose, choose.choice(found), HUGE if huge else LEAVES)
    return spoilt


def _spoil_member(choose: Random, container: Any, huge: tuple[Any, ...]) -> None:
    key = choose.choice(list(container)) if isinstance(container, dict) else None
    key = choose.randrange(len(container)) if key is None else key
    kind = choose.choice(("drop", "rename", "null", "retype", "huge"))
    if kind == "drop":
        del container[key]
    elif kind == "rename" and isinstance(container, dict):
        container[choose.choice(("x", "messageId", "metadata", "content"))] = container.pop(key)
    elif kind == "huge":
        container[key] = choose.choice(huge)
    else:
        container[key] = json_value(choose) if kind == "retype" else None


@settings(max_examples=150, deadline=None)
@given(legal_streams(20, chunks=True), CHOOSERS)
def test_a_spoilt_stream_gets_a_verdict_that_says_why(stream: Stream, choose: Random) -> None:
    spoilt = spoil(choose, stream.events)
    verdict = protocol.check(spoilt)
    assert verdict.accepts == (verdict.error_index is None) == (verdict.rule is None)
    assert "cannot be read" not in (verdict.message or "")


@settings(max_examples=100, deadline=None)
@given(legal_streams(20, chunks=True), CHOOSERS)
def test_what_is_refused_changes_nothing(stream: Stream, choose: Random) -> None:
    expander, verifier = protocol.Expander(), protocol.Verifier()
    for event in spoil(choose, stream.events):
        lanes, held = expander.snapshot(), verifier.snapshot()
        try:
            enforced = protocol.enforce(event).event
            expanded = [] if enforced is None else expander.feed(enforced)
        except protocol.ProtocolError:
            assert expander.snapshot() == lanes
            continue
        for one in expanded:
            held = verifier.snapshot()
            try:
                verifier.feed(one)
            except protocol.ProtocolError:
                assert verifier.snapshot() == held


# -- going on from anywhere -------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(legal_streams(25, chunks=True), CHOOSERS)
def test_expander_and_verifier_go_on_from_any_snapshot(stream: Stream, choose: Random) -> None:
    cut = cuts(choose, len(stream.events))
    expanders = [protocol.Expander()]
    verifiers = [protocol.Verifier()]
    for index, event in enumerate(stream.events):
        if index in cut:
            expander, verifier = protocol.Expander(), protocol.Verifier()
            expander.restore(protocol.loads(protocol.dumps(expanders[0].snapshot())))
            verifier.restore(protocol.loads(protocol.dumps(verifiers[0].snapshot())))
            expanders.append(expander)
            verifiers.append(verifier)
        outputs = [one.feed(event) for one in expanders]
        assert all(output == outputs[0] for output in outputs)
        for verifier in verifiers:
            for one in outputs[0]:
                verifier.feed(one)
            assert verifier.snapshot() == verifiers[0].snapshot()
            assert verifier.pending_tool_calls == verifiers[0].pending_tool_calls
    for expander in expanders:
        assert expander.snapshot() == expanders[0].snapshot()


@settings(max_examples=80, deadline=None)
@given(legal_streams(25, chunks=True), CHOOSERS, st.booleans())
def test_a_fold_goes_on_from_any_snapshot(stream: Stream, choose: Random, stored: bool) -> None:
    events = explicit(stream)
    cut = cuts(choose, len(events))
    folds = [protocol.Fold(**stream.initial)]
    for index, event in enumerate(events):
        if index in cut:
            saved = folds[0].snapshot()
            folds.append(protocol.Fold.from_snapshot(through_json(saved) if stored else saved))
        for fold in folds:
            fold.feed(event)
        if index % 3 == 0 or index == len(events) - 1:
            whole = folds[0].snapshot()
            assert all(fold.snapshot() == whole for fold in folds)


@pytest.mark.parametrize("before", [[CALL, CALLED, RESULT], [RESULT]])
def test_a_call_that_was_answered_before_the_snapshot_stays_answered(before: list[Event]) -> None:
    fold = protocol.Fold()
    for event in [START, *before]:
        fold.feed(event)
    restored = protocol.Fold.from_snapshot(through_json(fold.snapshot()))
    restored.feed(CALL)
    assert restored.snapshot().pending_tool_calls == []


def test_pending_calls_that_the_end_names_survive_a_snapshot_and_end_with_the_run() -> None:
    fold = protocol.Fold()
    named = {"type": "success", "pendingToolCallIds": ["elsewhere"]}
    for event in (START, CALL, CALLED, {**START, "type": "RUN_FINISHED", "outcome": named}):
        fold.feed(event)
    restored = protocol.Fold.from_snapshot(through_json(fold.snapshot()))
    assert restored.snapshot().pending_tool_calls == ["elsewhere"]
    restored.feed(START)
    assert restored.snapshot().pending_tool_calls == []


@settings(max_examples=60, deadline=None)
@given(legal_streams(25))
def test_a_fold_changes_neither_events_nor_what_it_was_given(stream: Stream) -> None:
    before = copy.deepcopy(stream)
    fold = protocol.Fold(**stream.initial)
    taken = []
    for event in stream.events:
        fold.feed(event)
        snapshot = fold.snapshot()
        taken.append((snapshot, protocol.dumps(snapshot)))
    assert stream == before
    for snapshot, text in taken:
        assert protocol.dumps(snapshot) == text
    assert protocol.fold(stream.events, **stream.initial) == fold.snapshot()


# -- forms ------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(legal_streams(25, chunks=True), CHOOSERS)
def test_frames_decode_to_their_events_however_they_are_cut(stream: Stream, choose: Random) -> None:
    cursors = [choose.choice((None, f"abcdef-{n}")) for n, _ in enumerate(stream.events)]
    frames = map(protocol.encode_sse, stream.events, cursors)
    wire = b": comment\n\n" + b"".join(frames)
    decoder = protocol.SSEDecoder()
    decoded: list[Event] = []
    while wire:
        size = 1 + choose.randrange(choose.choice((1, 30, 3000)))
        decoded += decoder.feed(wire[:size])
        wire = wire[size:]
    assert decoded + decoder.close() == stream.events


@settings(max_examples=60, deadline=None)
@given(legal_streams(25, chunks=True))
def test_expansion_is_done_once(stream: Stream) -> None:
    once = explicit(stream)
    assert not {event["type"] for event in once} & protocol.CHUNKS
    again = protocol.Expander()
    for event in once:
        (passed,) = again.feed(event)
        assert passed is event
    assert again.snapshot() == []
    assert protocol.check(once).accepts
