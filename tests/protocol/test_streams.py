from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings

from aguiapp import protocol
from tests.protocol.streams import Stream, generate, legal_streams

SEEDS = 300
# Every turn that the streams are to take, apart from metadata on each type.
TURNS = {
    *("outcome absent", "outcome success", "outcome interrupt", "outcome cancelled"),
    *("error", "error in mid-run", "late error", "opening error", "truncated", "resumed"),
    *("echo of known ids", "echo of a new message", "named pending calls", "attributed"),
    *("reopened text", "reopened call", "tool_renamed", "pair over two deltas"),
    *("call under a parent", "no parent", "parent_not_assistant"),
    *("result before end", "repeated result", "result of an unknown call", "result in parts"),
    *("span closed before its message", "reasoning outside a span"),
    *("state None", "state False", "state 0", "state ''", "state_patch_failed"),
    *(f"patch {op}" for op in ("add", "remove", "replace", "move", "copy", "test")),
    *("reordered snapshot", "snapshot removes an open message", "activity types owned"),
    *(
        f"activity replace={replace} on {target}"
        for replace in (None, True, False)
        for target in ("nothing", "activity", "another message")
    ),
    *("activity delta", "activity delta without activity", "activity_patch_failed"),
    *("id_is_activity", "id_is_not_activity", "target_not_found"),
    *("encrypted message known", "encrypted message unknown"),
    *("encrypted tool-call known", "encrypted tool-call unknown"),
    *("one step name, two owners", "nested subagent", "subagent of a closed parent"),
    *("closed subagent speaks", "unannounced subagent", "subagent of an earlier run"),
}
CHUNK_TURNS = {"chunk found by its lane", "chunk of a subagent"}


@cache
def streams(*, chunks: bool) -> list[Stream]:
    return [generate(seed, 60, chunks=chunks) for seed in range(SEEDS)]


@pytest.mark.parametrize("chunks", [False, True])
def test_every_stream_is_legal_also_for_a_strict_reader(chunks: bool) -> None:
    for seed, stream in enumerate(streams(chunks=chunks)):
        verdict = protocol.check(stream.events)
        assert verdict.accepts, (seed, verdict)
        expander, strict = protocol.Expander(), protocol.Verifier(strict=True)
        for event in stream.events:
            enforced = protocol.enforce(event)
            assert (enforced.event, list(enforced.warnings)) == (event, [])
            for explicit in expander.feed(event):
                strict.feed(explicit)


def test_every_event_type_and_every_turn_occurs() -> None:
    explicit = streams(chunks=False)
    types = Counter(kind for stream in explicit for kind in {e["type"] for e in stream.events})
    assert set(types) == protocol.TYPES - protocol.CHUNKS
    assert min(types.values()) >= 20
    turns = {f"metadata on {kind}" for kind in types} | TURNS
    seen = Counter(feature for stream in explicit for feature in stream.features)
    assert {turn for turn in turns if seen[turn] < 2} == set()
    chunked = streams(chunks=True)
    assert {e["type"] for stream in chunked for e in stream.events} == protocol.TYPES
    assert {feature for stream in chunked for feature in stream.features} >= CHUNK_TURNS


def test_a_seed_is_a_stream_and_runs_can_be_counted() -> None:
    assert generate(7, 40) == generate(7, 40)
    assert len({protocol.dumps(generate(seed).events) for seed in range(50)}) == 50
    for runs in (1, 2, 5):
        kinds = [event["type"] for event in generate(3, 40, runs=runs).events]
        assert kinds.count("RUN_STARTED") == runs


@settings(max_examples=40, deadline=None)
@given(legal_streams(chunks=True))
def test_what_hypothesis_chooses_is_legal_too(stream: Stream) -> None:
    assert protocol.check(stream.events).accepts
