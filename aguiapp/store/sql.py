"""The statements whose speed or locking the ORM cannot express, for PostgreSQL and SQLite."""

from __future__ import annotations

import select
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple, cast

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from aguiapp import conf
from aguiapp.models import Run, RunEvent

#: How long a transaction of the store waits for a row that somebody else holds.
LOCK_TIMEOUT_MS = 500
#: SQLite takes at most 32,766 parameters in a statement.
SQLITE_ROWS = 6000


class Row(NamedTuple):
    """One event on its way in: created is in milliseconds since 1970 (UTC)."""

    seq: int
    type: int
    payload: str
    created: int


def database() -> str:
    """The alias of the database that holds the log; it is read where it is written."""
    return router.db_for_write(RunEvent)


def connection() -> BaseDatabaseWrapper:
    """The log's connection of the calling thread, opened."""
    found = connections[database()]
    found.ensure_connection()
    return found


def discard_if_dead() -> None:
    """Close the log's connection of the calling thread if it died since it was used last.

    A server says nothing to an idle connection but that it is over; asking the socket costs no
    round trip. SQLite has no such thing.
    """
    found = connections[database()]
    if found.connection is None or not is_postgres(found) or found.in_atomic_block:
        return
    socket = select.poll()
    with suppress(Exception):  # a connection without a socket is closed by now
        socket.register(found.connection.fileno(), select.POLLIN)
        if not socket.poll(0):
            return
    discard_if_broken()


def discard_if_broken() -> None:
    """Close the calling thread's connections that are of no more use, so that the next are new."""
    for found in connections.all(initialized_only=True):
        if not found.in_atomic_block and not found.is_usable():
            found.close()


def is_locked(error: Exception) -> bool:
    """Whether a statement gave up waiting for a lock that somebody else holds."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", "") == "55P03" or "is locked" in str(cause)


def is_postgres(found: BaseDatabaseWrapper) -> bool:
    """Whether rows are copied and locked as PostgreSQL does it."""
    return found.vendor == "postgresql"


@contextmanager
def writing(found: BaseDatabaseWrapper, *, waits: bool = True) -> Iterator[None]:
    """A write transaction: it never waits long for a foreign lock, and never upgrades one.

    `waits=False` is for transactions that skip locked rows and need no time limit.
    """
    if is_postgres(found):
        with transaction.atomic(using=found.alias):
            if waits and (limits := _limits(found)):
                with found.cursor() as cursor:
                    cursor.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}; {limits}")
            yield
        return
    # A deferred transaction that reads before it writes fails at once with "database is
    # locked"; IMMEDIATE waits its turn, whatever the host's OPTIONS say.
    sqlite = cast(Any, found)
    before, sqlite.transaction_mode = sqlite.transaction_mode, "IMMEDIATE"
    try:
        with transaction.atomic(using=found.alias):
            yield
    finally:
        sqlite.transaction_mode = before


def _limits(found: BaseDatabaseWrapper) -> str:
    """What bounds a transaction of ours; nothing inside the host's own, which would inherit it.

    A process that is frozen in the middle of one would hold its runs' rows for ever.
    """
    if found.savepoint_ids:
        return ""
    idle = int(conf.get().LEASE_SECONDS * 500)
    return f"SET LOCAL idle_in_transaction_session_timeout = {idle}"


@lru_cache(maxsize=64)
def timestamp(milliseconds: int) -> str:
    """The moment as both databases read it (UTC); events of one batch share it."""
    moment = datetime.fromtimestamp(milliseconds / 1000, tz=UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{milliseconds % 1000:03d}000"


def held(found: BaseDatabaseWrapper, claims: Sequence[tuple[int, int]]) -> set[int]:
    """Of `(run id, lease token)` the runs whose token still stands, locked against its change."""
    table = Run._meta.db_table
    values = ",".join(f"({int(run)},{int(token)})" for run, token in claims)
    if not is_postgres(found):
        query = f"SELECT id FROM {table} WHERE (id, lease_token) IN (VALUES {values})"  # noqa: S608
        with found.cursor() as cursor:
            cursor.execute(query)
            return {run for (run,) in cursor.fetchall()}
    query = (
        f"SELECT id FROM {table} WHERE (id, lease_token) IN ({values})"  # noqa: S608
        " ORDER BY id FOR SHARE SKIP LOCKED"
    )
    limits = _limits(found)
    with found.cursor() as cursor:
        # Together they cost one round trip.
        cursor.execute(f"{limits}; {query}" if limits else query)
        if limits:
            cursor.nextset()
        return {run for (run,) in cursor.fetchall()}


def insert(found: BaseDatabaseWrapper, batches: Iterable[tuple[int, Sequence[Row]]]) -> None:
    """Write the rows of several runs in one statement."""
    # The drivers' own errors would pass Django's cursors unseen; callers know Django's.
    with found.wrap_database_errors:
        if is_postgres(found):
            _copy(found, batches)
        else:
            _insert_values(found, batches)


def _copy(found: BaseDatabaseWrapper, batches: Iterable[tuple[int, Sequence[Row]]]) -> None:
    # JSON text holds no raw tab or line break, so the backslash is all that COPY must not see.
    lines = [
        f"{run}\t{seq}\t{code}\t"
        + (payload.replace("\\", "\\\\") if "\\" in payload else payload)
        + f"\t{timestamp(created)}+00\n"
        for run, rows in batches
        for seq, code, payload, created in rows
    ]
    table = RunEvent._meta.db_table
    with (
        found.cursor() as cursor,
        cursor.copy(f"COPY {table} (run_id, seq, type, payload, created) FROM STDIN") as copy,
    ):
        copy.write("".join(lines))


def _insert_values(
    found: BaseDatabaseWrapper, batches: Iterable[tuple[int, Sequence[Row]]]
) -> None:
    values: list[Any] = []
    for run, rows in batches:
        for seq, code, payload, created in rows:
            values += (run, seq, code, payload, timestamp(created))
    raw = cast(Any, found.connection)
    table = RunEvent._meta.db_table
    head = f"INSERT INTO {table} (run_id, seq, type, payload, created) VALUES "  # noqa: S608
    for start in range(0, len(values), SQLITE_ROWS * 5):
        part = values[start : start + SQLITE_ROWS * 5]
        raw.execute(head + ",".join(["(?,?,?,?,?)"] * (len(part) // 5)), part)


def renew(
    found: BaseDatabaseWrapper, rows: Sequence[tuple[int, int, int, int]], seconds: float
) -> None:
    """Prolong leases and note counters: rows of (run id, token, last seq, bytes); skips locked."""
    table = Run._meta.db_table
    values = ",".join("(" + ",".join(str(int(part)) for part in row) + ")" for row in rows)
    lock = ""
    until = f"strftime('%Y-%m-%d %H:%M:%f', 'now', '+{float(seconds)} seconds')"
    if is_postgres(found):
        lock = " FOR NO KEY UPDATE OF r SKIP LOCKED"
        until = f"statement_timestamp() + interval '{float(seconds)} seconds'"
    query = (
        f"WITH v(id, token, seq, bytes) AS (VALUES {values}),"  # noqa: S608
        f" mine AS (SELECT r.id, v.seq, v.bytes FROM {table} r JOIN v"
        f" ON r.id = v.id AND r.lease_token = v.token{lock})"
        f" UPDATE {table} SET lease_expires = {until}, last_seq = mine.seq, bytes = mine.bytes"
        f" FROM mine WHERE {table}.id = mine.id"
    )
    with found.cursor() as cursor:
        cursor.execute(query)


def last_seq(run_id: int) -> int:
    """The highest stored seq of a run, 0 when it has no event."""
    rows = RunEvent.objects.using(database()).filter(run_id=run_id)
    return rows.order_by("-seq").values_list("seq", flat=True).first() or 0
