"""A run's row from its opening to its end: the slot of a thread, the lease and its token."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import IntegrityError, InterfaceError, OperationalError
from django.db.models import Q
from django.db.models.functions import Now

from aguiapp import conf
from aguiapp.errors import (
    Fenced,
    InterruptsOpen,
    InvalidInput,
    NotFound,
    RunIdTaken,
    StaleHistory,
    StoreUnavailable,
    ThreadBusy,
)
from aguiapp.models import Command, Run, Thread
from aguiapp.store import inputs, lease, queue, reads, sql
from aguiapp.store.sql import Row


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
    runs = Run.objects.using(alias).filter(thread=thread)
    if same := runs.filter(run_id=opening.run_id).first():
        if same.input_hash != opening.input_hash or same.agent != opening.agent:
            raise RunIdTaken
        same.thread = thread
        return Opened(
            thread,
            same,
            attached=same.lease_token != opening.token,
            next=queue.promoted(opening.next_token),
        )
    active = runs.filter(status=Run.Status.RUNNING).first()
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
        _leave_word(alias, active, Command.Kind.CANCEL, opening.actor)
    following = queue.promote(thread.pk, opening.next_token) if active is None else None
    return Opened(thread, run, next=following, active=active)


def _goes_first(thread: Thread, opening: Opening) -> bool:
    """Whether the free slot is this post's: an answer passes those who wait."""
    if not queue.queued(thread.pk).exists() or opening.resume:
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


@dataclass(kw_only=True)
class Ending:
    """What a run's row says once it has its terminal event."""

    status: str
    counts: dict[str, int] = field(default_factory=dict)
    result: Any = None
    outcome: Any = None
    usage: Any = None
    error_code: str = ""
    error_message: str = ""
    error_detail: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)
    fold_hash: str = ""
    first_event_at: datetime | None = None


#: How often a run's end is written when its connection breaks; who asked may go on after that.
FINISH_ATTEMPTS = 3


def finish(
    run_id: int,
    token: int,
    rows: Sequence[Row],
    total_bytes: int,
    ending: Ending,
    *,
    next_token: int = 0,
    again: bool = False,
) -> Run | None:
    """Write the last rows with the terminal event and free the slot, in one transaction.

    With `next_token` the thread's next queued run takes the slot in the same transaction, held by
    that token; returns it, for the caller to drive. Raises Fenced when the token is gone: somebody
    else ended the run. `again` says that an earlier attempt failed and may have arrived all the
    same.
    """
    found = sql.connection()
    for attempt in range(FINISH_ATTEMPTS):
        try:
            with sql.writing(found):
                thread_id = _finish(found, run_id, token, rows, total_bytes, ending)
                return queue.promote(thread_id, next_token) if next_token else None
        except Fenced:
            if not ((again or attempt) and _ended_with(run_id, rows[-1].seq, ending.status)):
                raise
            return queue.promoted(next_token) if next_token else None
        except (OperationalError, InterfaceError) as error:
            last = attempt == FINISH_ATTEMPTS - 1
            if last or found.in_atomic_block or sql.is_locked(error):
                raise
            sql.discard_if_broken()  # its COMMIT may have arrived all the same
    raise AssertionError("unreachable")


def _finish(
    found: Any, run_id: int, token: int, rows: Sequence[Row], total_bytes: int, ending: Ending
) -> int:
    """End the run; the id of its thread, which is locked from here on."""
    runs = Run.objects.using(found.alias)
    changed = runs.filter(pk=run_id, lease_token=token, status=Run.Status.RUNNING).update(
        **_storable(vars(ending)),
        last_seq=rows[-1].seq,
        bytes=total_bytes,
        lease_token=None,
        lease_expires=None,
        finished_at=Now(),
    )
    if not changed:
        raise Fenced
    # The commit before this one may have arrived although its answer did not.
    have = sql.last_seq(run_id)
    sql.insert(found, [(run_id, [row for row in rows if row.seq > have])])
    thread_id: int = runs.values_list("thread_id", flat=True).get(pk=run_id)
    Thread.objects.using(found.alias).filter(pk=thread_id).update(updated=Now())
    commands = Command.objects.using(found.alias).filter(run_id=run_id, state=Command.State.PENDING)
    commands.update(state=Command.State.DONE)
    return thread_id


_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def _storable(value: Any) -> Any:
    """The value with NUL and lone halves as U+FFFD: PostgreSQL takes neither in text or JSON.

    The event itself keeps them as escapes; these columns are for people and filters.
    """
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_storable(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    return value


def _ended_with(run_id: int, seq: int, status: str) -> bool:
    runs = Run.objects.using(sql.database())
    return runs.filter(pk=run_id, last_seq=seq, status=status, lease_token=None).exists()


def add_findings(run_id: int, findings: Sequence[dict[str, Any]]) -> None:
    """Note on an ended run what was seen after its end."""
    found = sql.connection()
    with sql.writing(found):
        run = Run.objects.using(found.alias).get(pk=run_id)
        run.findings = [*run.findings, *_storable(findings)]
        run.save(using=found.alias, update_fields=["findings"])


def renew(rows: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """Prolong the leases of (run id, token, last seq, bytes); the ids whose token is gone."""
    if not rows:
        return []
    found = sql.connection()
    with sql.writing(found):
        sql.renew(found, rows, conf.get().LEASE_SECONDS)
    ids = {run: token for run, token, _, _ in rows}
    standing = Run.objects.using(found.alias).filter(pk__in=ids)
    tokens = dict(standing.values_list("pk", "lease_token"))
    return [run for run, token in ids.items() if tokens.get(run) != token]


def abandoned() -> list[Run]:
    """Running runs whose lease ran out or whose process on this host is dead."""
    running = Run.objects.using(sql.database()).filter(status=Run.Status.RUNNING)
    late = set(running.filter(lease_expires__lt=Now()).values_list("pk", flat=True))
    return [run for run in running if run.pk in late or lease.is_dead(run.lease_owner)]


def holds(run: Run) -> bool:
    """Whether the run's token, as we know it, still stands."""
    runs = Run.objects.using(sql.database())
    return runs.filter(pk=run.pk, lease_token=run.lease_token).exists()


def take(run: Run) -> int | None:
    """Become the holder of a run, to end it; None when somebody was faster."""
    token = lease.new_token()
    found = sql.connection()
    try:
        with sql.writing(found):
            runs = Run.objects.using(found.alias).filter(
                pk=run.pk, status=Run.Status.RUNNING, lease_token=run.lease_token
            )
            taken = runs.update(
                lease_token=token,
                lease_owner=lease.owner() + lease.ENDING,
                lease_expires=lease.expiry(),
            )
    except OperationalError:  # its row is locked: whoever holds it is at work on it
        return None
    return token if taken else None


def command(run: Run, kind: str, actor: str, payload: str = "") -> Command:
    """Leave word for the process that drives the run."""
    found = sql.connection()
    with sql.writing(found):
        return _leave_word(found.alias, run, kind, actor, payload)


def _leave_word(alias: str, run: Run, kind: str, actor: str, payload: str = "") -> Command:
    return Command.objects.using(alias).create(
        thread_id=run.thread_id, run=run, kind=kind, actor=actor, payload=payload
    )


def pending_commands(run_ids: Sequence[int]) -> list[Command]:
    """What waits for these runs, oldest first."""
    waiting = Command.objects.using(sql.database()).filter(
        run_id__in=run_ids, state=Command.State.PENDING
    )
    return list(waiting.order_by("pk"))


def earlier_state_hashes(run: Run) -> set[str]:
    """Hashes of the folded state at the end of each run of the thread before this one."""
    before = reads.placed_runs(run.thread_id).filter(offset__lt=run.offset)
    hashes = before.exclude(pk=run.pk).exclude(fold_hash="")
    return set(hashes.values_list("fold_hash", flat=True))


def refresh(run: Run) -> Run:
    """The run's row as it stands now."""
    return refresh_by_id(run.pk)


def refresh_by_id(run_id: int) -> Run:
    """See refresh()."""
    return Run.objects.using(sql.database()).get(pk=run_id)
