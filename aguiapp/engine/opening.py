"""How a run begins: the thread folded, the input read against it, and the first events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aguiapp import agents, conf, protocol, store
from aguiapp.engine import history
from aguiapp.errors import BadCursor, NotFound, StaleHistory
from aguiapp.models import Run, Thread


@dataclass(frozen=True)
class Opening:
    """A run's beginning: `events` are logged, `unlogged` goes to its requester alone, before."""

    folder: protocol.Fold
    merged: history.Merged
    events: list[protocol.Event]
    unlogged: list[protocol.Event]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a driver starts with."""

    thread: Thread
    run: Run
    agent: agents.Agent
    input: dict[str, Any]
    user: Any
    folder: protocol.Fold
    opening: Sequence[protocol.Event]
    findings: Sequence[dict[str, Any]] = ()


def base(given: dict[str, Any]) -> str | None:
    """The cursor that an edit of history is based on: `forwardedProps.aguiapp.base`."""
    props = given.get("forwardedProps")
    ours = props.get("aguiapp") if isinstance(props, dict) else None
    base = ours.get("base") if isinstance(ours, dict) else None
    if base is not None and not isinstance(base, str):
        raise BadCursor(details={"path": "forwardedProps.aguiapp.base"})
    return base


def read(thread: Thread, run: Run, given: dict[str, Any]) -> Opening:
    """Fold the thread before this run, read the input against it, and say how the run begins.

    Raises StaleHistory when the thread moved on since the history that the input edits.
    """
    settings = conf.get()
    if base(given) not in (None, f"{thread.epoch}-{run.offset}"):
        raise StaleHistory
    folder = store.snapshot(thread, at=run.offset).folder
    fold = folder.snapshot()
    last = store.placed_runs(thread.pk).filter(offset__lte=run.offset).exclude(pk=run.pk).last()
    rules = history.Rules(
        client_history=_client_history(run.agent),
        has_base=base(given) is not None,
        state=settings.STATE,
        instructions=settings.SYSTEM_MESSAGES,
    )
    merged = history.merge(
        fold,
        given,
        rules,
        fresh=last is None,
        known_states=store.earlier_state_hashes(run),
    )
    unlogged: list[protocol.Event] = []
    if merged.heal and last is not None:
        new = {message["id"] for message in merged.new}
        theirs = [m for m in given["messages"] if m["id"] not in new]
        # What this very post answers is pending no more, or a client might do it twice.
        answered = {message.get("toolCallId") for message in merged.new}
        pending = [call for call in fold.pending_tool_calls if call not in answered]
        before = fold._replace(pending_tool_calls=pending)
        ids = {"threadId": thread.thread_id, "runId": last.run_id}
        unlogged = protocol.restate(before, ids, theirs)
    mark = {"aguiapp": {"actor": run.actor}} if run.actor else {}
    events = [_run_started(given, merged.new, mark), *history.opening_events(merged, mark)]
    return Opening(folder, merged, events, unlogged)


#: What clients before 1.0 require of an echo, and what it never says.
_UNSAID: dict[str, Any] = {"tools": [], "context": []}


def _client_history(agent: str) -> bool:
    try:
        return agents.get(agent).history == "client"
    except NotFound:  # a run of an agent that is no more, being ended
        return False


def _run_started(
    given: dict[str, Any], new: list[dict[str, Any]], mark: dict[str, Any]
) -> protocol.Event:
    """RUN_STARTED with its echo: the ids and the new messages, nothing else of the input."""
    names = ("threadId", "runId", "parentRunId")
    ids: dict[str, Any] = {key: given[key] for key in names if key in given}
    event = {
        "type": "RUN_STARTED",
        **ids,
        "protocolVersion": protocol.PROTOCOL_VERSION,
        "input": {**ids, "messages": new, **(_UNSAID if conf.get().LEGACY_ECHO else {})},
    }
    return {**event, "metadata": mark} if mark else event
