"""Turns that wait for their thread: who is next, and who may not have the slot yet.

Everything here that changes a run's place happens under the lock of its thread.
"""

from __future__ import annotations

import json
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet, Subquery
from django.db.models.functions import Now

from aguiapp import conf
from aguiapp.errors import QueueFull
from aguiapp.models import Run, Thread
from aguiapp.store import inputs, lease, reads, sql

#: Ends that say what is open from then on; after an error it is what was open before.
ENDS = (Run.Status.SUCCESS, Run.Status.CANCELLED, Run.Status.INTERRUPT)


def queued(thread_id: int) -> QuerySet[Run]:
    """The turns that wait, in the order in which they will run."""
    runs = Run.objects.using(sql.database())
    return runs.filter(thread_id=thread_id, status=Run.Status.QUEUED).order_by("pk")


def check_room(thread_id: int) -> None:
    """Raise QueueFull when no more turns may wait."""
    limit = conf.get().QUEUE_RUNS
    if queued(thread_id).count() >= limit:
        raise QueueFull(details={"limit": limit})


def open_interrupts(thread_id: int) -> list[dict[str, Any]]:
    """The interrupts that wait for an answer: an error keeps them, any other end replaces them."""
    last = reads.placed_runs(thread_id).filter(status__in=ENDS).order_by("-offset", "-pk").first()
    if last is None or last.status != Run.Status.INTERRUPT:
        return []
    return list((last.outcome or {}).get("interrupts") or [])


def pending_calls(thread_id: int) -> set[str]:
    """Frontend calls that the last run left to a client; those of a failed one are nobody's."""
    last = reads.placed_runs(thread_id).order_by("-offset", "-pk").first()
    if last is None or last.status != Run.Status.SUCCESS:
        return set()
    return set((last.outcome or {}).get("pendingToolCallIds") or [])


def _next(thread_id: int) -> Run | None:
    """Whose turn it is: while a frontend call is pending, the one's that answers it."""
    turns = list(queued(thread_id).select_related("thread", "user"))
    if not turns or open_interrupts(thread_id):
        return None
    if pending := pending_calls(thread_id):
        return next((run for run in turns if pending & _answers(run)), None)
    return turns[0]


def _answers(run: Run) -> set[str]:
    """The calls that a waiting turn answers."""
    messages = json.loads(inputs.rebuild(run)).get("messages", ())
    return {message["toolCallId"] for message in messages if message["role"] == "tool"}


def promote(thread_id: int, token: int) -> Run | None:
    """Give the thread's free slot to the next turn, held by this process with that token.

    None when no turn waits, or an answer must come first. Inside a transaction that holds the
    thread's lock and found the slot free.
    """
    runs = Run.objects.using(sql.database())
    while (run := _next(thread_id)) is not None:
        # Somebody who holds its row must not hold up the end of the run before it.
        free = runs.select_for_update(skip_locked=True).filter(pk=run.pk)
        if free.values_list("status", flat=True).first() is None:
            return None
        run.offset = reads.end_position(thread_id)
        run.status = Run.Status.RUNNING
        run.lease_owner, run.lease_token = lease.owner(), token
        waiting = runs.filter(pk=run.pk, status=Run.Status.QUEUED)
        if waiting.update(
            offset=run.offset,
            status=run.status,
            lease_owner=run.lease_owner,
            lease_token=token,
            lease_expires=lease.expiry(),
            started_at=Now(),
        ):
            return run
    return None


def give_back(run: Run) -> bool:
    """Let a promoted run wait again that nobody began; False when it is not ours any more."""
    found = sql.connection()
    with sql.writing(found):
        ours = Run.objects.using(found.alias).filter(
            pk=run.pk, status=Run.Status.RUNNING, lease_token=run.lease_token
        )
        return bool(
            ours.update(
                status=Run.Status.QUEUED,
                offset=None,
                lease_owner="",
                lease_token=None,
                lease_expires=None,
                started_at=None,
            )
        )


def claim(thread_id: int) -> Run | None:
    """The next turn of a thread, now this process's to drive; None when nothing may start."""
    found = sql.connection()
    with sql.writing(found):
        Thread.objects.using(found.alias).select_for_update().get(pk=thread_id)
        if reads.active_run(thread_id) is not None:
            return None
        return promote(thread_id, lease.new_token())


def promoted(token: int) -> Run | None:
    """The run that was promoted with that token, if it was."""
    runs = Run.objects.using(sql.database()).select_related("thread", "user")
    return runs.filter(lease_token=token, status=Run.Status.RUNNING).first()


def claimable() -> list[int]:
    """Threads whose slot is free and where somebody waits.

    Not those that wait for the answer to an interrupt; a pending call may be answered by a turn
    that waits, which `claim` finds out.
    """
    runs = Run.objects.using(sql.database())
    active = runs.filter(thread_id=OuterRef("thread_id"), status=Run.Status.RUNNING)
    waiting = runs.filter(~Exists(active), status=Run.Status.QUEUED)
    threads = list(waiting.order_by().values_list("thread_id", flat=True).distinct())
    ended = runs.filter(thread_id=OuterRef("pk"), offset__isnull=False, status__in=ENDS)
    newest = ended.order_by("-offset", "-pk").values("status")[:1]
    last = Thread.objects.using(sql.database()).filter(pk__in=threads)
    statuses = last.annotate(last=Subquery(newest)).values_list("pk", "last")
    return [pk for pk, status in statuses if status != Run.Status.INTERRUPT]


def withdraw(run_id: int) -> bool:
    """Cancel a turn that still waits; False when it waits no more."""
    found = sql.connection()
    with sql.writing(found):
        waiting = Run.objects.using(found.alias).filter(pk=run_id, status=Run.Status.QUEUED)
        return bool(waiting.update(status=Run.Status.CANCELLED, finished_at=Now()))
