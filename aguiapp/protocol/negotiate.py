"""Which representation of a run a request asks for."""

import re
from typing import Final, Literal, NamedTuple

EVENT_STREAM: Final = "text/event-stream"
PROTO: Final = "application/vnd.ag-ui.event+proto"
DOCUMENT: Final = "application/json"

_QUALITY = re.compile(r"(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?|\.\d{1,3})")


class Range(NamedTuple):
    """One media range of an Accept header, without parameters other than q."""

    name: str
    quality: float


def parse_accept(accept: str | None) -> list[Range]:
    """Read an Accept header leniently; ranges that cannot be read are left out."""
    ranges = []
    for element in (accept or "").split(","):
        name, *parameters = (part.strip() for part in element.split(";"))
        quality: float | None = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.lower() == "q":
                quality = float(value) if _QUALITY.fullmatch(value) else None
                break
        if name and quality is not None:
            ranges.append(Range(name.lower(), quality))
    return ranges


def negotiate(accept: str | None) -> Literal["sse", "json"]:
    """SSE unless only a JSON document was asked for by name."""
    wanted = {found.name for found in parse_accept(accept) if found.quality > 0}
    if DOCUMENT in wanted and not wanted & {EVENT_STREAM, "text/*", PROTO}:
        return "json"
    return "sse"
