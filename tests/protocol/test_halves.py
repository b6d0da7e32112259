from typing import Any

from hypothesis import given, settings, strategies as st

from aguiapp import protocol

START = {"type": "RUN_STARTED", "threadId": "t1", "runId": "r1"}


def content(delta: str, name: str = "m") -> protocol.Event:
    return {"type": "TEXT_MESSAGE_CONTENT", "messageId": name, "delta": delta}


def joined(events: list[protocol.Event]) -> list[protocol.Event]:
    halves = protocol.Halves()
    return [stored for event in events for stored in halves.feed(event)]


def test_a_cut_character_is_whole_in_the_second_delta() -> None:
    assert joined([content("a\ud83d"), content("\ude00b")]) == [
        content("a"),
        content("\U0001f600b"),
    ]


def test_a_half_that_stays_alone_is_given_out_before_the_end() -> None:
    end = {"type": "TEXT_MESSAGE_END", "messageId": "m"}
    failed = {"type": "RUN_ERROR", "message": "boom"}
    for closer in (end, failed):
        assert joined([content("a\ud83d"), closer]) == [content("a"), content("\ud83d"), closer]


def test_other_items_keep_their_own_halves_and_whole_events_stay_the_same_object() -> None:
    whole = content("plain", "n")
    stored = joined([content("\ud83d", "m"), whole, content("\ude00", "m")])
    assert stored == [content("", "m"), whole, content("\U0001f600", "m")]
    assert stored[1] is whole


DELTAS = st.lists(
    st.tuples(st.sampled_from(["m", "n"]), st.text("a\ud83d\ude00\U0001f600", max_size=3)),
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(DELTAS, st.sampled_from(["TEXT_MESSAGE_END", "RUN_ERROR"]))
def test_the_fold_is_the_same_with_and_without(deltas: list[tuple[str, str]], last: str) -> None:
    events: list[Any] = [
        START,
        *({"type": "TEXT_MESSAGE_START", "messageId": name} for name in ("m", "n")),
        *(content(delta, name) for name, delta in deltas),
    ]
    if last == "TEXT_MESSAGE_END":
        events += [{"type": last, "messageId": name} for name in ("m", "n")]
    events.append({"type": "RUN_ERROR", "message": "the end"})
    assert protocol.fold(joined(events)) == protocol.fold(events)


def test_what_is_no_text_passes_a_half_that_waits() -> None:
    halves = protocol.Halves()
    half = {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m", "delta": "\ud83d"}
    custom = {"type": "CUSTOM", "name": "n", "value": 1}
    assert halves.feed(half) == [{**half, "delta": ""}]
    assert halves.feed(custom) == [custom]
    assert halves.feed({**half, "delta": "\ude00"}) == [{**half, "delta": "\U0001f600"}]
