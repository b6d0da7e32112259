"""A run's row once it has its place: its end, the lease and its token, and word left for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import InterfaceError, OperationalError
from django.db.models.functions import Now

from aguiapp import conf
from aguiapp.errors import (
    Fenced,
)
from aguiapp.models import Command, Run, Thread
from aguiapp.store import lease, queue, reads, sql
from aguiapp.store.sql import Row


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
        return leave_word(found.alias, run, kind, actor, payload)


def leave_word(alias: str, run: Run, kind: str, actor: str, payload: str = "") -> Command:
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
