"""Reading the log: pages of events, and the fold of a thread at any position."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import BigIntegerField, F, Func, Max, OuterRef, Q, QuerySet, Subquery

from aguiapp import conf, protocol
from aguiapp.models import Run, RunEvent, Thread
from aguiapp.store import sql


class Stored(NamedTuple):
    """One event as it was committed."""

    seq: int
    type: int
    payload: str
    created: datetime


#: A page of events holds at most this many bytes, but always one event.
PAGE_BYTES = 1024 * 1024


class OctetLength(Func):
    """Bytes of a text; PostgreSQL knows them without reading a long text itself."""

    function = "OCTET_LENGTH"
    output_field = BigIntegerField()

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        return self.as_sql(compiler, connection, function="LENGTH", **extra)


def read(run_id: int, after: int = 0, limit: int = 1000) -> list[Stored]:
    """A page of a run's events with a seq above `after`, in order: at most `limit` of them."""
    events = RunEvent.objects.using(sql.database()).filter(run_id=run_id, seq__gt=after)
    sizes = events.order_by("seq").values_list("seq", OctetLength("payload"))[:limit]
    until, total = after, 0
    for seq, size in sizes:
        total += size
        if total > PAGE_BYTES and until > after:
            break
        until = seq
    rows = events.filter(seq__lte=until).order_by("seq")
    found = rows.values_list("seq", "type", "payload", "created") if until > after else ()
    return [Stored(*row) for row in found]


def deliverable(run_id: int, offset: int, after: int, limit: int) -> list[Stored]:
    """See read(); a row that is no JSON any more is replaced by a CUSTOM event that says so.

    One damaged row must cost no reader the others, nor the count of positions.
    """
    return [
        row if _is_json(row.payload) else row._replace(payload=_unreadable(offset + row.seq))
        for row in read(run_id, after, limit)
    ]


def _is_json(payload: str) -> bool:
    try:
        json.loads(payload)
    except (ValueError, RecursionError):
        return False
    return "\n" not in payload


def _unreadable(position: int) -> str:
    value = {"position": position}
    return protocol.dumps({"type": "CUSTOM", "name": "aguiapp.unreadable", "value": value})


def pages(run_id: int, after: int = 0, until: int | None = None) -> Iterator[list[Stored]]:
    """All events of a run from above `after` up to and with `until`, page by page."""
    limit = conf.get().PAGE_EVENTS
    while page := read(run_id, after, limit):
        if until is not None and page[-1].seq >= until:
            yield [row for row in page if row.seq <= until]
            return
        yield page
        after = page[-1].seq


def placed_runs(thread_id: int) -> QuerySet[Run]:
    """The runs of a thread that have a place in its history, in that order."""
    runs = Run.objects.using(sql.database())
    return runs.filter(thread_id=thread_id, offset__isnull=False).order_by("offset", "pk")


def run_at(thread_id: int, after: int, run_id: int | None = None) -> Run | None:
    """The run that holds the first event behind position `after`, or will hold it."""
    runs = placed_runs(thread_id)
    if run_id is not None:
        runs = runs.filter(pk=run_id)
    run = runs.filter(offset__lte=after).order_by("-offset", "-pk").first()
    if run is not None and (not run.ended or (run.offset or 0) + run.last_seq > after):
        return run
    return runs.filter(offset__gt=after).first()


def first_kept(thread_id: int, after: int) -> int:
    """The position behind which events are kept: `after`, or the end of a gap that begins there."""
    runs = placed_runs(thread_id)
    holder = runs.filter(offset__lte=after).order_by("-offset", "-pk").first()
    since = runs if holder is None else runs.filter(offset__gte=holder.offset)
    behind = since.annotate(end=F("offset") + F("last_seq")).filter(
        Q(end__gt=after) | Q(status=Run.Status.RUNNING)
    )
    kept = behind.filter(Q(pruned_to__lt=F("last_seq")) | Q(status=Run.Status.RUNNING)).first()
    if kept is not None and kept.offset is not None:
        return max(after, kept.offset + kept.pruned_to)
    last = behind.last()  # all that follows is gone
    return after if last is None or last.offset is None else last.offset + last.last_seq


def next_kept(thread_id: int, after: int) -> tuple[int, Run | None]:
    """Where reading goes on behind a position, and the run that holds, or will hold, what follows."""
    run = run_at(thread_id, after)
    if run is None or (run.offset or 0) + run.pruned_to <= after:
        return after, run
    kept = first_kept(thread_id, after)
    return kept, run_at(thread_id, kept)


def run_by_key(thread_id: int, key: uuid.UUID) -> Run | None:
    """The run of this thread with that key."""
    return Run.objects.using(sql.database()).filter(thread_id=thread_id, key=key).first()


def active_run(thread_id: int) -> Run | None:
    """The run that has the thread's slot."""
    runs = Run.objects.using(sql.database())
    return runs.filter(thread_id=thread_id, status=Run.Status.RUNNING).first()


def end_position(thread_id: int) -> int:
    """The position of the thread's last stored event, 0 when it has none."""
    run = placed_runs(thread_id).order_by("-offset", "-pk").first()
    if run is None or run.offset is None:
        return 0
    return run.offset + last_seq(run)


def last_seq(run: Run) -> int:
    """The highest stored seq of the run, exact also while it runs; 0 when it has no event."""
    return run.last_seq if run.ended else sql.last_seq(run.pk)


#: Where a thread stands: its last run, that run's status and last seq.
Mark = tuple[int, str, int]


def marks(thread_ids: Sequence[int]) -> dict[int, Mark]:
    """Where each of these threads stands, in three queries however many there are."""
    alias = sql.database()
    placed = Run.objects.filter(thread=OuterRef("pk"), offset__isnull=False)
    newest = placed.order_by("-offset", "-pk").values("pk")[:1]
    threads = Thread.objects.using(alias).filter(pk__in=thread_ids)
    last = dict(threads.annotate(last=Subquery(newest)).values_list("pk", "last"))
    runs = Run.objects.using(alias).in_bulk([run for run in last.values() if run is not None])
    running = [run.pk for run in runs.values() if not run.ended]
    events = RunEvent.objects.using(alias).filter(run_id__in=running)
    seqs = dict(events.values_list("run_id").annotate(last=Max("seq")))
    found: dict[int, Mark] = {}
    for thread_id in thread_ids:
        run = runs.get(last.get(thread_id) or 0)
        if run is not None:
            found[thread_id] = run.pk, run.status, seqs.get(run.pk, run.last_seq)
    return found


@dataclass
class ThreadSnapshot:
    """A thread folded up to `position`; `unreadable` lists positions that had to be skipped."""

    position: int
    folder: protocol.Fold
    unreadable: list[int] = field(default_factory=list)

    @property
    def fold(self) -> protocol.Snapshot:
        """Messages, state and open items."""
        return self.folder.snapshot()

    def feed(self, offset: int, page: Sequence[Stored]) -> None:
        """Fold a page of a run that begins at `offset`; an unreadable row breaks only itself."""
        for row in page:
            self.position = offset + row.seq
            try:
                self.folder.feed(readable(row.payload))
            except (ValueError, protocol.ProtocolError):
                self.unreadable.append(self.position)


def snapshot(thread: Thread, at: int | None = None) -> ThreadSnapshot:
    """Fold every run of the thread up to position `at` (default: everything stored)."""
    found = ThreadSnapshot(0, protocol.Fold())
    runs = placed_runs(thread.pk)
    if at is not None:
        runs = runs.filter(offset__lt=at)
    for run in runs:
        offset = run.offset or 0
        until = None if at is None else at - offset
        for page in pages(run.pk, until=until):
            found.feed(offset, page)
    return found


def readable(payload: str) -> protocol.Event:
    """The stored event as the fold takes it: what a remote added is stripped."""
    event = protocol.enforce(protocol.loads(payload)).event
    if event is None:
        raise ValueError("not an AG-UI event")
    return event
