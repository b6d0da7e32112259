"""Whose history and whose state a run starts with: the thread's fold against the input.

Pure functions over wire dicts; the rules are those of docs/explanation/history.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aguiapp import protocol
from aguiapp.protocol import Event

Message = dict[str, Any]

#: Roles a client may add to a thread; system and developer are for one run only.
CLIENT_ROLES = frozenset({"user", "tool"})
INSTRUCTIONS = frozenset({"system", "developer"})
_ABSENT: Any = object()


@dataclass(kw_only=True)
class Merged:
    """What the agent is given, what goes into the log first, and whether the requester is behind."""

    messages: list[Message]
    new: list[Message]
    state: Any
    #: Messages of a MESSAGES_SNAPSHOT when history was edited.
    edited: list[Message] | None = None
    drops_activities: bool = False
    state_edited: bool = False
    heal: bool = False
    findings: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings that decide a merge."""

    client_history: bool = False
    has_base: bool = False
    state: str = "merge"
    instructions: bool = True


def canonical(value: Any) -> str:
    """One text for all JSON values that JavaScript holds equal: sorted keys, 1.0 as 1."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def state_hash(state: Any) -> str:
    """The hash by which a state is recognised as that of an earlier run's end."""
    return hashlib.sha256(canonical(state).encode()).hexdigest()


def input_hash(value: dict[str, Any]) -> str:
    """The hash by which the same post is recognised."""
    return state_hash(value)


def merge(
    fold: protocol.Snapshot,
    given: dict[str, Any],
    rules: Rules,
    *,
    fresh: bool,
    known_states: Collection[str] = (),
) -> Merged:
    """Read the input against the thread's fold; `fresh` says that the thread has no run yet."""
    theirs = _distinct(m for m in given["messages"] if m["role"] != "activity")
    known = {message["id"] for message in fold.messages}
    unknown = [message for message in theirs if message["id"] not in known]
    merged = _history(fold, theirs, unknown, rules, resumes=bool(given.get("resume")))
    merged.state, merged.state_edited = _state(fold, given, rules, known_states)
    if not fresh:
        merged.heal = _is_behind(fold, theirs, merged) or (
            not merged.state_edited and not _equal(given.get("state", {}), fold.state)
        )
    return merged


def _is_behind(fold: protocol.Snapshot, theirs: list[Message], merged: Merged) -> bool:
    """Whether the requester will not hold what the thread holds once its run has begun.

    Clients keep their own order, and what the thread did not take of them stays on their screen.
    Instructions do not count: they are the client's own.
    """
    view = [message for message in theirs if message["role"] not in INSTRUCTIONS]
    if merged.edited is None:
        return not _same_view(_distinct([*fold.messages, *merged.new]), view)
    ours, seen = _spoken(_distinct(merged.edited)), _spoken(view)
    return [message["id"] for message in ours] != [message["id"] for message in seen]


def _distinct(messages: Iterable[Message]) -> list[Message]:
    """Each id once, as it came first: so does the fold."""
    first: dict[str, Message] = {}
    for message in messages:
        first.setdefault(message["id"], message)
    return list(first.values())


def _history(
    fold: protocol.Snapshot,
    theirs: list[Message],
    unknown: list[Message],
    rules: Rules,
    *,
    resumes: bool,
) -> Merged:
    if rules.client_history:
        return _client_history(fold, theirs, unknown)
    if rules.has_base:
        return _edit(fold, theirs, unknown, rules, theirs_win=True)
    if not unknown and not resumes and _regenerates(fold.messages, theirs):
        return _edit(fold, theirs, unknown, rules, theirs_win=False)
    new, once, findings = _admitted(unknown, rules)
    findings += _changed(fold.messages, theirs)
    messages = once + [m for m in fold.messages if m["role"] != "activity"] + new
    return Merged(messages=messages, new=new, state=None, findings=findings)


def _spoken(messages: Sequence[Message]) -> list[Message]:
    """Without what a client may not hold: activities and reasoning."""
    return [m for m in messages if m["role"] not in ("activity", "reasoning")]


def _regenerates(held: Sequence[Message], theirs: Sequence[Message]) -> bool:
    ours, view = _spoken(held), _spoken(theirs)
    return (
        0 < len(view) < len(ours)
        and ours[len(view) - 1]["role"] == "user"  # whatever role the client gives it
        and [m["id"] for m in ours[: len(view)]] == [m["id"] for m in view]
    )


def _admitted(
    unknown: list[Message], rules: Rules
) -> tuple[list[Message], list[Message], list[dict[str, Any]]]:
    """New messages that stay, instructions for this run, and findings about the rest."""
    new, once, findings = [], [], []
    for message in unknown:
        role = message["role"]
        if role in CLIENT_ROLES:
            new.append(message)
        elif role in INSTRUCTIONS and rules.instructions:
            once.append(message)
        else:
            findings.append({"kind": "forged_message", "role": role, "id": message["id"]})
    return new, once, findings


def _changed(held: Sequence[Message], theirs: list[Message]) -> list[dict[str, Any]]:
    """Findings about messages that the client tells otherwise than the thread, whose word counts."""
    by_id = {message["id"]: message for message in held}
    return [
        {"kind": "changed_message", "role": by_id[message["id"]]["role"], "id": message["id"]}
        for message in theirs
        if message["id"] in by_id and not _equal(_said(by_id[message["id"]]), _said(message))
    ]


def _said(message: Message) -> list[Any]:
    """What a message says; old clients lose metadata and owners, which is no change."""
    calls = [call["function"] for call in message.get("toolCalls") or ()]
    return [message["role"], message.get("content"), calls, message.get("toolCallId")]


def distinct_tools(given: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The input with each tool once, by name, and findings about the rest."""
    tools: dict[str, Any] = {}
    findings = []
    for tool in given.get("tools", ()):
        if tools.setdefault(tool["name"], tool) is not tool:
            findings.append({"kind": "repeated_tool", "name": tool["name"]})
    return ({**given, "tools": list(tools.values())} if findings else given), findings


def _edit(
    fold: protocol.Snapshot,
    theirs: list[Message],
    unknown: list[Message],
    rules: Rules,
    *,
    theirs_win: bool,
) -> Merged:
    """History was cut or changed: what stays, in the thread's order, then what is new."""
    new, once, findings = _admitted(unknown, rules)
    wanted = {message["id"]: message for message in theirs}
    last = max((i for i, m in enumerate(fold.messages) if m["id"] in wanted), default=-1)
    kept = []
    for message in fold.messages[: last + 1]:
        if message["id"] in wanted:
            kept.append(wanted[message["id"]] if theirs_win else message)
        elif message["role"] in ("activity", "reasoning"):
            kept.append(message)
    edited = kept + new
    dropped = {m["id"] for m in fold.messages} - {m["id"] for m in edited}
    return Merged(
        messages=once + [m for m in edited if m["role"] != "activity"],
        new=new,
        state=None,
        edited=edited,
        drops_activities=any(m["role"] == "activity" for m in fold.messages if m["id"] in dropped),
        findings=findings,
    )


def _client_history(
    fold: protocol.Snapshot, theirs: list[Message], unknown: list[Message]
) -> Merged:
    fresh = {message["id"] for message in unknown}
    view = [message for message in theirs if message["id"] not in fresh]
    same = _same_view(fold.messages, view)
    return Merged(messages=theirs, new=unknown, state=None, edited=None if same else theirs)


def _state(
    fold: protocol.Snapshot, given: dict[str, Any], rules: Rules, known_states: Collection[str]
) -> tuple[Any, bool]:
    state = given.get("state", _ABSENT)
    if rules.state == "thread" or state is _ABSENT or _equal(state, fold.state):
        return fold.state, False
    if rules.state == "merge" and (state == {} or state_hash(state) in known_states):
        return fold.state, False
    return state, True


def _equal(left: Any, right: Any) -> bool:
    return left is right or canonical(left) == canonical(right)


def _same_view(held: Sequence[Message], view: Sequence[Message]) -> bool:
    """Whether somebody who holds `view` sees the conversation that the thread holds."""
    ours, seen = _spoken(held), _spoken(view)
    return len(ours) == len(seen) and all(map(_equal, ours, seen))


def opening_events(merged: Merged, mark: dict[str, Any]) -> list[Event]:
    """The log's edits ahead of the agent's own events: snapshots, with `mark` as metadata."""
    events: list[Event] = []
    if merged.edited is not None:
        metadata = dict(mark)
        if merged.drops_activities:
            metadata["@ag-ui/client"] = {"authoritativeActivityTypes": None}
        events.append(
            {"type": "MESSAGES_SNAPSHOT", "messages": merged.edited, "metadata": metadata}
        )
    if merged.state_edited:
        events.append({"type": "STATE_SNAPSHOT", "snapshot": merged.state, "metadata": mark})
    return events
