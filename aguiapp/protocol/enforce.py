"""Enforcement: unknown material is stripped with a finding, malformed material is refused."""

from collections.abc import Sequence
from typing import NamedTuple

from aguiapp.protocol.events import Event, Finding, ProtocolError, text_of
from aguiapp.protocol.schema import EVENTS
from aguiapp.protocol.shapes import DROP, Report


class Enforced(NamedTuple):
    """What is left of an event (None: dropped whole) and what was noted on the way."""

    event: Event | None
    warnings: Sequence[Finding]


def enforce(event: Event) -> Enforced:
    """Return the event without unknown parts, the same object when there were none."""
    try:
        kind = event["type"]
        struct = EVENTS[kind]
    except (KeyError, TypeError):
        return _unknown(event)
    texts = struct.texts
    for key, value in event.items():
        if value.__class__ is not str or key not in texts:
            return _thorough(event)
    if event.keys() >= struct.needed:
        return Enforced(event, ())
    return _thorough(event)


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
    # The official client drops an event without a type here; transports refuse it before.
    said = f"unknown event type {text_of(event.get('type'))}"
    return Enforced(None, [Finding("drop_event", said, "type")])
