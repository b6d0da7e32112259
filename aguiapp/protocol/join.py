"""The prologue of a late joiner: what brings a stock client to a position it did not watch.

What lies behind is restated as a replayed run of its own. The active run is started after it,
because a snapshot inside that run would claim every message for the owner it had long ago, and
later events tagged otherwise would then be fatal (VERIFY-10, 12, 25). None of it is logged.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aguiapp.protocol.events import Event
from aguiapp.protocol.fold import Snapshot
from aguiapp.protocol.opened import OpenItem
from aguiapp.protocol.restate import PIECE, identity, resettled, restate, run_started
from aguiapp.protocol.trace import RUNNING
from aguiapp.protocol.transcript import Message

# What reopens a message or call is its identity; metadata would be merged a second time.
_REPEATED: Final = ("type", "messageId", "role", "name", "toolCallId", "toolCallName")


def join(
    snapshot: Snapshot,
    run: Mapping[str, Any],
    messages: Sequence[Message] = (),
    *,
    piece: int = PIECE,
) -> list[Event]:
    """Events after which a client sees what somebody sees who watched up to `snapshot`.

    `run` is the last run's RUN_STARTED, or its `threadId`, `runId` and, where there are any,
    `parentRunId` and `protocolVersion`; `messages` is what the joiner holds. While the run is
    active its rest may follow directly; otherwise the prologue ends in RUN_FINISHED, also after
    a RUN_ERROR, and the next run may follow.
    """
    if snapshot.trace["phase"] != RUNNING:
        return restate(snapshot, run, messages, piece=piece)
    past = {**identity(run), "runId": f"{run['runId']}:history"}
    return [*restate(snapshot, past, messages, piece=piece), *_Reopening(snapshot).events(run)]


class _Reopening:
    """The active run up to the snapshot: its start, whom things belong to, what is open."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._owners: dict[str, dict[str, str | None]] = snapshot.trace["owners"]
        self._items = [OpenItem(*item) for item in snapshot.open_items]
        self._open = {(item.kind, item.id) for item in self._items}
        self._held = {message["id"] for message in snapshot.messages}
        # The first of equal ids counts.
        self._calls = {
            call["id"]: call
            for message in reversed(snapshot.messages)
            if message["role"] == "assistant"
            for call in message.get("toolCalls") or ()
        }

    def events(self, run: Mapping[str, Any]) -> list[Event]:
        start = run_started(run)
        if seeds := self._seeds():
            start["input"] = {**identity(run), "messages": seeds}
        items = [item for item in self._items if item.kind != "subagent"]
        events = [start, *self._subagents(), *self._claimed_reasoning()]
        events += map(self._opener, items)
        gone = [item for item in items if self._is_gone(item)]
        if gone:
            # What a snapshot of this run removed was opened, and is removed again.
            thoughts = [item.id for item in gone if item.kind == "reasoning"]
            events += resettled(self._snapshot.messages, thoughts)
        return events

    def _subagents(self) -> list[Event]:
        """Every invocation of the run: one that ended may still be named as a parent."""
        events: list[Event] = []
        for started in self._snapshot.trace["subagents"]:
            name = started["subagentRunId"]
            events.append(started)
            if ("subagent", name) not in self._open:
                events.append({"type": "SUBAGENT_FINISHED", "subagentRunId": name})
        return events

    # -- what is open -----------------------------------------------------------------------

    def _opener(self, item: OpenItem) -> Event:
        if item.kind == "step":
            return item.opener
        event: Event = {name: item.opener[name] for name in _REPEATED if name in item.opener}
        if item.kind == "tool":
            self._complete_call(event, item)
        owner = self._owners[_BUCKETS[item.kind]].get(item.id)
        return event if owner is None else {**event, "subagentRunId": owner}

    def _complete_call(self, event: Event, item: OpenItem) -> None:
        """The name it has by now, and its parent unless that has changed hands since."""
        if item.id in self._calls:
            event["toolCallName"] = self._calls[item.id]["function"]["name"]
        parent = item.opener.get("parentMessageId")
        owner = self._owners["call"].get(item.id)
        if parent is not None and self._owners["message"].get(parent) == owner:
            event["parentMessageId"] = parent

    def _is_gone(self, item: OpenItem) -> bool:
        if item.kind == "tool":
            return item.id not in self._calls
        return item.kind in ("text", "reasoning") and item.id not in self._held

    # -- what belongs to subagents ----------------------------------------------------------
    # An untagged continuation takes over the recorded owner, so the joiner needs the record.
    # What is the parent agent's needs none.

    def _tagged(self, bucket: str) -> list[tuple[str, str]]:
        return [(name, owner) for name, owner in self._owners[bucket].items() if owner is not None]

    def _seeds(self) -> list[Message]:
        """Messages that the joiner holds already, so that only their owners are read."""
        seeds: list[Message] = [
            {"id": name, "role": "assistant", "subagentRunId": owner}
            for name, owner in self._tagged("message")
            if name in self._held
        ]
        seeds += [
            {**_ACTIVITY, "id": name, "subagentRunId": owner}
            for name, owner in self._tagged("activity")
            if name in self._held
        ]
        for name, owner in self._tagged("call"):
            if ("tool", name) not in self._open:  # an opener says so itself
                seeds += self._call_seeds(name, owner)
        return seeds

    def _call_seeds(self, name: str, owner: str) -> list[Message]:
        """A closed call is named through a message, which must not change hands by it.

        Best is a message of this run, whose owner is known; else one of the same subagent, which
        may be its host; else one that no subagent writes to.
        """
        recorded = self._owners["message"]

        def fitness(message: Message) -> tuple[bool, bool, bool]:
            own = message["role"] == "assistant" and message.get("subagentRunId") == owner
            return message["id"] in recorded, own, message["role"] in ("user", "activity")

        if not self._snapshot.messages:
            return []
        anchor = max(self._snapshot.messages, key=fitness)
        known, own, _ = fitness(anchor)
        call = {"id": name, "type": "function", "function": {"name": "", "arguments": ""}}
        seed = {"id": anchor["id"], "role": "assistant"}
        named = {**seed, "subagentRunId": owner, "toolCalls": [call]}
        if recorded.get(anchor["id"]) is not None or (own and not known):
            return [named]
        return [seed, named]

    def _claimed_reasoning(self) -> list[Event]:
        """Spans share their owners with reasoning messages and leave nothing behind."""
        events: list[Event] = []
        for name, owner in self._tagged("reasoning"):
            if not self._open & {("span", name), ("reasoning", name)}:
                tag = {"messageId": name, "subagentRunId": owner}
                events.append({"type": "REASONING_START", **tag})
                events.append({"type": "REASONING_END", **tag})
        return events


_ACTIVITY: Final = {"role": "activity", "activityType": "", "content": {}}
_BUCKETS: Final = {
    "text": "message",
    "tool": "call",
    "reasoning": "reasoning",
    "span": "reasoning",
}
