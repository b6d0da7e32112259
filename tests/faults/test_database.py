"""A PostgreSQL that stops, crashes and comes back, a pooler before it, and locks of the host."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.db.models import Model

from aguiapp.models import Run, Thread
from tests.faults import breakable, invariants, proxy
from tests.faults.crowd import (
    QUICK,
    QUICKEST,
    Talk,
    crowd,
    options,
    pause,
    rounds,
    scripts,
    watched,
)
from tests.live.servers import KINDS, Person, Reader, Servers, ended, new_id, said, trickle, until
from tests.services import LONG

pytestmark = pytest.mark.postgres

ALL = [("fast", "daphne"), ("immediate", "uvicorn"), ("immediate", "daphne"), ("fast", "uvicorn")]


def finite(seconds: float) -> list[list[dict[str, object]]]:
    """Runs that end by themselves."""
    return [said(trickle(int(seconds / 0.01), 0.01)), *scripts(seconds)[2:]]


@pytest.mark.parametrize(("mode", "kind"), ALL if LONG else ALL[:2])
def test_runs_outlive_a_restart_of_postgresql(
    servers: Servers,
    own_postgres: breakable.Postgres,
    owner: User,
    rng: random.Random,
    figure: Callable[[str], None],
    mode: str,
    kind: str,
) -> None:
    person = Person(servers.start(kind, own_postgres.url, **options(SWEEP_SECONDS=0.5)), owner)
    other = person.at(servers.start("uvicorn", own_postgres.url, **options(SWEEP_SECONDS=0.5)))
    for _ in rounds(1, 20):
        talks = crowd(person, finite(2))
        watched(talks, other)
        time.sleep(pause(rng, 0.1, 1.2))
        own_postgres.stop(mode)
        time.sleep(pause(rng, 0.2, 0.8))
        own_postgres.start()
        up = time.monotonic()
        invariants.all_ended(talk.thread for talk in talks)
        runs = [run for talk in talks for run in was_whole(talk, person, other)]
        figure(
            f"PostgreSQL stopped ({mode}) under {kind}:"
            f" {sorted(f'{run.status} {run.error_code}'.strip() for run in runs)},"
            f" all over {time.monotonic() - up:.1f} s after it was back"
        )
        # A second without a database is waited out.
        assert {run.status for run in runs} == {"success"}


def was_whole(talk: Talk, *people: Person) -> list[Run]:
    """What a thread's readers got is in the log; aborted ones read on with their cursor."""
    for reader, person in zip(talk.readers, people, strict=False):
        reader.done()
        if reader.end == "aborted" and reader.ids:
            rest = person.watch(reader.thread, reader.ids[-1], run=reader_run(talk)).done()
            assert rest.end == "clean"
            talk.readers.append(rest)
    return invariants.hold(talk.thread, *talk.readers, by=people[0])


def reader_run(talk: Talk) -> str:
    """The key of the run that the first reader posted."""
    return talk.readers[0].run


@pytest.mark.parametrize("kind", KINDS if LONG else KINDS[1:])
def test_an_idle_server_works_at_once_after_a_restart_of_postgresql(
    servers: Servers,
    own_postgres: breakable.Postgres,
    owner: User,
    figure: Callable[[str], None],
    kind: str,
) -> None:
    person = Person(servers.start(kind, own_postgres.url, **options()), owner)
    thread = new_id()
    for reader in [person.run("echo", "before", new_id()) for _ in range(4)]:
        reader.done()
    own_postgres.stop("fast")
    own_postgres.start()
    answers = [person.run("echo", "after", thread).done() for _ in range(4)]
    figure(f"posts after a restart under idle {kind}: {[reader.status for reader in answers]}")
    invariants.hold(thread, *answers, by=person)
    assert {reader.status for reader in answers} == {200}


@pytest.mark.parametrize("kind", KINDS if LONG else KINDS[:1])
def test_a_database_away_for_longer_than_the_lease_ends_runs_legally(
    servers: Servers,
    own_postgres: breakable.Postgres,
    owner: User,
    figure: Callable[[str], None],
    kind: str,
) -> None:
    person = Person(servers.start(kind, own_postgres.url, **options(**QUICKEST)), owner)
    for mode in ("fast", "immediate")[: len(rounds(1, 2))]:
        talks = crowd(person, scripts(20))
        for talk in talks:
            talk.readers[0].events(5)
        own_postgres.stop(mode)
        time.sleep(2 * QUICKEST["LEASE_SECONDS"] + 0.5)
        own_postgres.start()
        seconds = invariants.all_ended((talk.thread for talk in talks), 30)
        runs = [run for talk in talks for run in was_whole(talk, person)]
        figure(
            f"PostgreSQL away ({mode}) for 2 leases under {kind}:"
            f" {sorted(f'{run.status} {run.error_code}'.strip() for run in runs)},"
            f" all ended {seconds:.1f} s after it was back"
        )


@pytest.mark.parametrize("row", ["run", "thread"])
def test_a_row_that_the_host_locks_for_seconds_stops_no_other_run(
    servers: Servers,
    database_url: str,
    user: User,
    figure: Callable[[str], None],
    row: str,
) -> None:
    person = Person(servers.shared("uvicorn", database_url, "quick", **options(**QUICK)), user)
    locked = person.play(*said(trickle(100, 0.01)), thread=new_id()).events(5)
    beside = [person.play(*said(trickle(400, 0.01)), thread=new_id()).events(5) for _ in range(2)]
    run = Run.objects.get(key=locked.run)
    model: type[Model] = Run if row == "run" else Thread
    freed = threading.Event()
    holding = threading.Event()
    holder = threading.Thread(
        target=hold_locked, args=(model, run.pk if row == "run" else run.thread_id, holding, freed)
    )
    holder.start()
    holding.wait(10)
    began = time.monotonic()
    # Who asks for the locked thread meanwhile waits for it, or is sent away; nobody else is.
    asking = [person.run("echo", "me too", run.thread.thread_id) for _ in range(6)]
    opened = []
    for _ in range(5):
        seconds = time.monotonic()
        quick = person.run("echo", "and now?", new_id()).done()
        assert quick.last["type"] == "RUN_FINISHED"
        opened.append(time.monotonic() - seconds)
    until(lambda: time.monotonic() - began > 1.5 * QUICK["LEASE_SECONDS"], 10)
    freed.set()
    holder.join()
    gaps = [longest_gap(reader, began, began + 2.5) for reader in beside]
    figure(
        f"a {row} row locked for {time.monotonic() - began:.1f} s: others' longest gap between"
        f" events {max(gaps):.2f} s, a new run took {max(opened):.2f} s at most"
    )
    assert max(gaps) < 0.5
    assert max(opened) < 1
    for reader in asking:
        assert reader.done().status in (200, 409, 503)
    for reader in (locked, *beside):
        reader.done()
        run = ended(reader.run)
        invariants.hold(run.thread.thread_id, reader, by=person)
    for reader in beside:
        assert ended(reader.run).status == "success"


def test_a_thread_that_takes_longer_to_read_than_the_lease_starts_its_run(
    servers: Servers, database_url: str, user: User, figure: Callable[[str], None]
) -> None:
    given = options(**QUICKEST)
    sweeping = Person(servers.shared("uvicorn", database_url, "quickest", **given), user)
    sweeping.run("echo", "who sweeps has served").done()
    person = Person(servers.shared("daphne", database_url, "quickest", **given), user)
    thread = new_id()
    person.run("echo", "the first turn", thread).done()
    # As while the host alters the table; a log of some hundred megabytes is as slow to read.
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE aguiapp_runevent IN ACCESS EXCLUSIVE MODE")
        second = person.run("echo", "the second turn", thread)
        time.sleep(2 * QUICKEST["LEASE_SECONDS"] + 0.5)
    second.done()
    found = invariants.hold(thread, second, by=person)
    figure(f"an opening of two leases: {[f'{r.status} {r.error_code}'.strip() for r in found]}")
    assert [run.status for run in found] == ["success", "success"]


def hold_locked(
    model: type[Model], pk: int, holding: threading.Event, freed: threading.Event
) -> None:
    """A transaction of the host that locks a row until it is told to let go."""
    try:
        with transaction.atomic():
            model._default_manager.select_for_update().get(pk=pk)
            holding.set()
            freed.wait(20)
    finally:
        connection.close()


def longest_gap(reader: Reader, start: float, end: float) -> float:
    """The longest time without an event, between two moments."""
    times = [start, *(moment for moment in reader.times if start < moment < end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize("kind", KINDS if LONG else KINDS[:1])
def test_everything_works_through_pgbouncer_in_transaction_mode(
    servers: Servers, database_url: str, user: User, pgbouncer: int, kind: str
) -> None:
    url = proxy.at_port(database_url, pgbouncer)
    server = servers.start(kind, url, **options(**QUICK))
    other = servers.start("uvicorn", url, **options(**QUICK))
    here, there = Person(server, user), Person(other, user)
    for _ in rounds(1, 10):
        talks = crowd(here, [*finite(1), *finite(1)])
        watched(talks, there)
        for talk in talks:
            (run,) = was_whole(talk, here, there)
            assert run.status == "success"
            assert all(reader.end == "clean" for reader in talk.readers)
        stopped = here.play(*said(trickle(6000, 0.01)), thread=new_id()).events(5)
        assert there.cancel(stopped).json()["status"] == "cancelled"
        dropped = here.play(*said(trickle(100, 0.01)), thread=new_id()).events(9)
        dropped.drop()
        resumed = there.watch(dropped.thread, dropped.ids[-1], run=dropped.run).done()
        for reader in (stopped.done(), resumed):
            assert reader.last["type"] == "RUN_FINISHED"
        invariants.hold(Run.objects.get(key=stopped.run).thread.thread_id, stopped, by=there)
        thread = Run.objects.get(key=dropped.run).thread.thread_id
        invariants.hold(thread, dropped, resumed, by=there)
    left = crowd(here, scripts(60))
    watched(left, there)
    for talk in left:
        talk.readers[0].events(3)
    server.kill()
    invariants.all_ended(talk.thread for talk in left)
    for talk in left:
        (run,) = was_whole(talk, there, there)
        assert run.error_code == "orphaned"
    for process in (server, other):
        assert "prepared statement" not in process.said()
        assert "Traceback" not in process.said()
