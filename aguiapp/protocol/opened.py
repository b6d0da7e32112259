"""What is open in a run, in the order it was opened."""

from typing import Any, Final, NamedTuple

from aguiapp.protocol.events import SUBAGENT, Event


class OpenItem(NamedTuple):
    """One thing that was started and not ended; `opener` is the event that started it."""

    kind: str
    id: str
    subagentRunId: str | None
    opener: Event


# event type -> (what it is about, the field that names it)
OPENERS: Final[dict[str, tuple[str, str]]] = {
    "TEXT_MESSAGE_START": ("text", "messageId"),
    "TOOL_CALL_START": ("tool", "toolCallId"),
    "REASONING_START": ("span", "messageId"),
    "REASONING_MESSAGE_START": ("reasoning", "messageId"),
    "STEP_STARTED": ("step", "stepName"),
    "SUBAGENT_STARTED": ("subagent", "subagentRunId"),
}
CLOSERS: Final[dict[str, tuple[str, str]]] = {
    "TEXT_MESSAGE_END": ("text", "messageId"),
    "TOOL_CALL_END": ("tool", "toolCallId"),
    "REASONING_END": ("span", "messageId"),
    "REASONING_MESSAGE_END": ("reasoning", "messageId"),
    "STEP_FINISHED": ("step", "stepName"),
    "SUBAGENT_FINISHED": ("subagent", "subagentRunId"),
    "SUBAGENT_ERROR": ("subagent", "subagentRunId"),
}
KINDS: Final = ("step", "text", "reasoning", "span", "tool", "subagent")

Key = tuple[str, str, str | None]


class Opened:
    """The open items of one run; steps are told apart by their owner, the rest by id."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: dict[Key, OpenItem] = {}

    def open(self, kind: str, name: str, owner: str | None, opener: Event) -> None:
        self._items[_key(kind, name, owner)] = OpenItem(kind, name, owner, opener)

    def close(self, kind: str, name: str, owner: str | None) -> None:
        self._items.pop(_key(kind, name, owner), None)

    def has(self, kind: str, name: str, owner: str | None = None) -> bool:
        return _key(kind, name, owner) in self._items

    def clear(self) -> None:
        self._items.clear()

    def track(self, event: Event) -> None:
        """Follow an event that some verifier has judged, or nobody has."""
        kind = event["type"]
        # On the SUBAGENT types the tag is the identity.
        owner = None if kind in SUBAGENT else event.get("subagentRunId")
        if opened := OPENERS.get(kind):
            self.open(opened[0], event[opened[1]], owner, event)
        elif closed := CLOSERS.get(kind):
            self.close(closed[0], event[closed[1]], owner)

    def of(self, kind: str) -> list[OpenItem]:
        return [item for item in self._items.values() if item.kind == kind]

    def items(self) -> list[OpenItem]:
        return list(self._items.values())

    def dump(self) -> list[list[Any]]:
        return [list(item) for item in self._items.values()]

    def load(self, dumped: list[list[Any]]) -> None:
        self._items = {}
        for kind, name, owner, opener in dumped:
            self.open(kind, name, owner, opener)

    def __bool__(self) -> bool:
        return bool(self._items)


def _key(kind: str, name: str, owner: str | None) -> Key:
    return (kind, name, owner if kind == "step" else None)
