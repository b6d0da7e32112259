"""Judging a stream that somebody saved: as JSON lines, SSE, one JSON document, or protobuf."""

import json
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from aguiapp.protocol.check import Pipeline
from aguiapp.protocol.events import Event, ProtocolError
from aguiapp.protocol.jsontext import JSONTextError, dumps, loads
from aguiapp.protocol.proto import ProtoDecoder
from aguiapp.protocol.sse import FrameError, SSEDecoder

Action = Literal["check", "fold", "expand"]
ACTIONS: Final[tuple[Action, ...]] = ("check", "fold", "expand")

_SSE: Final = (b"data:", b"id:", b"event:", b"retry:", b":")


class Capture(NamedTuple):
    """The events of a file, and why there are no more, when one cannot be read."""

    events: list[Any]
    broken: ProtocolError | None


class Report(NamedTuple):
    """What to print, and the exit status: 0 legal, 1 refused."""

    text: str
    status: int


def read(data: bytes) -> Capture:
    """Tell by its first bytes what a file holds, and read its events."""
    start = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if data[:1] == b"\0":
        return _decoded(ProtoDecoder(), data)
    if start.startswith(_SSE):
        return _decoded(SSEDecoder(), data)
    try:
        return Capture(_document(loads(data, unique_keys=False)), None)
    except JSONTextError:
        return _lines(data)


def _decoded(decoder: Any, data: bytes) -> Capture:
    events: list[Event] = []
    try:
        events += decoder.feed(data)
        events += decoder.close()
    except FrameError as problem:
        return Capture(events + problem.events, problem)
    return Capture(events, None)


def _document(found: Any) -> list[Any]:
    if isinstance(found, dict) and isinstance(found.get("events"), list):
        return list(found["events"])
    return found if isinstance(found, list) else [found]


def _lines(data: bytes) -> Capture:
    events: list[Any] = []
    for line in data.split(b"\n"):
        if line.strip():
            try:
                events.append(loads(line, unique_keys=False))
            except JSONTextError as problem:
                return Capture(events, problem)
    return Capture(events, None)


def report(action: Action, data: bytes) -> Report:
    """Run the pipeline over a capture and write down what the action asks for.

    `check`: the verdict and every warning, a line each; event numbers count from 1. `expand`:
    the explicit events as JSON lines. `fold`: messages, state and what is open as JSON. Both
    stop at the event that is refused, which a last line names.
    """
    capture, pipeline = read(data), Pipeline()
    explicit: list[Event] = []
    refused = capture.broken
    number = len(capture.events) + 1
    for at, event in enumerate(capture.events, 1):
        try:
            explicit += pipeline.feed(event)
        except ProtocolError as problem:
            refused, number = problem, at
            break
    else:
        if refused is None:
            pipeline.close()
    lines = _WRITERS[action](pipeline, explicit)
    if refused is not None:
        lines.append(f"refused at event {number}: {refused.rule}: {refused.message}")
    elif action == "check":
        lines.append(f"accepted: {len(capture.events)} events")
    return Report("\n".join(lines), 0 if refused is None else 1)


def _warnings(pipeline: Pipeline, explicit: list[Event]) -> list[str]:
    return [
        f"warning at event {(found.index or 0) + 1}: {found.kind}: {found.message}"
        + (f" ({found.path})" if found.path else "")
        for found in pipeline.warnings
    ]


def _explicit(pipeline: Pipeline, explicit: list[Event]) -> list[str]:
    return [dumps(event) for event in explicit]


def _folded(pipeline: Pipeline, explicit: list[Event]) -> list[str]:
    folded = pipeline.fold.snapshot()
    view = {
        "messages": folded.messages,
        "state": folded.state,
        "open": [{"kind": item.kind, "id": item.id} for item in folded.open_items],
        "pendingToolCallIds": folded.pending_tool_calls,
        "interrupts": folded.interrupts,
    }
    return [json.dumps(view, indent=2)]


_WRITERS: Final[dict[str, Callable[[Pipeline, list[Event]], list[str]]]] = {
    "check": _warnings,
    "expand": _explicit,
    "fold": _folded,
}
