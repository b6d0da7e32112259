import pytest

from aguiapp import protocol
from tests.protocol import cases

PROTO = "application/vnd.ag-ui.event+proto"

# Where the official encoder answers something else than is answered here, and what it answers.
WILDCARDS = {
    "*/*",
    "application/*",
    "APPLICATION/*",
    "*/vnd.ag-ui.event+proto",
    "\u00e9/\u00e9, */*",
}
DEPARTURES = {
    **dict.fromkeys(WILDCARDS, "sse"),
    "application/*;q=0.2, text/event-stream;q=0.9": "sse",
    "application/json": "json",
}


def official(case: cases.Case) -> str:
    return "proto" if case["content_type"] == PROTO else "sse"


@cases.each(cases.family("negotiate"), lambda case: case["content_type"])
def test_official_headers(case: cases.Case) -> None:
    assert protocol.negotiate(case["accept"]) == DEPARTURES.get(case["accept"], official(case))


@cases.each(cases.family("negotiate"), lambda case: case["content_type"])
def test_without_the_package_there_is_no_protobuf(case: cases.Case) -> None:
    expected = "json" if case["accept"] == "application/json" else "sse"
    assert protocol.negotiate(case["accept"], binary=False) == expected


def test_departures_are_departures() -> None:
    rows = {case["accept"]: official(case) for case in cases.family("negotiate")}
    assert all(rows[accept] != answer for accept, answer in DEPARTURES.items())


@pytest.mark.parametrize(
    ("accept", "answer"),
    [
        (f"text/event-stream, {PROTO}", "proto"),
        (f"text/event-stream;q=0.5, {PROTO};q=0.5", "proto"),
        (f"text/event-stream, {PROTO};q=0.9", "sse"),
        (f"text/event-stream;q=0.9, {PROTO}", "proto"),
        (f"text/event-stream;q=0, {PROTO};q=0.1", "proto"),
        (f"*/*, {PROTO};q=0.9", "sse"),
        (f"*/*;q=0.1, {PROTO};q=0.9", "proto"),
        (f"text/*;q=0.5, */*, {PROTO};q=0.6", "proto"),
        (f"application/json, {PROTO}", "proto"),
        (f"application/json, {PROTO};q=0", "json"),
        (f"{PROTO};charset=utf-8", "sse"),
    ],
)
def test_protobuf_when_it_is_named_and_wanted_no_less(accept: str, answer: str) -> None:
    assert protocol.negotiate(accept) == answer


@pytest.mark.parametrize(
    "accept",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/json, */*",
        "application/json, text/plain, */*",
        "application/json;q=0.1",
        "application/json, text/event-stream;q=0",
        "text/html, application/json",
    ],
)
def test_json_named_without_a_stream_type_gets_a_document(accept: str) -> None:
    assert protocol.negotiate(accept) == "json"


@pytest.mark.parametrize(
    "accept",
    [
        None,
        "",
        "*/*",
        "application/*",
        "text/*",
        "text/html",
        "application/json;q=0",
        "application/json, text/event-stream",
        "application/json, text/*",
        "application/jsonx",
        ";;;,=,q",
    ],
)
def test_everything_else_gets_the_stream(accept: str | None) -> None:
    assert protocol.negotiate(accept) == "sse"
