import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings, strategies as st

from aguiapp import protocol
from tests.protocol import cases

Feed = Callable[[Any], list[protocol.Event]]


def expand(feed: Feed, events: list[Any]) -> tuple[list[protocol.Event], int | None]:
    expanded: list[protocol.Event] = []
    for index, event in enumerate(events):
        try:
            expanded += feed(event)
        except protocol.ProtocolError:
            return expanded, index
    return expanded, None


def enforced_feed() -> Feed:
    expander = protocol.Expander()

    def feed(event: Any) -> list[protocol.Event]:
        kept = protocol.enforce(event).event
        return [] if kept is None else expander.feed(kept)

    return feed


@cases.each(cases.family("chunks"), lambda case: case["group"])
def test_chunks_expand_as_officially(case: cases.Case) -> None:
    expected = case if case["enforced_same"] else case["enforced"]
    expanded, index = expand(enforced_feed(), case["events"])
    assert cases.same(expanded, expected["expanded"])
    assert index == expected.get("error_index")
    if case["enforced_same"]:
        assert expand(protocol.Expander().feed, case["events"]) == (expanded, index)


@cases.each(cases.family("chunks"), lambda case: case["group"])
def test_a_snapshot_at_any_point_goes_on_the_same_way(case: cases.Case) -> None:
    expander = protocol.Expander()

    def feed(event: Any) -> list[protocol.Event]:
        nonlocal expander
        resumed = protocol.Expander()
        resumed.restore(json.loads(json.dumps(expander.snapshot())))
        expander = resumed
        return expander.feed(event)

    assert expand(feed, case["events"]) == expand(protocol.Expander().feed, case["events"])


IDS = st.sampled_from(["", "a", "b"])
MAYBE = {
    "messageId": IDS,
    "toolCallId": IDS,
    "toolCallName": IDS,
    "parentMessageId": IDS,
    "delta": st.sampled_from(["", "x"]),
    "role": st.sampled_from(["assistant", "user"]),
    "name": IDS,
    "subagentRunId": IDS,
    "metadata": st.just({"k": 1}),
    "rawEvent": st.just(0),
}
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from([*sorted(protocol.CHUNKS), "RUN_FINISHED", "CUSTOM", "RAW", "?"])},
        optional=MAYBE,
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_any_stream_of_chunks_expands_or_is_refused_and_explicit_events_remain(
    events: list[protocol.Event],
) -> None:
    expanded, _ = expand(protocol.Expander().feed, events)
    assert not [event for event in expanded if event["type"] in protocol.CHUNKS]


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_a_refused_chunk_changes_nothing(events: list[protocol.Event]) -> None:
    expander = protocol.Expander()
    for event in events:
        before = expander.snapshot()
        try:
            expander.feed(event)
        except protocol.ProtocolError:
            assert expander.snapshot() == before
