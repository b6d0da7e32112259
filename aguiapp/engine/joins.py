"""How somebody joins a thread who did not watch it: a prologue, and where the log goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from aguiapp import protocol, store
from aguiapp.models import Run, Thread
from aguiapp.protocol.trace import RUNNING


class Join(NamedTuple):
    """Unlogged events that restate a thread up to `position`, and the run that goes on there."""

    prologue: list[protocol.Event]
    position: int
    run: Run | None


def join(thread: Thread, messages: Sequence[dict[str, Any]] = (), *, at: int | None = None) -> Join:
    """Join a thread at its end, or at a position, holding `messages`; blocks on the database."""
    found = store.snapshot(thread, at)
    fold, position = found.fold, found.position
    last = store.run_at(thread.pk, position - 1) if position else None
    prologue = protocol.join(fold, _run_started(thread, last), messages) if last else []
    if last is not None and fold.trace["phase"] == RUNNING:
        return Join(prologue, position, last)
    position = store.first_kept(thread.pk, position)  # what follows may be kept no more
    return Join(prologue, position, store.run_at(thread.pk, position))


class Gap(NamedTuple):
    """Events that are kept no more, `first` to `last` by position, and what stands for them."""

    first: int
    last: int
    prologue: list[protocol.Event]

    @property
    def value(self) -> dict[str, int]:
        """What is missing, as it is told."""
        return {"from": self.first, "to": self.last}

    @property
    def marked(self) -> list[protocol.Event]:
        """The prologue for streams that carry nothing but events."""
        marker = {"type": "CUSTOM", "name": "aguiapp.gap", "value": self.value}
        return [self.prologue[0], marker, *self.prologue[1:]]


def gap(thread: Thread, after: int, run: Run | None = None) -> Gap | None:
    """What is missing directly behind a position, of that run alone or of the whole thread.

    Blocks on the database.
    """
    if run is None:
        first, kept = after, store.first_kept(thread.pk, after)
    else:
        first = max(after, run.offset or 0)
        kept = max(first, (run.offset or 0) + run.pruned_to)
    return None if kept == first else Gap(first + 1, kept, _prologue(thread, kept))


def _prologue(thread: Thread, kept: int) -> list[protocol.Event]:
    """The thread at a position where a gap ends, as far as it is known."""
    run = store.run_at(thread.pk, kept)
    within = run is not None and (run.offset or 0) < kept
    if run is not None and within and store.snapshot(thread, kept).position < kept:
        # Nothing is known of the run before: it goes on all the same.
        return [*join(thread, at=run.offset).prologue, _started(thread, run)]
    if prologue := join(thread, at=kept).prologue:
        return prologue
    started = {**_started(thread, None), "runId": f"before-{kept + 1}"}
    ids = {"threadId": thread.thread_id, "runId": started["runId"]}
    return [started, {"type": "RUN_FINISHED", **ids, "outcome": {"type": "success"}}]


def _run_started(thread: Thread, run: Run) -> dict[str, Any]:
    """The run's RUN_STARTED, which says what version it spoke; its ids where that is gone."""
    for row in store.read(run.pk, limit=1):
        event = json.loads(row.payload)
        if isinstance(event, dict) and event.get("type") == "RUN_STARTED":
            return event
    return _started(thread, run)


def _started(thread: Thread, run: Run | None) -> dict[str, Any]:
    ids = {"threadId": thread.thread_id, "runId": run.run_id if run else ""}
    return {"type": "RUN_STARTED", **ids, "protocolVersion": protocol.PROTOCOL_VERSION}
