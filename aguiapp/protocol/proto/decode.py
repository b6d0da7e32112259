"""Messages to events. Only the form is judged here; what it means is for enforcement."""

from collections.abc import Iterable
from typing import Any, Final

from aguiapp.protocol.events import Event, Finding
from aguiapp.protocol.jsontext import MAX_DEPTH
from aguiapp.protocol.proto.descriptor import (
    INTEGER,
    MESSAGE,
    OPERATION,
    STRUCT,
    TEXT,
    VALUE,
    Layout,
    Member,
    Schema,
    schema,
)
from aguiapp.protocol.proto.envelope import open_envelope
from aguiapp.protocol.proto.values import UNSET, read_struct, read_value
from aguiapp.protocol.proto.wire import bad
from aguiapp.protocol.shapes import SAFE_INTEGER

Object = dict[str, Any]

_PARTS_ROLES: Final = {"user", "tool"}
_TEXT_ROLES: Final = {"developer", "system", "assistant", "reasoning"}


def decode_proto(data: bytes, findings: list[Finding] | None = None) -> Event | None:
    """Read one unframed `Event` message; raise FrameError for bytes that are not one.

    `decode_proto(encode_proto(event)) == event`, but for the losses that the package names. An
    event of a later version has no name here and is None. What was dropped is noted in `findings`.
    """
    noted = [] if findings is None else findings
    known = schema()
    found = open_envelope(data, known.by_number)
    if found is None:
        said = "an event of a later protocol version, dropped"
        noted.append(Finding("drop_event", said, "type"))
        return None
    arm, payload = found
    try:
        message = arm.layout.make.FromString(payload)
    except known.error:
        raise bad("not a message of this protocol") from None
    if not message.HasField("base_event"):
        raise bad(f"{arm.type} without its base event")
    base = message.base_event
    if base.type != arm.code:
        raise bad(f"the envelope carries {arm.type} but the base event is of another type")
    reader = _Reader(known, noted)
    event: Event = {"type": arm.type}
    event |= reader.read(message, arm.layout, MAX_DEPTH - 1, "")
    event |= reader.read(base, known.layouts["BaseEvent"], MAX_DEPTH - 1, "")
    return event


class _Reader:
    """Turns messages into JSON; `room` is how many levels may still open."""

    __slots__ = ("findings", "known")

    def __init__(self, known: Schema, findings: list[Finding]) -> None:
        self.known = known
        self.findings = findings

    def read(self, message: Any, layout: Layout, room: int, path: str) -> Object:
        """Return the members that are set, and those that JSON requires."""
        found: Object = dict(layout.defaults)
        for key in layout.lists:
            found[key] = []
        for descriptor, value in message.ListFields():
            member = layout.by_descriptor.get(descriptor)
            if member is None:
                continue
            if member.kind == TEXT:
                found[member.key] = value.decode("utf-8", "replace")
            else:
                read = self._member(member, value, room, path)
                if read is not UNSET:
                    found[member.key] = read
        rest = _BY_HAND.get(layout.name)
        if rest is not None:
            rest(self, found, message, room, path)
        return found

    def _member(self, member: Member, value: Any, room: int, path: str) -> Any:
        kind = member.kind
        if kind == INTEGER and not -SAFE_INTEGER <= value <= SAFE_INTEGER:
            raise bad(f"{path}{member.key} is beyond 2^53")
        if kind == VALUE:
            return _value(value, room)
        if kind == STRUCT:
            return _struct(value, room)
        if kind == MESSAGE:
            return self._message(member, value, room, f"{path}{member.key}")
        return self.known.operations.get(value, str(value)) if kind == OPERATION else value

    def _message(self, member: Member, value: Any, room: int, path: str) -> Any:
        layout = self.known.layouts[member.message]
        if not member.many:
            return self.read(value, layout, room - 1, f"{path}.")
        return [
            self.read(item, layout, room - 2, f"{path}.{position}.")
            for position, item in enumerate(value)
        ]

    def message(self, found: Object, message: Any, room: int, path: str) -> None:
        """Find the content where the role has it; two forms of it are refused."""
        role = found["role"]
        has_text = message.HasField("content")
        parts, activity = message.content_parts, message.activity_content
        forms = has_text + bool(parts) + bool(activity)
        wrong_form = (
            (role in _TEXT_ROLES and (parts or activity))
            or (role in _PARTS_ROLES and activity)
            or (role == "activity" and (parts or has_text))
        )
        if forms > 1 or wrong_form:
            raise bad(f"{path}content has a form that the role does not have, or two")
        if activity:
            found["content"] = _struct(activity, room)
        elif forms or role in _PARTS_ROLES:
            self.content(found, message, room, path)

    def content(self, found: Object, message: Any, room: int, path: str) -> None:
        """Find content that is text or parts; no text and no parts are no parts."""
        path = f"{path}content"
        if not message.HasField("content"):
            found["content"] = self._parts(message.content_parts, room - 1, path)
        elif message.content_parts:
            raise bad(f"{path} is both text and parts")
        else:
            found["content"] = message.content.decode("utf-8", "replace")

    def _parts(self, parts: Any, room: int, path: str) -> list[Object]:
        found = []
        for position, part in enumerate(parts):
            read = self._part(part, room - 1, f"{path}.{position}")
            if read is None:
                said = "a content part of a later protocol version, removed"
                self.findings.append(Finding("strip", said, f"{path}.{position}"))
            else:
                found.append(read)
        return found

    def _part(self, part: Any, room: int, path: str) -> Object | None:
        arm = self._arm([part], "InputContent", path)
        if arm is None:
            return None
        member, message = arm
        found = {"type": member.key}
        found |= self.read(message, self.known.layouts[member.message], room, f"{path}.")
        return None if found.get("source") is UNSET else found

    def source(self, found: Object, message: Any, room: int, path: str) -> None:
        """Find where a media part has its bytes: UNSET when that is nowhere known."""
        if message.source:
            arm = self._arm(message.source, "InputContentSource", f"{path}source")
            found["source"] = UNSET
            if arm is not None:
                member, source = arm
                layout = self.known.layouts[member.message]
                read = self.read(source, layout, room - 1, f"{path}source.")
                found["source"] = {"type": member.key, **read}

    def _arm(self, occurrences: Any, name: str, path: str) -> tuple[Member, Any] | None:
        """Merge what may come in pieces: each has one arm, the last kind of arm counts."""
        found: tuple[Member, Any] | None = None
        for occurrence in occurrences:
            arms = occurrence.ListFields()
            if len(arms) > 1:
                raise bad(f"{path} is of two types")
            for descriptor, message in arms:
                member = self.known.layouts[name].by_descriptor[descriptor]
                if found is not None and found[0] is member:
                    found[1].MergeFrom(message)
                else:
                    found = member, message
        return found

    def run_outcome(self, found: Object, message: Any, room: int, path: str) -> None:
        """Rebuild the outcome of a run from its name and what came beside it."""
        layout = self.known.layouts["Interrupt"]
        interrupts = [
            self.read(item, layout, room - 3, f"{path}outcome.interrupts.{position}.")
            for position, item in enumerate(message.interrupts)
        ]
        payload: Object = {}
        if interrupts or message.outcome == b"interrupt":
            payload["interrupts"] = interrupts
        _outcome(found, message, payload, "pendingToolCallIds", message.pending_tool_call_ids)

    def subagent_outcome(self, found: Object, message: Any, room: int, path: str) -> None:
        """Rebuild the outcome of a subagent."""
        _outcome(found, message, {}, "interruptIds", message.interrupt_ids)


_BY_HAND: Final = {
    "Message": _Reader.message,
    "ToolCallResultEvent": _Reader.content,
    "RunFinishedEvent": _Reader.run_outcome,
    "SubagentFinishedEvent": _Reader.subagent_outcome,
    "ImageInputPart": _Reader.source,
    "AudioInputPart": _Reader.source,
    "VideoInputPart": _Reader.source,
    "DocumentInputPart": _Reader.source,
}


def _value(pieces: Iterable[bytes], room: int) -> Any:
    # A message that comes in pieces is the pieces joined.
    data = b"".join(pieces)
    return read_value(data, 0, len(data), room)


def _struct(pieces: Iterable[bytes], room: int) -> Object:
    data = b"".join(pieces)
    return read_struct(data, 0, len(data), room)


def _outcome(found: Object, message: Any, payload: Object, key: str, names: Any) -> None:
    if names:
        payload[key] = [name.decode("utf-8", "replace") for name in names]
    if message.outcome:
        found["outcome"] = {"type": message.outcome.decode("utf-8", "replace"), **payload}
    else:
        # Belongs to no outcome: left where enforcement sees it.
        found |= payload
