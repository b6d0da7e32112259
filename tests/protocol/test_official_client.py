"""The fold against the official client itself, on streams that nobody wrote down."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from aguiapp import protocol
from aguiapp.protocol import Event
from tests.protocol import cases, official
from tests.protocol.streams import generate
from tests.protocol.test_properties import spoil

pytestmark = pytest.mark.node

LEGAL, SPOILT = 2000, 500
TOLD = ("outcome", "pendingToolCallIds")


def departures(stream: cases.Case) -> set[str]:
    """Ids of messages that differ from the client's for a reason.

    Where a snapshot restates an id while several messages of that id are held, the client keeps
    one object in several places, and what is written to one of them appears in all. Here they
    are copies, also because a fold must survive being stored.
    """
    client = cases.Client(stream)
    found: set[str] = set()
    feed = client.fold.feed

    def look(event: Event) -> None:
        if event["type"] == "MESSAGES_SNAPSHOT":
            held = Counter(message["id"] for message in client.fold.snapshot().messages)
            found.update(one["id"] for one in event["messages"] if held[one["id"]] > 1)
        feed(event)

    client.fold.feed = look  # type: ignore[method-assign]
    client.run(stream["events"])
    return found


def agree(stream: cases.Case, theirs: cases.Case) -> None:
    """Assert that both end in the same place, at the same event."""
    ours = cases.Client(stream)
    assert ours.run(stream["events"]) == theirs["error_index"], theirs["error"]
    snapshot = ours.fold.snapshot()
    assert cases.same(snapshot.state, theirs["state"])
    assert cases.same(snapshot.interrupts, theirs["pendingInterrupts"])
    assert ours.runs == [{key: run[key] for key in TOLD if key in run} for run in theirs["runs"]]
    mine, other = snapshot.messages, theirs["messages"]
    assert [one["id"] for one in mine] == [one["id"] for one in other]
    if not cases.same(mine, other):
        departed = departures(stream)
        for one, two in zip(mine, other, strict=True):
            assert one["id"] in departed or cases.same(one, two), (one, two)


def compare(node: str, folder: Path, streams: list[cases.Case]) -> list[cases.Case]:
    results = official.fold(node, streams, folder)
    for number, (stream, theirs) in enumerate(zip(streams, results, strict=True)):
        with cases.named({"id": number, "note": protocol.dumps(stream)[:5000]}):
            agree(stream, theirs)
    return results


def streams(count: int) -> list[cases.Case]:
    made = [generate(seed, 40, chunks=bool(seed % 2)) for seed in range(count)]
    return [{"initial": one.initial, "events": one.events} for one in made]


def test_legal_streams_fold_as_officially(node: str, tmp_path: Path) -> None:
    results = compare(node, tmp_path, streams(LEGAL))
    assert [result["error"] for result in results if result["error"]] == []


def test_spoilt_streams_are_refused_at_the_same_event(node: str, tmp_path: Path) -> None:
    """What is no object does not get this far: transports refuse it, both here and there."""
    spoilt = []
    for seed, stream in enumerate(streams(SPOILT)):
        events = spoil(Random(seed), stream["events"], huge=False)
        if all(isinstance(event, dict) for event in events):
            spoilt.append({**stream, "events": events})
    results = compare(node, tmp_path, spoilt)
    refused = sum(result["error"] is not None for result in results)
    assert SPOILT / 4 < refused < SPOILT


USER = {"id": "c", "role": "user", "content": "hi"}
START = {"type": "RUN_STARTED", "threadId": "t1", "runId": "r1"}
CALL = {"type": "TOOL_CALL_START", "toolCallId": "c", "toolCallName": "f", "subagentRunId": "s"}


def test_a_host_that_shares_its_id_has_no_owner(node: str, tmp_path: Path) -> None:
    stream = {"initial": {"messages": [USER], "state": {}}, "events": [START, CALL]}
    (theirs,) = official.fold(node, [stream], tmp_path)
    assert protocol.fold([START, CALL], messages=[USER]).messages == theirs["messages"]
