"""The account that a writer of legal streams keeps: what is open, and who owns what."""

from __future__ import annotations

import copy
from random import Random
from typing import Any, Final

from aguiapp import protocol
from aguiapp.protocol import Event
from tests.protocol.values import happens, json_object, present, some

# event -> (what it opens, the field that names it, the bucket its owner is in)
_OPENERS: Final = {
    "TEXT_MESSAGE_START": ("text", "messageId", "message"),
    "REASONING_START": ("span", "messageId", "reasoning"),
    "REASONING_MESSAGE_START": ("reasoning", "messageId", "reasoning"),
}
_ENDS: Final = {
    "TEXT_MESSAGE_END": ("text", "messageId"),
    "REASONING_END": ("span", "messageId"),
    "REASONING_MESSAGE_END": ("reasoning", "messageId"),
    "TOOL_CALL_END": ("tool", "toolCallId"),
}
# what is open -> (its content event, its end, the field that names it, its owners' bucket)
OPEN: Final = {
    "text": ("TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END", "messageId", "message"),
    "reasoning": ("REASONING_MESSAGE_CONTENT", "REASONING_MESSAGE_END", "messageId", "reasoning"),
    "tool": ("TOOL_CALL_ARGS", "TOOL_CALL_END", "toolCallId", "call"),
    "span": ("", "REASONING_END", "messageId", "reasoning"),
}
CHUNKED: Final = {
    "TEXT_MESSAGE_CHUNK": ("text", "messageId"),
    "TOOL_CALL_CHUNK": ("tool", "toolCallId"),
    "REASONING_MESSAGE_CHUNK": ("reasoning", "messageId"),
}


class Ledger:
    """Emits events one by one, and knows which tag or id may come next."""

    def __init__(self, choose: Random, messages: list[Event], state: Any) -> None:
        self.choose = choose
        self.events: list[Event] = []
        self.features: set[str] = set()
        self.expander = protocol.Expander()
        self.fold = protocol.Fold(messages=messages, state=state)
        self.reset()

    # -- choosing ---------------------------------------------------------------------------

    def pick(self, values: Any) -> Any:
        return self.choose.choice(list(values))

    def maybe(self, one_in: int = 3) -> bool:
        return happens(self.choose, one_in)

    def some(self, one_in: int, **fields: Any) -> Event:
        """Each field, now and then."""
        return some(self.choose, one_in, **fields)

    def tag(self, bucket: str, name: str) -> str | None:
        """A tag that an event about this id may carry."""
        owners = self.owners[bucket]
        return self.pick((None, owners[name])) if name in owners else self.any_tag()

    def any_tag(self) -> str | None:
        known = [*self.active, *self.closed]
        if self.maybe(40):
            self.note("unannounced subagent")
            return "s9"
        tag: str | None = self.pick([None, None, *known])
        if tag in self.closed:
            self.note("closed subagent speaks")
        return tag

    def call_tags(self, name: str, parent: str | None) -> list[str | None]:
        """The tags with which this call may be opened under this parent."""
        messages, calls = self.owners["message"], self.owners["call"]
        tags: list[str | None] = []
        moved = name in calls and parent in messages and calls[name] != messages[parent]
        if not moved:
            tags.append(None)
        for tag in [*self.active, *self.closed, "s9"]:
            if tag == messages.get(parent or "?", tag) and tag == calls.get(name, tag):
                tags.append(tag)
        return tags

    # -- emitting ---------------------------------------------------------------------------

    def note(self, feature: str) -> None:
        self.features.add(feature)

    def emit(self, kind: str, fields: Event, tag: str | None = None) -> None:
        event: Event = {"type": kind, **fields}
        if tag is not None:
            event["subagentRunId"] = tag
            self.note("attributed")
        if self.maybe(4):
            metadata = json_object(self.choose, 2)
            event["metadata"] = {**metadata, **event.get("metadata", {})}
            self.note(f"metadata on {kind}")
        event |= self.some(8, timestamp=self.choose.choice((1764547200000, 0, -1)))
        event |= self.some(16, rawEvent=present(self.choose))
        self.events.append(event)
        for explicit in self.expander.feed(copy.deepcopy(event)):
            self._track(explicit)
            self.fold.feed(explicit)
        for finding in self.fold.drain():
            self.note(finding.kind)

    # -- the account ------------------------------------------------------------------------

    def reset(self) -> None:
        self.open: dict[str, dict[str, None]] = {kind: {} for kind in OPEN}
        self.steps: list[tuple[str, str | None]] = []
        self.active: list[str] = []
        self.closed: list[str] = []
        self.called: dict[str, str] = {}
        self.answered: set[str] = set()
        self.owners: dict[str, dict[str, str | None]] = {
            bucket: {} for bucket in ("message", "call", "activity", "reasoning")
        }

    def _track(self, event: Event) -> None:
        kind, tag = event["type"], event.get("subagentRunId")
        if kind in _OPENERS:
            opened, field, bucket = _OPENERS[kind]
            self.open[opened][event[field]] = None
            self.owners[bucket].setdefault(event[field], tag)
        elif kind in _ENDS:
            opened, field = _ENDS[kind]
            del self.open[opened][event[field]]
        elif kind == "TOOL_CALL_START":
            inherited = self.owners["message"].get(event.get("parentMessageId", "?"))
            name = event["toolCallId"]
            self.owners["call"].setdefault(name, inherited if tag is None else tag)
            self.open["tool"][name] = None
            self.called.setdefault(name, event["toolCallName"])
        elif kind == "TOOL_CALL_RESULT":
            self.owners["message"][event["messageId"]] = tag
            self.answered.add(event["toolCallId"])
        elif kind == "MESSAGES_SNAPSHOT":
            self.adopt(event["messages"], overwrite=True)

    def adopt(self, messages: list[Event], *, overwrite: bool) -> None:
        for message in messages:
            role, owner = message["role"], message.get("subagentRunId")
            bucket = role if role in ("activity", "reasoning") else "message"
            entries = [(bucket, message["id"])]
            entries += [("call", call["id"]) for call in message.get("toolCalls", ())]
            for where, name in entries:
                if overwrite or name not in self.owners[where]:
                    self.owners[where][name] = owner

    def chunked(self, kind: str) -> set[str]:
        """Ids that are open only until a chunk lane closes."""
        lanes = self.expander.snapshot()
        return {lane["id"] for lane in lanes if CHUNKED[lane["type"]][0] == kind}

    def explicit(self) -> list[tuple[str, str]]:
        """What was opened by a START and is still open."""
        return [
            (kind, name)
            for kind, names in self.open.items()
            for name in names
            if name not in self.chunked(kind)
        ]

    def closed_ids(self, kind: str, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if name not in self.open[kind]]
