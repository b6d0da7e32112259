"""The list of messages a fold builds, with the deltas that were not joined yet."""

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from aguiapp.protocol.events import Event

Message = dict[str, Any]

_CLIENT: Final = "@ag-ui/client"
_ACTIVITY_TYPES: Final = "authoritativeActivityTypes"
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def join_halves(text: str) -> str:
    """Join surrogate halves that met by concatenation, as JavaScript strings do."""
    return text if text.isascii() else _PAIR.sub(joined_pair, text)


def joined_pair(match: re.Match[str]) -> str:
    """Return the one character a matched pair of halves stands for."""
    pair = match.group()
    return chr(0x10000 + ((ord(pair[0]) - 0xD800) << 10) + ord(pair[1]) - 0xDC00)


class Transcript:
    """Messages in order, found by id and by tool call; the first of equal ids counts."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self.messages: list[Message] = [own(message) for message in messages]
        self.by_id: dict[str, Message] = {}
        self.calls: dict[str, tuple[Message, dict[str, Any]]] = {}
        # Deltas not yet joined: message id -> parts, call id -> parts.
        self.texts: dict[str, list[str]] = {}
        self.arguments: dict[str, list[str]] = {}
        self._index()

    def copy(self) -> list[Message]:
        """Return the messages as they stand, safe from whatever comes next."""
        self.settle()
        return [own(message) for message in self.messages]

    def append(self, message: Message) -> None:
        self.messages.append(message)
        self._enter(message)

    def add_call(self, host: Message, call: dict[str, Any]) -> None:
        host.setdefault("toolCalls", []).append(call)
        self.calls[call["id"]] = (host, call)

    def insert_result(self, message: Message) -> None:
        """Put a tool message behind its call's message and the results already there."""
        found = self.calls.get(message["toolCallId"])
        if found is None:
            self.append(message)
            return
        at = self._position(found[0]) + 1
        while at < len(self.messages) and self.messages[at].get("role") == "tool":
            at += 1
        self.messages.insert(at, message)
        if message["id"] in self.by_id:
            self.settle()
            self._index()
        else:
            self.by_id[message["id"]] = message

    def swap(self, held: Message, fresh: Message) -> None:
        self.settle()
        self.messages[self._position(held)] = fresh
        self._index()

    def reconcile(self, event: Event) -> None:
        """Adopt a snapshot: known ids keep their place, new ones follow, the rest goes."""
        self.settle()
        stated: list[Message] = event["messages"]
        keeps = _keeper(event, {message.get("role") for message in stated})
        by_id = {message["id"]: message for message in stated}
        held = {message["id"] for message in self.messages}
        kept: list[Message] = []
        for message in self.messages:
            if message["id"] in by_id:
                kept.append(own(by_id[message["id"]]))
            elif keeps(message):
                kept.append(message)
        kept.extend(own(message) for message in stated if message["id"] not in held)
        self.messages = kept
        self._index()

    def text_parts(self, name: str) -> list[str] | None:
        """The growing text of a message; None when there is none to grow."""
        held = self.by_id.get(name)
        if held is None or held.get("role") == "activity":
            return None
        content = held.get("content")
        parts = self.texts[name] = [content] if isinstance(content, str) else []
        return parts

    def argument_parts(self, name: str) -> list[str] | None:
        found = self.calls.get(name)
        if found is None:
            return None
        parts = self.arguments[name] = [found[1]["function"]["arguments"]]
        return parts

    def settle(self) -> None:
        for name in tuple(self.texts):
            self.settle_text(name)
        for name in tuple(self.arguments):
            self.settle_arguments(name)

    def settle_text(self, name: str) -> None:
        parts = self.texts.pop(name, None)
        if parts is not None:
            self.by_id[name]["content"] = join_halves("".join(parts))

    def settle_arguments(self, name: str) -> None:
        parts = self.arguments.pop(name, None)
        if parts is not None:
            self.calls[name][1]["function"]["arguments"] = join_halves("".join(parts))

    def _position(self, wanted: Message) -> int:
        # What changes is nearly always near the end.
        last = len(self.messages) - 1
        return next(at for at in range(last, -1, -1) if self.messages[at] is wanted)

    def _enter(self, message: Message) -> None:
        self.by_id.setdefault(message["id"], message)
        if message.get("role") == "assistant":
            for call in message.get("toolCalls") or ():
                self.calls.setdefault(call["id"], (message, call))

    def _index(self) -> None:
        self.by_id = {}
        self.calls = {}
        for message in self.messages:
            self._enter(message)


def _keeper(event: Event, roles: set[Any]) -> Callable[[Message], bool]:
    """Which held messages survive a snapshot that does not name them."""
    metadata = event.get("metadata") or {}
    private = metadata.get(_CLIENT)
    if isinstance(private, dict):
        ruled = _ACTIVITY_TYPES in private
        owned = private.get(_ACTIVITY_TYPES)
    else:
        ruled, owned = _CLIENT in metadata, ()
    valid = isinstance(owned, list) and all(isinstance(kind, str) for kind in owned)

    def keeps(message: Message) -> bool:
        role = message.get("role")
        if role == "reasoning":
            return "reasoning" not in roles
        if role != "activity":
            return False
        if not ruled:
            return "activity" not in roles
        if owned is None:
            return False
        return not (valid and message.get("activityType") in owned)

    return keeps


def own(message: Message) -> Message:
    """Copy what a fold may later write to: the message, its calls, their functions."""
    copied = dict(message)
    if isinstance(calls := copied.get("toolCalls"), list):
        copied["toolCalls"] = [{**call, "function": dict(call["function"])} for call in calls]
    return copied
