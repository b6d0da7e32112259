"""A character cut in two by an agent's deltas is put together before it is stored.

Half a surrogate pair is legal in JSON, but no UTF-8 wire can carry it raw. A high half at the
end of a delta is held back and leads the item's next delta; it is given out as it is when the
item or the run ends first. The fold is the same with and without this stage.
"""

from typing import Final

from aguiapp.protocol.events import LIFECYCLE, Event
from aguiapp.protocol.transcript import join_halves

_CONTENT: Final = {
    "TEXT_MESSAGE_CONTENT": "messageId",
    "TOOL_CALL_ARGS": "toolCallId",
    "REASONING_MESSAGE_CONTENT": "messageId",
}
# The end of an item -> what its content events are called.
_ENDS: Final = {
    "TEXT_MESSAGE_END": "TEXT_MESSAGE_CONTENT",
    "TOOL_CALL_END": "TOOL_CALL_ARGS",
    "REASONING_MESSAGE_END": "REASONING_MESSAGE_CONTENT",
}
_FLUSH: Final = LIFECYCLE | {"MESSAGES_SNAPSHOT"}


class Halves:
    """Joins cut characters over the deltas of explicit events."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], str] = {}

    def feed(self, event: Event) -> list[Event]:
        """Return the events to store: nearly always the same one."""
        kind = event["type"]
        field = _CONTENT.get(kind)
        if field is not None:
            delta = event["delta"]
            if not self._held and not "\ud800" <= delta[-1:] <= "\udbff":
                return [event]
            return [self._content(event, (kind, event[field]))]
        if not self._held:
            return [event]
        if kind in _ENDS:
            content = _ENDS[kind]
            return [*self._flush((content, event[_CONTENT[content]])), event]
        if kind in _FLUSH:
            return [late for key in tuple(self._held) for late in self._flush(key)] + [event]
        return [event]

    def _content(self, event: Event, key: tuple[str, str]) -> Event:
        delta = join_halves(self._held.pop(key, "") + event["delta"])
        if "\ud800" <= delta[-1:] <= "\udbff":
            self._held[key] = delta[-1]
            delta = delta[:-1]
        return event if delta == event["delta"] else {**event, "delta": delta}

    def _flush(self, key: tuple[str, str]) -> list[Event]:
        half = self._held.pop(key, None)
        if half is None:
            return []
        kind, name = key
        return [{"type": kind, _CONTENT[kind]: name, "delta": half}]
