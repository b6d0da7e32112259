"""One stored event as a line of the list: never an error, whatever was stored."""

from __future__ import annotations

import json
from typing import Any

from django.utils.translation import gettext as _

from aguiapp import protocol
from aguiapp.admin import cells
from aguiapp.store import reads

SUMMARY_CHARACTERS = 120
#: Fields that tell most about an event, the best first.
TELLING = (
    "delta",
    "patch",
    "toolCallName",
    "stepName",
    "message",
    "content",
    "snapshot",
    "messages",
    "name",
    "outcome",
    "event",
    "activityType",
    "messageId",
    "toolCallId",
    "entityId",
    "subagentRunId",
    "runId",
)


def parsed(payload: str) -> protocol.Event | None:
    """The event as the fold takes it, or None where the fold skips it."""
    try:
        return reads.readable(payload)
    except (ValueError, protocol.ProtocolError):
        return None


def type_name(code: int) -> str:
    """The type that the row was stored under."""
    return protocol.TYPE_NAMES.get(code) or _("type %(code)d") % {"code": code}


def line(row: reads.Stored) -> dict[str, Any]:
    """The row for the event list."""
    event = parsed(row.payload)
    text = row.payload if event is None else summary(event)
    return {
        "seq": row.seq,
        "type": type_name(row.type),
        "created": row.created.isoformat(),
        "summary": cells.printable(text[:SUMMARY_CHARACTERS]),
        "size": len(row.payload.encode()),
        "valid": event is not None,
    }


def summary(event: protocol.Event) -> str:
    """What the event says, in some words."""
    return next((said(event[field]) for field in TELLING if event.get(field) is not None), "")


def said(value: Any) -> str:
    """A text as it is, a patch by its operations, an outcome by its type, else its JSON."""
    match value:
        case str():
            return value
        case [{"op": str()}, *_]:
            return ", ".join(f"{each.get('op')} {each.get('path')}" for each in value)
        case {"type": str(kind)}:
            return kind
    return json.dumps(value, ensure_ascii=False)
