"""Who owns what: remembered after an item closes, forgotten when the next run starts."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from aguiapp.protocol.events import Event, ProtocolError, text_of

_BUCKETS: Final = ("message", "call", "activity", "reasoning")


class Owners:
    """id -> subagent, one bucket per namespace; None is the parent agent."""

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets: dict[str, dict[str, str | None]] = {name: {} for name in _BUCKETS}

    def clear(self) -> None:
        for bucket in self._buckets.values():
            bucket.clear()

    def of(self, bucket: str) -> dict[str, str | None]:
        return self._buckets[bucket]

    def require(self, rule: str, bucket: str, name: Any, event: Event) -> None:
        """Refuse a tag that differs from the recorded owner; no tag never differs."""
        tag = event.get("subagentRunId")
        if tag is None:
            return
        owners = self._buckets[bucket]
        if name in owners and owners[name] != tag:
            raise ProtocolError(
                rule,
                f"{event['type']} of {text_of(name)} is tagged {text_of(tag)} "
                f"but belongs to {owner_name(owners[name])}",
            )

    def follow(self, event: Event) -> None:
        """Record whom a legal event makes the owner of what."""
        record = _RECORDS.get(event["type"])
        if record is not None:
            record(self, event)

    def inherited(self, event: Event) -> str | None:
        """Whose a tool call is: its tag's, else that of the message it belongs to."""
        tag, parent = event.get("subagentRunId"), event.get("parentMessageId")
        return tag if tag is not None else self._buckets["message"].get(parent) if parent else None

    def _text(self, event: Event) -> None:
        self._buckets["message"].setdefault(event["messageId"], event.get("subagentRunId"))

    def _call(self, event: Event) -> None:
        self._buckets["call"].setdefault(event["toolCallId"], self.inherited(event))

    def _result(self, event: Event) -> None:
        self._buckets["message"][event["messageId"]] = event.get("subagentRunId")

    def _reasoning(self, event: Event) -> None:
        self._buckets["reasoning"].setdefault(event["messageId"], event.get("subagentRunId"))

    def _activity(self, event: Event) -> None:
        bucket, name = self._buckets["activity"], event["messageId"]
        if event.get("replace") is not False or name not in bucket:
            bucket[name] = event.get("subagentRunId")

    def _snapshot(self, event: Event) -> None:
        self._messages(event["messages"], overwrite=True)

    def _run(self, event: Event) -> None:
        self.clear()
        carried = event.get("input")
        if isinstance(carried, dict):
            self._messages(carried.get("messages", ()), overwrite=False)

    def _messages(self, messages: Iterable[Any], *, overwrite: bool) -> None:
        """Take over the owners that messages carry; calls inherit from their message."""
        for message in messages:
            owner = message.get("subagentRunId")
            role = message.get("role")
            bucket = self._buckets[role if role in ("activity", "reasoning") else "message"]
            _record(bucket, message.get("id"), owner, overwrite=overwrite)
            for call in message.get("toolCalls") or ():
                _record(self._buckets["call"], call.get("id"), owner, overwrite=overwrite)

    def dump(self) -> dict[str, dict[str, str | None]]:
        return {name: dict(bucket) for name, bucket in self._buckets.items()}

    def load(self, dumped: dict[str, dict[str, str | None]]) -> None:
        self._buckets = {name: dict(dumped[name]) for name in _BUCKETS}


_RECORDS: Final[dict[str, Callable[[Owners, Event], None]]] = {
    "RUN_STARTED": Owners._run,
    "TEXT_MESSAGE_START": Owners._text,
    "TOOL_CALL_START": Owners._call,
    "TOOL_CALL_RESULT": Owners._result,
    "REASONING_START": Owners._reasoning,
    "REASONING_MESSAGE_START": Owners._reasoning,
    "ACTIVITY_SNAPSHOT": Owners._activity,
    "MESSAGES_SNAPSHOT": Owners._snapshot,
}


def _record(
    bucket: dict[str, str | None], name: str | None, owner: str | None, *, overwrite: bool
) -> None:
    if name is not None and (overwrite or name not in bucket):
        bucket[name] = owner


def owner_name(owner: str | None) -> str:
    """Name an owner in a sentence."""
    return "the parent agent" if owner is None else f"subagent {text_of(owner)}"
