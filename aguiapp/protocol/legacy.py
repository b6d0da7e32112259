"""Retired shapes of AG-UI 0.0.x, translated to 1.0 before anything judges them."""

from collections.abc import Callable
from typing import Any, Final

from aguiapp.protocol.events import Event, Finding
from aguiapp.protocol.schema import MEDIA_KINDS

# event type -> optional members that older producers wrote as null
_NULLS: Final[dict[str, tuple[str, ...]]] = {
    "RUN_FINISHED": ("result", "outcome"),
    "SUBAGENT_FINISHED": ("result",),
    "TOOL_CALL_START": ("parentMessageId",),
    "TOOL_CALL_CHUNK": ("parentMessageId",),
}
_CARRIERS: Final = frozenset({"RUN_STARTED", "MESSAGES_SNAPSHOT"})
_THINKING: Final[dict[str, str]] = {
    "THINKING_START": "REASONING_START",
    "THINKING_END": "REASONING_END",
    "THINKING_TEXT_MESSAGE_START": "REASONING_MESSAGE_START",
    "THINKING_TEXT_MESSAGE_CONTENT": "REASONING_MESSAGE_CONTENT",
    "THINKING_TEXT_MESSAGE_END": "REASONING_MESSAGE_END",
}
# Every type that feed() must look at more closely than its rawEvent.
_TOUCHED: Final = frozenset({*_NULLS, *_CARRIERS, *_THINKING})


class Upgrader:
    """Translates retired event shapes; new ids come from the caller."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._span: str | None = None
        self._message: str | None = None
        self.warnings: list[Finding] = []

    def feed(self, event: Any) -> list[Any]:
        """Return the event as AG-UI 1.0 writes it: the same object when it already is."""
        if not isinstance(event, dict):
            return [event]
        kind = event.get("type")
        if isinstance(kind, str) and kind in _TOUCHED:
            event = self._translate(kind, event)
        if "rawEvent" in event and event["rawEvent"] is None:
            event = self._without(event, "rawEvent")
        return [event]

    def drain(self) -> list[Finding]:
        """Hand over the findings and forget them."""
        found, self.warnings = self.warnings, []
        return found

    def _translate(self, kind: Any, event: Event) -> Event:
        if kind in _THINKING:
            return self._thinking(kind, event)
        for field in _NULLS.get(kind, ()):
            if field in event and event[field] is None:
                event = self._without(event, field)
        if kind in _CARRIERS:
            return self._carrier(kind, event)
        return event

    def _without(self, event: Event, field: str) -> Event:
        self._note(f"{field}: null was left out", field)
        return {key: value for key, value in event.items() if key != field}

    def _note(self, message: str, path: str = "") -> None:
        self.warnings.append(Finding("compat", message, path))

    def _thinking(self, kind: str, event: Event) -> Event:
        modern = {key: value for key, value in event.items() if key != "title"}
        modern["type"] = _THINKING[kind]
        self._note(f"{kind} became {modern['type']}", "type")
        if "title" in event:
            self._note("the title of a thinking span is lost", "title")
        if kind in ("THINKING_START", "THINKING_END"):
            modern["messageId"] = self._span_id(kind)
        else:
            modern["messageId"] = self._message_id(kind)
        if kind == "THINKING_TEXT_MESSAGE_START":
            modern["role"] = "reasoning"
        return modern

    def _span_id(self, kind: str) -> str:
        if kind == "THINKING_START" or self._span is None:
            self._span = self._new_id()
        name = self._span
        if kind == "THINKING_END":
            self._span = None
        return name

    def _message_id(self, kind: str) -> str:
        if kind == "THINKING_TEXT_MESSAGE_START" or self._message is None:
            if self._message is None and kind != "THINKING_TEXT_MESSAGE_START":
                self._note(f"{kind} without an opener got a new id", "messageId")
            self._message = self._new_id()
        name = self._message
        if kind == "THINKING_TEXT_MESSAGE_END":
            self._message = None
        return name

    def _carrier(self, kind: str, event: Event) -> Event:
        if kind == "RUN_STARTED":
            return self._within(event, "input", upgrade_input)
        return self._within(event, "messages", _messages)

    def _within(
        self, event: Event, field: str, upgrade: Callable[[Any, str, list[Finding]], Any]
    ) -> Event:
        if field not in event:
            return event
        value = upgrade(event[field], field, self.warnings)
        return event if value is event[field] else {**event, field: value}


def upgrade_input(value: Any, path: str, notes: list[Finding]) -> Any:
    """Translate what older clients put into a run input; the same object when nothing is old."""
    if not isinstance(value, dict):
        return value
    changed = dict(value)
    if value.get("forwardedProps", "") is None:
        _left_out(notes, path, "forwardedProps")
        del changed["forwardedProps"]
    if value.get("state", "") is None:
        # A null state means an absent one, which the official schema says without a word.
        del changed["state"]
    prefix = f"{path}." if path else ""
    if "messages" in value:
        changed["messages"] = _messages(value["messages"], f"{prefix}messages", notes)
    for field, member in (("tools", "parameters"), ("resume", "payload")):
        if field in value:
            changed[field] = _drop_nulls(value[field], member, f"{prefix}{field}", notes)
    same = changed.keys() == value.keys() and all(changed[key] is value[key] for key in value)
    return value if same else changed


def _left_out(notes: list[Finding], path: str, field: str) -> None:
    where = f"{path}.{field}" if path else field
    notes.append(Finding("compat", f"{field}: null was left out", where))


def _each(
    values: Any,
    path: str,
    notes: list[Finding],
    upgrade: Callable[[Any, str, list[Finding]], Any],
) -> Any:
    if not isinstance(values, list):
        return values
    upgraded = [upgrade(value, f"{path}.{n}", notes) for n, value in enumerate(values)]
    unchanged = all(new is old for new, old in zip(upgraded, values, strict=True))
    return values if unchanged else upgraded


def _drop_nulls(values: Any, member: str, path: str, notes: list[Finding]) -> Any:
    def upgrade(value: Any, where: str, notes: list[Finding]) -> Any:
        if not isinstance(value, dict) or value.get(member, "") is not None:
            return value
        _left_out(notes, where, member)
        return {key: item for key, item in value.items() if key != member}

    return _each(values, path, notes, upgrade)


def _messages(values: Any, path: str, notes: list[Finding]) -> Any:
    return _each(values, path, notes, _message)


def _message(value: Any, path: str, notes: list[Finding]) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get("content"), list):
        return value
    content = _parts(value["content"], f"{path}.content", notes)
    return value if content is value["content"] else {**value, "content": content}


def _parts(values: Any, path: str, notes: list[Finding]) -> Any:
    upgraded = _each(values, path, notes, _part)
    if upgraded is values:
        return values
    # A producer in transition sent each file twice; the translated twin goes.
    return [
        part
        for n, part in enumerate(upgraded)
        if part is values[n] or part not in values[:n] + values[n + 1 :]
    ]


def _part(value: Any, path: str, notes: list[Finding]) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind == "binary":
        return _binary(value, path, notes)
    if kind in MEDIA_KINDS and value.get("metadata", "") is None:
        _left_out(notes, path, "metadata")
        return {key: item for key, item in value.items() if key != "metadata"}
    return value


def _binary(value: dict[str, Any], path: str, notes: list[Finding]) -> Any:
    notes.append(Finding("compat", "a binary part is a retired shape", path))
    mime = value.get("mimeType")
    if not isinstance(mime, str):
        return value
    name = "data" if value.get("data") else "url"
    found = value.get(name)
    if not isinstance(found, str) or not found:
        notes.append(Finding("compat", "a binary part without data or url stays as it is", path))
        return value
    family = mime.split("/", 1)[0]
    part: dict[str, Any] = {
        "type": family if family in ("image", "audio", "video") else "document",
        "source": {"type": name, "value": found, "mimeType": mime},
    }
    if "filename" in value:
        part["metadata"] = {"filename": value["filename"]}
    return part
