"""What every SUBAGENT event owes, checked again for producers inside this process."""

from typing import Any, Final

from aguiapp.protocol.events import Event, ProtocolError

_OPTIONAL: Final = {
    "SUBAGENT_STARTED": (
        "description",
        "parentSubagentRunId",
        "parentToolCallId",
        "parentMessageId",
    ),
    "SUBAGENT_FINISHED": ("outcome",),
    "SUBAGENT_ERROR": ("code",),
}

_REQUIRED: Final = {
    "SUBAGENT_STARTED": ("subagentRunId", "name"),
    "SUBAGENT_FINISHED": ("subagentRunId",),
    "SUBAGENT_ERROR": ("subagentRunId", "message"),
}


def subagent_name(event: Event) -> str:
    """Check what every SUBAGENT event owes, and return whom it is about."""
    kind = event["type"]
    for field in _OPTIONAL[kind]:
        if field in event and event[field] is None:
            raise ProtocolError("VERIFY-08", f"{kind} with {field} null: leave it out")
    if "outcome" in event:
        _subagent_outcome(kind, event["outcome"])
    rule = "VERIFY-28" if kind == "SUBAGENT_STARTED" else "VERIFY-29"
    for field in _REQUIRED[kind]:
        if not isinstance(event.get(field), str):
            raise ProtocolError(rule, f"{kind} without {field}")
    return str(event["subagentRunId"])


def _subagent_outcome(kind: str, outcome: Any) -> None:
    if not isinstance(outcome, dict) or outcome.get("type") not in ("success", "suspended"):
        raise ProtocolError("VERIFY-08", f"{kind} with an outcome that is no subagent outcome")
    named = outcome.get("interruptIds", ())
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise ProtocolError("VERIFY-08", f"{kind} with interruptIds that are not strings")
