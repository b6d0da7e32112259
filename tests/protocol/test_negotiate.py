import pytest

from aguiapp import protocol
from tests.protocol import cases

PROTO = "application/vnd.ag-ui.event+proto"

# The official encoder answers protobuf whenever a wildcard or the type admits it. The binary
# form is not offered here yet and is never chosen by a wildcard; every such header gets SSE.
JSON_DOCUMENT = {"application/json"}


@cases.each(cases.family("negotiate"), lambda case: case["content_type"])
def test_official_headers_get_an_event_stream(case: cases.Case) -> None:
    expected = "json" if case["accept"] in JSON_DOCUMENT else "sse"
    assert protocol.negotiate(case["accept"]) == expected


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
        f"application/json, {PROTO}",
        "application/jsonx",
        ";;;,=,q",
    ],
)
def test_everything_else_gets_the_stream(accept: str | None) -> None:
    assert protocol.negotiate(accept) == "sse"
