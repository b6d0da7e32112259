"""The group commit: what all runs of a process append becomes one transaction after another.

One commit is in flight at a time; what arrives meanwhile goes into the next. Nothing is handed
to readers before its commit returned. The commit runs in a thread of its own, which a saturated
event loop would starve for seconds; one 1 ms timer that releases the interpreter keeps it alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from django.db import InterfaceError, OperationalError

from aguiapp import conf
from aguiapp.errors import Fenced
from aguiapp.models import Run
from aguiapp.store import sql, workers
from aguiapp.store.sql import Row

#: Pause between two commits of a busy writer; one that was idle commits at once. It leaves the
#: host's own writes their turn, and fewer, larger commits are what SQLite is fast with: 0.42 of
#: the peer of `make bench` with a pause as short as the commit itself, 0.79 with this one.
GAP_SECONDS = 0.002
#: Pause before rows of a run that somebody else holds locked are tried again.
RETRY_SECONDS = 0.01


class Watcher(Protocol):
    """What a lane reports to: rows that are safe, or the reason why no more can be."""

    def committed(self, rows: Sequence[Row]) -> None: ...

    def lost(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class Lane:
    """One run's place in the writer: what it appended and what of that is committed."""

    run_id: int
    token: int
    watcher: Watcher
    seq: int = 0
    bytes: int = 0
    uncommitted: int = 0
    pending: list[Row] = field(default_factory=list)
    in_flight: bool = False
    failing_since: float = 0.0
    error: Exception | None = None
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, code: int, payload: str, created: int) -> None:
        """Give the event its seq and let it wait for a commit."""
        self.seq += 1
        self.pending.append(Row(self.seq, code, payload, created))
        size = len(payload)
        self.bytes += size
        self.uncommitted += size

    def claim(self) -> tuple[int, int, int, int]:
        """What renews the lease, see `store.renew`; any thread may ask."""
        return self.run_id, self.token, self.seq - len(self.pending), self.bytes

    async def below(self, limit: int) -> None:
        """Wait until at most `limit` bytes are uncommitted; raises what the lane was lost to."""
        while self.error is None and self.uncommitted > limit:
            self._moved.clear()
            await self._moved.wait()
        if self.error is not None:
            raise self.error

    async def settle(self) -> list[Row]:
        """Wait for the commit in flight and take back what is still pending."""
        while self.in_flight:
            self._moved.clear()
            await self._moved.wait()
        if self.error is not None:
            raise self.error
        rows, self.pending = self.pending, []
        return rows

    def moved(self) -> None:
        """Wake who waits for a commit of this lane."""
        self._moved.set()

    def landed(self, rows: Sequence[Row]) -> None:
        """Note that these rows are committed, and pass them on."""
        self.uncommitted -= sum(len(row.payload) for row in rows)
        self.failing_since = 0.0
        self.watcher.committed(rows)
        self._moved.set()

    def give_up(self, error: Exception) -> None:
        """No row of this run can be written any more."""
        if self.error is None:
            self.error = error
            self.pending.clear()
            self.watcher.lost(error)
        self._moved.set()


@dataclass(frozen=True, slots=True)
class Job:
    """The rows of one run in one commit."""

    run_id: int
    token: int
    rows: list[Row]


class Again(Exception):
    """The rows could not be written now, but may be later."""


Result = Exception | None


def commit(jobs: Sequence[Job]) -> list[Result]:
    """Write the rows of many runs; for each job None, Again, Fenced or its own error."""
    try:
        return _commit_together(jobs)
    except Exception:  # whatever one run's rows did, the others are written without them
        sql.discard_if_broken()
        return [_commit_alone(job) for job in jobs]


def _commit_together(jobs: Sequence[Job]) -> list[Result]:
    found = sql.connection()
    with sql.writing(found, waits=False):
        held = sql.held(found, [(job.run_id, job.token) for job in jobs])
        sql.insert(found, [(job.run_id, job.rows) for job in jobs if job.run_id in held])
    return [None if job.run_id in held else _commit_alone(job) for job in jobs]


def _commit_alone(job: Job) -> Result:
    """One run by itself, so that an innocent run never sees another's failure."""
    try:
        found = sql.connection()
        with sql.writing(found, waits=False):
            if not sql.held(found, [(job.run_id, job.token)]):
                standing = Run.objects.using(found.alias).filter(
                    pk=job.run_id, lease_token=job.token
                )
                return Again("locked") if standing.exists() else Fenced()
            # The commit before this one may have arrived although its answer did not.
            have = sql.last_seq(job.run_id)
            sql.insert(found, [(job.run_id, [row for row in job.rows if row.seq > have])])
    except (OperationalError, InterfaceError) as error:
        sql.discard_if_broken()
        return Again(str(error))
    except Exception as error:  # this run's own: its driver is told, the others go on
        return error
    return None


class Writer:
    """The group commit of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._dirty: dict[Lane, None] = {}
        self._busy = False
        self._scheduled = False
        self._last_end = 0.0

    def append(self, lane: Lane, code: int, payload: str, created: int) -> None:
        """Add an event to the next commit; `below` is how a producer is slowed."""
        lane.add(code, payload, created)
        self._dirty[lane] = None
        if not self._scheduled and not self._busy:
            self._schedule()

    async def below(self, lane: Lane, limit: int) -> None:
        """Wait until at most `limit` bytes of the lane are uncommitted."""
        if lane.uncommitted > limit or lane.error is not None:
            await lane.below(limit)

    def _schedule(self) -> None:
        self._scheduled = True
        gap = GAP_SECONDS - (time.monotonic() - self._last_end)
        if gap > 0:
            self._loop.call_later(gap, self._start)
        else:
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        self._scheduled = False
        if self._busy:
            return
        work: list[tuple[Lane, Job]] = []
        for lane in self._dirty:
            if lane.pending and lane.error is None:
                work.append((lane, Job(lane.run_id, lane.token, lane.pending)))
                lane.pending = []
                lane.in_flight = True
        self._dirty.clear()
        if not work:
            return
        self._busy = True
        answer = workers.submit("writer", commit, [job for _, job in work])
        answer.add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(self._finish, work, done)
        )
        self._keep_alive()

    def _keep_alive(self) -> None:
        if self._busy:
            time.sleep(0)
            self._loop.call_later(0.001, self._keep_alive)

    def _finish(self, work: list[tuple[Lane, Job]], done: Future[list[Result]]) -> None:
        self._busy = False
        self._last_end = time.monotonic()
        failure = done.exception()
        results = [failure] * len(work) if failure is not None else done.result()
        retry = False
        for (lane, job), result in zip(work, results, strict=True):
            lane.in_flight = False
            if result is None:
                lane.landed(job.rows)
            elif isinstance(result, Again) and self._may_retry(lane):
                lane.pending[:0] = job.rows
                self._dirty[lane] = None
                retry = True
                lane.moved()
            else:
                lane.give_up(
                    result if isinstance(result, Exception) else RuntimeError(repr(result))
                )
        if retry:
            self._scheduled = True
            self._loop.call_later(RETRY_SECONDS, self._start)
        elif self._dirty and not self._scheduled:
            self._schedule()

    def _may_retry(self, lane: Lane) -> bool:
        lane.failing_since = lane.failing_since or time.monotonic()
        return time.monotonic() - lane.failing_since < conf.get().LEASE_SECONDS


class InlineWriter:
    """Appends in the caller's own thread and transaction, so that a host's TestCase sees them."""

    def append(self, lane: Lane, code: int, payload: str, created: int) -> None:
        """Collect the event; `below` and the run's end write it."""
        lane.add(code, payload, created)

    async def below(self, lane: Lane, limit: int) -> None:
        """Write what the lane holds if that is more than `limit` bytes."""
        if lane.uncommitted <= limit or not lane.pending:
            return
        rows, lane.pending = lane.pending, []
        (result,) = await workers.call(commit, [Job(lane.run_id, lane.token, rows)])
        if result is None:
            lane.landed(rows)
        else:
            lane.give_up(result)
            raise result


_writers: WeakKeyDictionary[asyncio.AbstractEventLoop, Writer] = WeakKeyDictionary()


def current() -> Writer | InlineWriter:
    """The writer of the running loop, made at its first use."""
    if conf.get().WRITER == "inline":
        return InlineWriter()
    loop = asyncio.get_running_loop()
    found = _writers.get(loop)
    if found is None:
        found = _writers[loop] = Writer(loop)
    return found
