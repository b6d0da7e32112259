"""How somebody joins a thread who did not watch it: a prologue, and where the log goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from aguiapp import protocol, store
from aguiapp.models import Run, Thread
from aguiapp.protocol.restate import run_started
from aguiapp.protocol.trace import RUNNING


class Join(NamedTuple):
    """Unlogged events that restate a thread up to `position`, and the run that goes on there."""

    prologue: list[protocol.Event]
    position: int
    run: Run | None


def join(thread: Thread, messages: Sequence[dict[str, Any]] = (), *, at: int | None = None) -> Join:
    """Join a thread at its end, or at a position, holding `messages`; blocks on the database."""
    found = store.snapshot(thread, at)
    prologue, last = _restated(thread, found, messages)
    if last is not None and found.fold.trace["phase"] == RUNNING:
        return Join(prologue, found.position, last)
    return Join(prologue, *store.next_kept(thread.pk, found.position))


def _restated(
    thread: Thread, found: store.ThreadSnapshot, messages: Sequence[dict[str, Any]] = ()
) -> tuple[list[protocol.Event], Run | None]:
    """The folded thread as events, and the run of its last event."""
    last = store.run_at(thread.pk, found.position - 1) if found.position else None
    if last is None:
        return [], None
    return protocol.join(found.fold, _run_started(thread, last), messages), last


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
    found, run = store.snapshot(thread, kept), store.run_at(thread.pk, kept)
    if run is not None and found.position < kept and (run.offset or 0) < kept:
        # Nothing is known of the run before: it goes on all the same.
        return [*join(thread, at=run.offset).prologue, run_started(_ids(thread, run.run_id))]
    if prologue := _restated(thread, found)[0]:
        return prologue
    ids = _ids(thread, f"before-{kept + 1}")
    finished = {"type": "RUN_FINISHED", **ids, "outcome": {"type": "success"}}
    return [run_started(ids), finished]


def _run_started(thread: Thread, run: Run) -> dict[str, Any]:
    """The run's RUN_STARTED, which says what version it spoke; its ids where that is gone."""
    for row in store.read(run.pk, limit=1):
        event = json.loads(row.payload)
        if isinstance(event, dict) and event.get("type") == "RUN_STARTED":
            return event
    return _ids(thread, run.run_id)


def _ids(thread: Thread, run_id: str) -> dict[str, Any]:
    return {"threadId": thread.thread_id, "runId": run_id}
