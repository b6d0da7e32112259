import base64
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from aguiapp import protocol
from tests.protocol import cases

CASES = [case for case in cases.family("sse") if case["kind"] == "sse"]

# Cases where our decoder reads something else than the official client, and why.
DEPARTURES = {
    "sse-0023": "CRLF ends a line here, as the event-stream standard says",
    "sse-0026": "CR ends a line here, as the event-stream standard says",
    "sse-0096": "a number beyond the range is refused by name, not read as Infinity",
    "sse-0098": "an integer beyond 2^53 stays exact, JavaScript rounds it",
    "sse-0116": "500 levels are deeper than the limit that every Python agrees on",
}


def decode(chunks: list[bytes]) -> tuple[list[protocol.Event], bool]:
    decoder = protocol.SSEDecoder()
    events: list[protocol.Event] = []
    try:
        for chunk in chunks:
            events += decoder.feed(chunk)
        events += decoder.close()
    except protocol.FrameError as problem:
        return events + problem.events, True
    return events, False


@cases.each(CASES, lambda case: case["kind"])
def test_streams_decode_as_officially(case: cases.Case) -> None:
    events, failed = decode([base64.b64decode(chunk) for chunk in case["chunks_base64"]])
    if case["id"] in DEPARTURES:
        assert not cases.same((events, failed), (case["events"], case["error"] is not None))
        return
    assert failed == (case["error"] is not None)
    # A failing frame ends the official reader before it hands over the frames of that read.
    expected = case["events"] if not failed else events[: len(case["events"])]
    assert cases.same(events[: len(expected)], expected)
    assert len(events) >= len(case["events"])


def test_crlf_and_cr_streams_decode() -> None:
    for end in (b"\r\n", b"\r", b"\n"):
        stream = (b'data: {"type":"A"}' + end + end) * 2
        for size in (1, 3, len(stream)):
            pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
            assert decode(pieces) == ([{"type": "A"}, {"type": "A"}], False)


def test_a_frame_beyond_the_limit_is_refused_while_it_grows() -> None:
    decoder = protocol.SSEDecoder(max_frame=100)
    for _ in range(3):
        decoder.feed(b"data: " + b"x" * 20)
    with pytest.raises(protocol.FrameError, match="larger"):
        decoder.feed(b"x" * 30)


def test_good_frames_before_a_bad_one_are_not_lost() -> None:
    with pytest.raises(protocol.FrameError) as caught:
        protocol.SSEDecoder().feed(b'data: {"type":"A"}\n\ndata: [DONE]\n\ndata: {"type":"B"}\n\n')
    assert caught.value.events == [{"type": "A"}]


def test_a_frame_is_one_event_with_its_cursor() -> None:
    event = {"type": "CUSTOM", "name": "n", "value": "a\nb\u2028"}
    text = protocol.dumps(event)
    assert protocol.encode_sse(event, "abcdef-12") == f"id: abcdef-12\ndata: {text}\n\n".encode()
    assert protocol.encode_sse(text) == f"data: {text}\n\n".encode()


@pytest.mark.parametrize(("text", "cursor"), [("{\n}", None), ("{\r}", None), ("{}", "a\nb")])
def test_nothing_can_break_out_of_a_frame(text: str, cursor: str | None) -> None:
    with pytest.raises(protocol.ProtocolError):
        protocol.encode_sse(text, cursor)


TEXTS = st.text(st.characters(codec=None), max_size=8).map(protocol.join_halves)
EVENTS = st.lists(
    st.fixed_dictionaries({"type": st.just("CUSTOM"), "name": TEXTS, "value": TEXTS}), max_size=4
)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_any_cut_of_the_bytes_gives_the_same_events(
    events: list[dict[str, Any]], cuts: list[int], comments: bool
) -> None:
    stream = b"".join(
        (b": keep-alive\n\n" if comments else b"") + protocol.encode_sse(event, f"abc-{n}")
        for n, event in enumerate(events)
    )
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    assert decode(pieces) == (events, False)


def test_bad_frames_are_skipped_and_counted_on_demand() -> None:
    decoder = protocol.SSEDecoder(on_bad_frame="skip")
    events = decoder.feed(
        b'data: {"type":"A"}\n\ndata: [DONE]\n\ndata: {}\n\ndata: {"type":"B"}\n\n'
    )
    assert [event["type"] for event in events] == ["A", "B"]
    assert decoder.feed(b"data: NaN") == []
    assert decoder.close() == []
    assert decoder.skipped == 3


def test_a_frame_that_is_too_large_is_never_skipped() -> None:
    decoder = protocol.SSEDecoder(on_bad_frame="skip", max_frame=20)
    with pytest.raises(protocol.FrameError, match="larger"):
        decoder.feed(b"data: " + b"x" * 30)
