"""Events to messages."""

from typing import Any, Final

from aguiapp.protocol.events import Event, Finding, ProtocolError, text_of
from aguiapp.protocol.jsontext import MAX_DEPTH
from aguiapp.protocol.proto.descriptor import (
    FLAG,
    INTEGER,
    MESSAGE,
    OPERATION,
    STRUCT,
    TEXT,
    VALUE,
    Layout,
    Member,
    schema,
)
from aguiapp.protocol.proto.values import write_struct, write_value
from aguiapp.protocol.proto.wire import utf8, varint

# Everywhere else null is the same as nothing and is left out.
_NULL_IS_A_VALUE: Final = {"snapshot", "event", "value"}
_INT64: Final = 2**63


def encode_proto(event: Event, findings: list[Finding] | None = None) -> bytes:
    """Return one `Event` message, unframed.

    Raises ProtocolError for an unknown type, for a known field that is required and missing or
    of the wrong type, and for what is not JSON. A content part of unknown type has no form
    here: it is left out and noted in `findings`.
    """
    known = schema()
    kind = event.get("type")
    arm = known.by_type.get(kind) if isinstance(kind, str) else None
    if arm is None:
        raise ProtocolError("proto", f"unknown event type {text_of(kind)}")
    message = arm.layout.make()
    writer = _Writer(known.layouts, [] if findings is None else findings)
    base = message.base_event
    # Written even when it stays empty: the first type is 0, which is not on the wire.
    base.SetInParent()
    base.type = arm.code
    for member in known.base:
        value = event.get(member.key)
        if value is not None:
            writer.put(base, member, value, MAX_DEPTH - 1, member.key)
    writer.fill(message, arm.layout, event, MAX_DEPTH - 1, "")
    payload: bytes = message.SerializeToString()
    return b"".join((arm.tag, varint(len(payload)), payload))


class _Writer:
    """Fills messages from JSON; `room` is how many levels may still open."""

    __slots__ = ("findings", "layouts")

    def __init__(self, layouts: dict[str, Layout], findings: list[Finding]) -> None:
        self.layouts = layouts
        self.findings = findings

    def fill(self, message: Any, layout: Layout, source: Event, room: int, path: str) -> None:
        """Set the known members of a JSON object; unknown ones have no place on this wire."""
        texts, by_key = layout.texts, layout.by_key
        for key, value in source.items():
            attr = texts.get(key)
            if attr is not None and value.__class__ is str:
                setattr(message, attr, utf8(value))
                continue
            member = by_key.get(key)
            if member is None:
                continue
            if value is not None or key in layout.needed or key in _NULL_IS_A_VALUE:
                self.put(message, member, value, room, f"{path}{key}")
        if not source.keys() >= layout.needed:
            missing = min(layout.needed - source.keys())
            raise ProtocolError("proto", f"{path}{missing} is required")
        rest = _BY_HAND.get(layout.name)
        if rest is not None:
            rest(self, message, source, room, path)

    def put(self, message: Any, member: Member, value: Any, room: int, path: str) -> None:
        """Set one member, whatever it holds."""
        if value.__class__ is int and member.kind == INTEGER and -_INT64 <= value < _INT64:
            setattr(message, member.attr, value)
        elif member.kind == VALUE:
            getattr(message, member.attr).append(write_value(value, room))
        elif member.kind == STRUCT and isinstance(value, dict):
            getattr(message, member.attr).append(write_struct(value, room))
        elif member.kind == MESSAGE:
            target = getattr(message, member.attr)
            if member.many:
                self.each(target, member.message, value, room, path)
            else:
                self.one(target, member.message, value, room, path)
        # As the official encoder: metadata that is no object is not worth the event.
        elif member.key != "metadata":
            setattr(message, member.attr, _scalar(value, member.kind, path))

    def one(self, target: Any, name: str, value: Any, room: int, path: str) -> None:
        """Fill a nested message from what has to be an object."""
        target.SetInParent()
        source = _typed(value, dict, "an object", path)
        self.fill(target, self.layouts[name], source, room - 1, f"{path}.")

    def each(self, target: Any, name: str, value: Any, room: int, path: str) -> None:
        """Fill a repeated message from what has to be an array of objects."""
        for position, item in enumerate(_typed(value, list, "an array", path)):
            self.one(target.add(), name, item, room - 1, f"{path}.{position}")

    def message(self, message: Any, source: Event, room: int, path: str) -> None:
        """Put the content where its role has it: an activity has an object."""
        content = source.get("content")
        if source["role"] == "activity" and not isinstance(content, list):
            content = content if isinstance(content, dict) else {}
            message.activity_content.append(write_struct(content, room))
        else:
            self.content(message, source, room, path)

    def content(self, message: Any, source: Event, room: int, path: str) -> None:
        """Put content that is text or parts."""
        content = source.get("content")
        if isinstance(content, list):
            for position, part in enumerate(content):
                self._part(message.content_parts, part, room - 1, f"{path}content.{position}")
        elif content is not None:
            message.content = _scalar(content, TEXT, f"{path}content")

    def _part(self, target: Any, part: Any, room: int, path: str) -> None:
        part = _from_binary(part) if isinstance(part, dict) else {}
        arm = self._arm("InputContent", part)
        if arm is None:
            said = f"a content part of type {text_of(part.get('type'))} has no form here, left out"
            self.findings.append(Finding("strip", said, path))
        else:
            self.one(getattr(target.add(), arm.attr), arm.message, part, room, path)

    def source(self, message: Any, part: Event, room: int, path: str) -> None:
        """Put where a media part has its bytes; of an unknown kind it is left out."""
        source = part.get("source")
        arm = self._arm("InputContentSource", source) if isinstance(source, dict) else None
        if arm is not None:
            target = getattr(message.source.add(), arm.attr)
            self.one(target, arm.message, source, room, f"{path}source")

    def _arm(self, name: str, value: Event) -> Member | None:
        kind = value.get("type")
        return self.layouts[name].by_key.get(kind) if isinstance(kind, str) else None

    def run_outcome(self, message: Any, event: Event, room: int, path: str) -> None:
        """Flatten the outcome of a run: its name, and what belongs to that name."""
        name, outcome = _outcome(message, event)
        if name == "interrupt":
            interrupts = outcome.get("interrupts", [])
            path = f"{path}outcome.interrupts"
            self.each(message.interrupts, "Interrupt", interrupts, room - 1, path)
        elif name == "success":
            _texts(message.pending_tool_call_ids, outcome, "pendingToolCallIds")

    def subagent_outcome(self, message: Any, event: Event, room: int, path: str) -> None:
        """Flatten the outcome of a subagent."""
        name, outcome = _outcome(message, event)
        if name == "suspended":
            _texts(message.interrupt_ids, outcome, "interruptIds")


_BY_HAND: Final = {
    "Message": _Writer.message,
    "ToolCallResultEvent": _Writer.content,
    "RunFinishedEvent": _Writer.run_outcome,
    "SubagentFinishedEvent": _Writer.subagent_outcome,
    "ImageInputPart": _Writer.source,
    "AudioInputPart": _Writer.source,
    "VideoInputPart": _Writer.source,
    "DocumentInputPart": _Writer.source,
}


def _outcome(message: Any, event: Event) -> tuple[str, dict[str, Any]]:
    outcome = event.get("outcome")
    name = outcome.get("type") if isinstance(outcome, dict) else None
    if not isinstance(outcome, dict) or not isinstance(name, str):
        return "", {}
    message.outcome = utf8(name)
    return name, outcome


def _texts(target: Any, outcome: dict[str, Any], key: str) -> None:
    path = f"outcome.{key}"
    for item in _typed(outcome.get(key, []), list, "an array", path):
        target.append(_scalar(item, TEXT, path))


def _typed(value: Any, wanted: type, name: str, path: str) -> Any:
    if not isinstance(value, wanted):
        raise ProtocolError("proto", f"{path} must be {name}, not {text_of(value)}")
    return value


def _scalar(value: Any, kind: str, path: str) -> Any:
    if kind == TEXT and isinstance(value, str):
        return utf8(value)
    if kind == FLAG and isinstance(value, bool):
        return value
    if kind == INTEGER and _is_int64(value):
        return int(value)
    if kind == OPERATION and isinstance(value, str):
        number = schema().codes.get(value.lower())
        if number is not None:
            return number
    raise ProtocolError("proto", f"{path} must be {kind}, not {text_of(value)}")


def _is_int64(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_INT64 <= value < _INT64 and value == int(value)


def _from_binary(part: dict[str, Any]) -> dict[str, Any]:
    """Turn a part of the retired type "binary" into a document, as the official encoder does."""
    if part.get("type") != "binary":
        return part
    for key, kind in (("data", "data"), ("url", "url"), ("id", "url")):
        if part.get(key):
            return {
                "type": "document",
                "source": {"type": kind, "value": part[key], "mimeType": part.get("mimeType")},
                "metadata": {
                    "legacyBinary": True,
                    **{name: part[name] for name in ("filename", "id") if part.get(name)},
                },
            }
    return part
