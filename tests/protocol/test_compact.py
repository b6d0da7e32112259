"""Compaction: fewer events, the same fold, a stream that stays legal."""

import copy

from hypothesis import given, settings

from aguiapp import protocol
from tests.protocol.cases import Case, Client, each, family, same
from tests.protocol.streams import Stream, legal_streams

CASES = family("compact")
# Events the official `compactEvents` moves, joins or strips, and ours leaves as they are.
STAY = {
    "006 009 033 034 036 039 041 042 044 045 046 047 049 053 054 055 056": "order within a run",
    "010": "a snapshot of the messages amid a message",
    "011": "a message that never ended, before RUN_ERROR",
    "022": "the time of a joined delta",
    "023": "the owner of a delta",
    "027": "a stream no client takes",
}


def played(case: Case, events: list[protocol.Event]) -> tuple[object, ...]:
    client = Client({"initial": {"messages": [], "state": {}, **case.get("initial", {})}})
    refused = client.run(events)
    folded = client.fold.snapshot()
    return None if refused is None else events[refused], folded.messages, folded.state


@each(CASES, key=lambda case: case["id"])
def test_the_fold_is_that_of_the_whole_stream(case: Case) -> None:
    compacted = protocol.compact(case["events"])
    assert len(compacted) <= len(case["events"])
    # A stream that is refused ends elsewhere, when what follows the refusal was joined.
    if played(case, case["events"])[0] is None:
        assert played(case, compacted) == played(case, case["events"])


def test_what_the_official_compaction_does_otherwise() -> None:
    differ = {
        case["id"].removeprefix("compact-")
        for case in CASES
        if not same(protocol.compact(case["events"]), case["compacted"])
    }
    assert differ == set(" ".join(STAY).split())


@settings(max_examples=150, deadline=None)
@given(legal_streams(60))
def test_any_legal_stream_folds_the_same(stream: Stream) -> None:
    before = copy.deepcopy(stream.events)
    compacted = protocol.compact(stream.events)
    assert stream.events == before
    assert protocol.check(compacted).accepts
    whole, short = (protocol.fold(e, **stream.initial) for e in (stream.events, compacted))
    assert short[:2] == whole[:2]
    assert short.pending_tool_calls == whole.pending_tool_calls
    assert short.interrupts == whole.interrupts
    assert [item[:3] for item in short.open_items] == [item[:3] for item in whole.open_items]
    assert protocol.compact(compacted) == compacted


def test_deltas_of_items_that_grow_side_by_side_are_joined() -> None:
    start = {"type": "RUN_STARTED", "threadId": "t", "runId": "r"}
    opened = [{"type": "TEXT_MESSAGE_START", "messageId": name} for name in "ab"]
    deltas = [
        {"type": "TEXT_MESSAGE_CONTENT", "messageId": name, "delta": delta, "timestamp": at}
        for at, (name, delta) in enumerate(
            [("a", "\ud83d"), ("b", "1"), ("a", "\ude00"), ("b", "2")]
        )
    ]
    assert protocol.compact([start, *opened, *deltas])[3:] == [
        {**deltas[0], "delta": "\U0001f600"},
        {**deltas[1], "delta": "12"},
    ]


def test_a_hundred_thousand_deltas_take_linear_time() -> None:
    # Quadratic joining would take minutes.
    delta = {"type": "TEXT_MESSAGE_CONTENT", "messageId": "a", "delta": "x" * 20}
    found = protocol.compact([delta] * 100_000)
    assert [len(event["delta"]) for event in found] == [2_000_000]
