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
    if last is None:
        return Join([], position, store.run_at(thread.pk, position))
    prologue = protocol.join(fold, _run_started(thread, last), messages)
    goes_on = fold.trace["phase"] == RUNNING
    return Join(prologue, position, last if goes_on else store.run_at(thread.pk, position))


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


def gap(thread: Thread, after: int) -> Gap | None:
    """What is missing directly behind a position; blocks on the database."""
    kept = store.first_kept(thread.pk, after)
    if kept == after:
        return None
    prologue = join(thread, at=kept).prologue
    if not prologue:  # nothing before it can be restated
        ids = {"threadId": thread.thread_id, "runId": f"before-{kept + 1}"}
        started = {"type": "RUN_STARTED", **ids, "protocolVersion": protocol.PROTOCOL_VERSION}
        prologue = [started, {"type": "RUN_FINISHED", **ids, "outcome": {"type": "success"}}]
    return Gap(after + 1, kept, prologue)


def _run_started(thread: Thread, run: Run) -> dict[str, Any]:
    """The run's RUN_STARTED, which says what version it spoke; its ids where that is gone."""
    for row in store.read(run.pk, limit=1):
        event = json.loads(row.payload)
        if isinstance(event, dict) and event.get("type") == "RUN_STARTED":
            return event
    return {"threadId": thread.thread_id, "runId": run.run_id}
