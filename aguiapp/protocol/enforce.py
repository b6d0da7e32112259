"""Enforcement: unknown material is stripped with a finding, malformed material is refused."""

from collections.abc import Sequence
from typing import NamedTuple

from aguiapp.protocol.events import Event, Finding, ProtocolError, text_of
from aguiapp.protocol.schema import EVENTS
from aguiapp.protocol.shapes import DROP, SAFE_INTEGER, Report


class Enforced(NamedTuple):
    """What is left of an event (None: dropped whole) and what was noted on the way."""

    event: Event | None
    warnings: Sequence[Finding]


def conforms(event: Event) -> bool:
    """Whether an event is of plain text and time, and right as it is; nearly every event is.

    Such an event passes Upgrader and enforce() unchanged and may be written with
    `dumps(event, plain=True)`. False means no more than that they have to look.
    """
    kind = event.get("type")
    struct = EVENTS.get(kind) if kind.__class__ is str else None
    if struct is None:
        return False
    texts = struct.texts
    for key, value in event.items():
        if value.__class__ is str:
            if key in texts:
                continue
        elif key == "timestamp" and value.__class__ is int and 0 <= value <= SAFE_INTEGER:
            continue
        return False
    return event.keys() >= struct.needed


def enforce(event: Event) -> Enforced:
    """Return the event without unknown parts, the same object when there were none."""
    if not isinstance(event, dict):
        raise ProtocolError("malformed", f"an event is an object, not {text_of(event)}")
    if conforms(event):
        return Enforced(event, ())
    kind = event.get("type")
    if not isinstance(kind, str) or kind not in EVENTS:
        # The official client drops an event without a type here; transports refuse it before.
        said = f"unknown event type {text_of(kind)}"
        return Enforced(None, [Finding("drop_event", said, "type")])
    return _thorough(event)


def _thorough(event: Event) -> Enforced:
    report = Report()
    checked = EVENTS[event["type"]].check(event, "", report)
    if report.problems:
        said = "; ".join(f"{path} {message}" for path, message in report.problems[:3])
        raise ProtocolError("malformed", f"{event['type']}: {said}")
    return Enforced(None if checked is DROP else checked, report.findings)
