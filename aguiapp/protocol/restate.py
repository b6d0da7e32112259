"""History as replayed runs: snapshots that bring a client to a fold it did not watch."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aguiapp.protocol.events import PROTOCOL_VERSION, Event
from aguiapp.protocol.fold import Snapshot
from aguiapp.protocol.jsontext import dumps
from aguiapp.protocol.trace import FAILED, RUNNING
from aguiapp.protocol.transcript import Message

#: Characters of messages above which a history comes in pieces: stock clients refuse huge events.
PIECE: Final = 1024 * 1024


def restate(
    snapshot: Snapshot,
    run: Mapping[str, Any],
    messages: Sequence[Message] = (),
    *,
    piece: int = PIECE,
) -> list[Event]:
    """One replayed run, or several for a long history, that ends in the snapshot's view.

    A true prefix of the history needs one snapshot of the messages. Anything else is emptied
    first, because a client never reorders what it holds.
    """
    start = run_started(run)
    ids = {"threadId": start["threadId"], "runId": start["runId"]}
    state: Event = {"type": "STATE_SNAPSHOT", "snapshot": snapshot.state}
    held = [message["id"] for message in messages]
    known = [message["id"] for message in snapshot.messages]
    prefix = held == known[: len(held)] and (not held or len(set(known)) == len(known))
    thoughts = list(dict.fromkeys(m["id"] for m in messages if m["role"] == "reasoning"))
    emptied = [*_renamed(thoughts, snapshot.messages, ()), _emptied(snapshot.messages)]
    if len(_pieces(snapshot.messages, piece)) == 1:
        full = [_stated(snapshot.messages)] if known else []
        return [start, *([] if prefix else emptied), *full, state, _finish(snapshot, ids)]
    head, rest = _head(snapshot.messages)
    events = [start, *emptied, _stated(head), state]
    for part in _pieces(rest, piece):
        events.append({"type": "RUN_FINISHED", **ids})
        events.append({**start, "input": {**ids, "messages": part}})
    return [*events, _finish(snapshot, ids)]


def resettled(messages: Sequence[Message], thoughts: Sequence[str]) -> list[Event]:
    """Snapshots that take away what a client that holds these messages holds beside them.

    `thoughts` are the reasoning messages among that. Reasoning and activities stay unnamed where
    they can: naming them would claim them.
    """
    renamed = _renamed(thoughts, messages, messages)
    if len({message["id"] for message in messages}) < len(messages):
        # Two messages of one id would both be replaced by the latter.
        return [*renamed, _emptied(messages), _stated(messages)]
    unnamed = ("activity",) if thoughts else ("activity", "reasoning")
    return [*renamed, _stated([m for m in messages if m["role"] not in unnamed])]


def _renamed(
    thoughts: Sequence[str], messages: Sequence[Message], kept: Sequence[Message]
) -> list[Event]:
    """A snapshot that makes reasoning into what the next snapshot takes away.

    One that holds no reasoning itself would leave it where it is.
    """
    if not thoughts or any(message["role"] == "reasoning" for message in messages):
        return []
    return [_stated([*kept, *({"id": name, "role": "user", "content": ""} for name in thoughts)])]


def identity(run: Mapping[str, Any]) -> dict[str, Any]:
    names = ("threadId", "runId", "parentRunId", "protocolVersion")
    return {name: run[name] for name in names if run.get(name) is not None}


def run_started(run: Mapping[str, Any]) -> Event:
    return {"type": "RUN_STARTED", "protocolVersion": PROTOCOL_VERSION, **identity(run)}


def _stated(messages: Sequence[Message]) -> Event:
    return {"type": "MESSAGES_SNAPSHOT", "messages": list(messages)}


def _emptied(messages: Sequence[Message]) -> Event:
    """A snapshot of nothing that owns activities too; a sentinel makes it own the reasoning."""
    sentinel: list[Message] = []
    if any(message["role"] == "reasoning" for message in messages):
        sentinel = [{"id": "aguiapp-reset", "role": "reasoning", "content": ""}]
    metadata = {"@ag-ui/client": {"authoritativeActivityTypes": None}}
    return {"type": "MESSAGES_SNAPSHOT", "messages": sentinel, "metadata": metadata}


def _finish(snapshot: Snapshot, ids: dict[str, str]) -> Event:
    """RUN_FINISHED that leaves open what is open; never an error."""
    outcome: dict[str, Any] = {"type": "success"}
    if snapshot.interrupts:
        outcome = {"type": "interrupt", "interrupts": list(snapshot.interrupts)}
    elif snapshot.pending_tool_calls and snapshot.trace["phase"] not in (RUNNING, FAILED):
        # Calls of a run that goes on are not anybody's yet; those of a failed one never will be.
        outcome["pendingToolCallIds"] = list(snapshot.pending_tool_calls)
    return {"type": "RUN_FINISHED", **ids, "outcome": outcome}


def _head(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What must come as one snapshot, and the rest, which can come in pieces.

    The sentinel goes only with a snapshot that holds reasoning.
    """
    first = next((i for i, m in enumerate(messages) if m["role"] == "reasoning"), -1)
    return list(messages[: first + 1]), list(messages[first + 1 :])


def _pieces(messages: Sequence[Message], piece: int) -> list[list[Message]]:
    pieces: list[list[Message]] = [[]]
    size = 0
    for message in messages:
        length = len(dumps(message))
        if pieces[-1] and size + length > piece:
            pieces.append([])
            size = 0
        pieces[-1].append(message)
        size += length
    return pieces
