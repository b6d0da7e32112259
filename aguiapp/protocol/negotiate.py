"""Which representation of a run a request asks for."""

import re
from typing import Final, Literal, NamedTuple

EVENT_STREAM: Final = "text/event-stream"
PROTO: Final = "application/vnd.ag-ui.event+proto"
DOCUMENT: Final = "application/json"

_QUALITY = re.compile(r"(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?|\.\d{1,3})")


class Range(NamedTuple):
    """One media range of an Accept header; `bare` when q is its only parameter."""

    name: str
    quality: float
    bare: bool


def parse_accept(accept: str | None) -> list[Range]:
    """Read an Accept header leniently; ranges that cannot be read are left out."""
    ranges = []
    for element in (accept or "").split(","):
        name, *parameters = (part.strip() for part in element.split(";"))
        quality: float | None = 1.0
        bare = True
        for parameter in filter(None, parameters):
            key, _, value = parameter.partition("=")
            if key.lower() == "q":
                quality = float(value) if _QUALITY.fullmatch(value) else None
                break
            bare = False
        if name and quality is not None:
            ranges.append(Range(name.lower(), quality, bare))
    return ranges


def negotiate(accept: str | None, *, binary: bool = True) -> Literal["sse", "proto", "json"]:
    """SSE, unless protobuf was named and is wanted no less, or only a JSON document was named.

    A wildcard never selects anything but SSE: most HTTP libraries send one. `binary` says
    whether protobuf is on offer.
    """
    ranges = [found for found in parse_accept(accept) if found.quality > 0]
    named = max((r.quality for r in ranges if r.name == PROTO and r.bare), default=0.0)
    if binary and named and named >= _stream_quality(ranges):
        return "proto"
    wanted = {found.name for found in ranges}
    if DOCUMENT in wanted and not wanted & {EVENT_STREAM, "text/*", PROTO}:
        return "json"
    return "sse"


def _stream_quality(ranges: list[Range]) -> float:
    """What the header thinks of SSE; the most specific range speaks (RFC 9110, 12.5.1)."""
    for name in (EVENT_STREAM, "text/*", "*/*"):
        for found in ranges:
            if found.name == name:
                return found.quality
    return 0.0
