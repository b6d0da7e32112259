"""Joiners of generated streams: at every position, with whatever they may hold by then."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

from aguiapp import protocol
from aguiapp.protocol import Event, Snapshot
from tests.protocol.streams import ACTIVITIES, RESULTS, TEXTS, THREAD, Stream
from tests.protocol.values import happens, message

Message = dict[str, Any]

PRIVATE = ("reasoning", "activity")


class Join(NamedTuple):
    """Somebody who comes in at `position` and holds `held`; `rest` follows the prologue."""

    position: int
    history: str
    held: list[Message]
    prologue: list[Event]
    rest: list[Event]
    snapshot: Snapshot

    @property
    def stream(self) -> dict[str, Any]:
        """What the joiner's client goes through."""
        initial = {"messages": self.held, "state": {"stale": True}}
        return {"initial": initial, "events": [*self.prologue, *self.rest]}

    def shared(self, messages: list[Message]) -> list[Message]:
        """Without reasoning and activities that nobody but the joiner held when it came."""
        known = {one["id"] for one in self.snapshot.messages}
        own = {one["id"] for one in self.held if one["role"] in PRIVATE} - known
        return [one for one in messages if one["role"] not in PRIVATE or one["id"] not in own]


def joins(stream: Stream, choose: Random) -> Iterator[Join]:
    """Every position of a stream with no history, a true prefix, and a stale one."""
    watcher = protocol.Fold(**stream.initial)
    run: Event = {"threadId": THREAD, "runId": "run0"}
    for position in range(len(stream.events) + 1):
        if position:
            event = stream.events[position - 1]
            watcher.feed(event)
            run = event if event["type"] == "RUN_STARTED" else run
        snapshot = watcher.snapshot()
        known = snapshot.messages
        rest = stream.events[position:]
        held = {
            "none": [],
            "prefix": known[: choose.randrange(len(known) + 1)],
            "stale": stale(choose, known),
        }
        for name, messages in held.items():
            prologue = protocol.join(snapshot, run, messages)
            yield Join(position, name, messages, prologue, rest, snapshot)


def stale(choose: Random, known: list[Message]) -> list[Message]:
    """Some of the messages, in another order and as they once were, and some of its own."""
    held = [dict(one) for one in known if not happens(choose, 3)]
    if happens(choose, 2):
        choose.shuffle(held)
    for one in held:
        if isinstance(one.get("content"), str) and happens(choose, 2):
            one["content"] = "older"
    taken = {one["id"] for one in known}
    for number in range(choose.randrange(3)):
        role = choose.choice(("user", "assistant", "tool", *PRIVATE))
        names = [f"own{number}"]
        if role not in PRIVATE:  # may have an id that the thread takes later
            names += [one for one in (*TEXTS, *ACTIVITIES, *RESULTS) if one not in taken]
        made = message(choose, role, choose.choice(names))
        held.insert(choose.randrange(len(held) + 1), made)
    return held


# -- what a prologue cannot tell ----------------------------------------------------------


def owners_cannot_be_told(snapshot: Snapshot) -> bool:
    """Whether a client cannot be told in full who owns what at this position.

    Only events of the run itself make a client remember an owner. Three things leave nothing
    to say it with, or say too much:

    - An item is open whose message or call a snapshot of this run took away. To open it without
      showing it, it is opened and taken away by a snapshot, which claims whatever it names for
      the owner it is tagged with, and that was not its owner of record.
    - What a subagent owns was taken away after it closed: to name it would show it again.
    - A subagent's call is closed, and there is no message with an owner of record to name it
      through: it takes one that had none.
    """
    if snapshot.trace["phase"] != "running":
        return False
    return _claims(snapshot) or _owns_what_is_gone(snapshot) or _has_no_anchor(snapshot)


def _claims(snapshot: Snapshot) -> bool:
    gone = _gone(snapshot)
    owners = snapshot.trace["owners"]
    named = set(PRIVATE)  # what is named by the role alone
    if len(_ids(snapshot)) < len(snapshot.messages):
        named = set()
    elif "reasoning" in gone:
        named = {"activity"}
    return bool(gone) and any(
        owners[bucket].get(name, "nobody") != one.get("subagentRunId")
        for one in snapshot.messages
        if one["role"] not in named
        for bucket, name in _records(one)
    )


def _records(one: Message) -> list[tuple[str, str]]:
    """Where a message and its calls are recorded: bucket, id."""
    bucket = one["role"] if one["role"] in PRIVATE else "message"
    return [(bucket, one["id"]), *(("call", call["id"]) for call in one.get("toolCalls") or ())]


def _gone(snapshot: Snapshot) -> set[str]:
    """Of which kinds something is open that no message shows."""
    calls = {
        name for one in snapshot.messages for bucket, name in _records(one) if bucket == "call"
    }
    shown = {"tool": calls, "text": _ids(snapshot), "reasoning": _ids(snapshot)}
    return {
        item.kind
        for item in snapshot.open_items
        if item.kind in shown and item.id not in shown[item.kind]
    }


def _owns_what_is_gone(snapshot: Snapshot) -> bool:
    told = _ids(snapshot) | {item.id for item in snapshot.open_items if item.kind == "text"}
    owners = snapshot.trace["owners"]
    recorded = [*owners["message"].items(), *owners["activity"].items()]
    return any(owner is not None and name not in told for name, owner in recorded)


def _has_no_anchor(snapshot: Snapshot) -> bool:
    owners = snapshot.trace["owners"]
    told = {item.id for item in snapshot.open_items if item.kind == "tool"}
    closed = [name for name, owner in owners["call"].items() if owner and name not in told]
    return bool(closed) and not _ids(snapshot) & set(owners["message"])


def _ids(snapshot: Snapshot) -> set[str]:
    return {one["id"] for one in snapshot.messages}
