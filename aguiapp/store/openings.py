"""How a run gets its row: it takes its thread's slot, waits for it, or attaches to the same post."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from django.db import IntegrityError, InterfaceError, OperationalError
from django.db.models import Q
from django.db.models.functions import Now

from aguiapp.errors import (
    InterruptsOpen,
    InvalidInput,
    NotFound,
    RunIdTaken,
    StaleHistory,
    StoreUnavailable,
    ThreadBusy,
)
from aguiapp.models import Command, Run, Thread
from aguiapp.store import inputs, lease, queue, reads, runs, sql


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a run is opened with; `thread_key` addresses a shared thread instead of the scope."""

    scope: str
    thread_id: str
    run_id: str
    agent: str
    text: str
    input_hash: str
    user_id: Any = None
    actor: str = ""
    parent_run: str = ""
    #: What becomes of the post while another run is active: reject, enqueue, or interrupt, which
    #: also cancels that run.
    busy: str = "reject"
    #: Interrupts and frontend calls that the post answers.
    resume: frozenset[str] = frozenset()
    answers: frozenset[str] = frozenset()
    #: Cursor of the history's end that an edit was made on.
    base: str | None = None
    thread_key: uuid.UUID | None = None
    kind: str = Run.Kind.AGENT
    mode: str = ""
    transport: str = ""
    #: What the run is held by, and what the one that it promotes is.
    token: int = field(default_factory=lease.new_token)
    next_token: int = field(default_factory=lease.new_token)


@dataclass(frozen=True)
class Opened:
    """The run's row, and whether it was there before (the same post, twice).

    A queued run waits: `next` is one that this process must drive instead, `active` the one that
    is in its way.
    """

    thread: Thread
    run: Run
    attached: bool = False
    next: Run | None = None
    active: Run | None = None


class Abandoned(Exception):
    """The thread's slot is held by a run whose process is gone: end that run, then try again."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.pk)
        self.run = run


class BeingEnded(ThreadBusy):
    """The run that held this thread is being ended just now: try again in a moment."""


class Contended(StoreUnavailable):
    """Others hold the thread's lock just now: try again in a moment."""


def open_run(opening: Opening) -> Opened:
    """Take the thread's slot and store the run with its input, or attach to the same post.

    Where the slot is taken, or others wait for it, `Opening.busy` decides: the run is queued, or
    refused. Raises ThreadBusy, QueueFull, RunIdTaken, InterruptsOpen, StaleHistory, NotFound,
    InvalidInput; Contended when it should be asked again, Abandoned when the slot belongs to a dead
    process. Nothing is stored when it raises.
    """
    for attempt in range(3):
        try:
            found = sql.connection()
            with sql.writing(found):
                return _open(found.alias, opening)
        except IntegrityError:  # another process made the thread or took the slot just now
            if attempt == 2:
                raise
        except (OperationalError, InterfaceError) as error:
            if sql.is_locked(error):
                raise Contended from error
            if attempt == 2:
                raise
            sql.discard_if_broken()  # its COMMIT may have arrived all the same
    raise AssertionError("unreachable")


def _open(alias: str, opening: Opening) -> Opened:
    thread = _locked_thread(alias, opening)
    ours = Run.objects.using(alias).filter(thread=thread)
    if same := ours.filter(run_id=opening.run_id).first():
        if same.input_hash != opening.input_hash or same.agent != opening.agent:
            raise RunIdTaken
        same.thread = thread
        return Opened(
            thread,
            same,
            attached=same.lease_token != opening.token,
            next=queue.promoted(opening.next_token),
        )
    active = ours.filter(status=Run.Status.RUNNING).first()
    if active is not None and _is_abandoned(active):
        raise Abandoned(active)
    _check_references(alias, thread, opening, active)
    end = reads.end_position(thread.pk)
    if opening.base is not None and opening.base != f"{thread.epoch}-{end}":
        raise StaleHistory(details={"cursor": f"{thread.epoch}-{end}"})
    if active is None and _goes_first(thread, opening):
        holder = {"lease_owner": lease.owner(), "lease_token": opening.token}
        times = {"started_at": Now(), "lease_expires": lease.expiry()}
        return Opened(thread, _create(alias, thread, opening, offset=end, **holder, **times))
    _check_may_wait(thread, opening, active)
    run = _create(alias, thread, opening, status=Run.Status.QUEUED)
    if active is not None and opening.busy == "interrupt":
        runs.leave_word(alias, active, Command.Kind.CANCEL, opening.actor)
    following = queue.promote(thread.pk, opening.next_token) if active is None else None
    return Opened(thread, run, next=following, active=active)


def _goes_first(thread: Thread, opening: Opening) -> bool:
    """Whether the free slot is this post's: an answer passes those who wait."""
    if opening.resume or not queue.queued(thread.pk).exists():
        return True
    return bool(opening.answers & queue.pending_calls(thread.pk))


def _check_may_wait(thread: Thread, opening: Opening, active: Run | None) -> None:
    if opening.busy != "reject" and not opening.resume:
        queue.check_room(thread.pk)
        return
    if active is None:
        raise ThreadBusy
    kind = BeingEnded if active.lease_owner.endswith(lease.ENDING) else ThreadBusy
    raise kind(details={"run": str(active.key), "runId": active.run_id})


def _create(alias: str, thread: Thread, opening: Opening, **state: Any) -> Run:
    return Run.objects.using(alias).create(
        thread=thread,
        run_id=opening.run_id,
        kind=opening.kind,
        agent=opening.agent,
        user_id=opening.user_id,
        actor=opening.actor,
        parent_run=opening.parent_run,
        input=inputs.save(thread.pk, opening.text),
        input_hash=opening.input_hash,
        mode=opening.mode,
        transport=opening.transport,
        **state,
    )


def _locked_thread(alias: str, opening: Opening) -> Thread:
    """The thread, locked by being written first: on SQLite a read before a write would fail."""
    threads = Thread.objects.using(alias)
    if opening.thread_key is not None:
        mine = threads.filter(key=opening.thread_key)
    else:
        mine = threads.filter(scope=opening.scope, thread_id=opening.thread_id)
    if mine.update(updated=Now()):
        return mine.get()
    if opening.thread_key is not None:
        raise NotFound
    return threads.create(
        scope=opening.scope, thread_id=opening.thread_id, owner_id=opening.user_id
    )


def _is_abandoned(run: Run) -> bool:
    if lease.is_dead(run.lease_owner):
        return True
    expired = Run.objects.using(sql.database()).filter(pk=run.pk, lease_expires__lt=Now())
    return expired.exists()


def _check_references(alias: str, thread: Thread, opening: Opening, active: Run | None) -> None:
    """Ids in the input must be ids of this owner: interrupts answered, and the parent run."""
    interrupts = [] if active is not None else queue.open_interrupts(thread.pk)
    waiting = {interrupt.get("id") for interrupt in interrupts}
    problems = [
        {"path": "resume", "message": f"{name!r} is no open interrupt of this thread"}
        for name in sorted(opening.resume - waiting)
        if active is None
    ]
    if opening.parent_run:
        known = Run.objects.using(alias).filter(
            Q(thread=thread) | Q(thread__scope=opening.scope), run_id=opening.parent_run
        )
        if not known.exists():
            problems.append({"path": "parentRunId", "message": "there is no such run"})
    if problems:
        raise InvalidInput("The input names things that are not here.", details=problems)
    if open_left := waiting - opening.resume:
        raise InterruptsOpen(details=sorted(map(str, open_left)))
