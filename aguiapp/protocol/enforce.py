"""Enforcement: unknown material is stripped with a finding, malformed material is refused."""

from typing import NamedTuple

from aguiapp.protocol.events import Event, Finding, ProtocolError, text_of
from aguiapp.protocol.schema import EVENTS
from aguiapp.protocol.shapes import DROP, TEXT, Report


class Enforced(NamedTuple):
    """What is left of an event (None: dropped whole) and what was noted on the way."""

    event: Event | None
    warnings: list[Finding]


def enforce(event: Event) -> Enforced:
    """Return the event without unknown parts, the same object when there were none."""
    try:
        kind = event["type"]
        struct = EVENTS[kind]
    except (KeyError, TypeError):
        return _unknown(event)
    fields = struct.fields
    for key, value in event.items():
        if value.__class__ is not str or fields.get(key) is not TEXT:
            return _thorough(event)
    for key in struct.required:
        if key not in event:
            return _thorough(event)
    return Enforced(event, [])


def _thorough(event: Event) -> Enforced:
    report = Report()
    checked = EVENTS[event["type"]].check(event, "", report)
    if report.problems:
        said = "; ".join(f"{path} {message}" for path, message in report.problems[:3])
        raise ProtocolError("malformed", f"{event['type']}: {said}")
    return Enforced(None if checked is DROP else checked, report.findings)


def _unknown(event: object) -> Enforced:
    if not isinstance(event, dict):
        raise ProtocolError("malformed", f"an event is an object, not {text_of(event)}")
    kind = event.get("type")
    if not isinstance(kind, str) or not kind:
        raise ProtocolError("malformed", "the event carries no type")
    return Enforced(None, [Finding("drop_event", f"unknown event type {text_of(kind)}", "type")])
