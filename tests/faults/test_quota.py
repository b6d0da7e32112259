"""A disk that takes no more: runs end legally or wait, and everything can still be read."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from django.conf import settings
from django.contrib.auth.models import User

from tests.faults import invariants
from tests.faults.crowd import QUICK, Talk, crowd, options
from tests.live.servers import KINDS, Person, Reader, Server, Servers, delta, new_id, said, until
from tests.services import LONG

WAYS = [
    ("daphne", "in the same process"),
    ("uvicorn", "by a new process"),
    ("daphne", "by a new process"),
    ("uvicorn", "in the same process"),
]
#: How much of any file may be written while the disk is full.
PAGES = 256 * 1024


@pytest.fixture
def sqlite_file() -> Path:
    """The database's file; PostgreSQL's files are not its clients' to fill."""
    return Path(settings.DATABASES["default"]["NAME"])


def limit_files(server: Server, size: int) -> None:
    """Let the process write no file beyond that size."""
    hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, hard))


def growing(count: int) -> list[dict[str, object]]:
    """A run that writes 4 MiB a second."""
    blob = {"type": "CUSTOM", "name": "blob", "value": {"$blob_kb": 40}}
    return said({"$repeat": count, "events": [delta(), blob, {"$sleep": 0.01}]})


def filled(server: Server, talks: list[Talk], database: Path) -> None:
    """Let no file be written beyond a few pages, and wait until nothing goes in any more."""
    for talk in talks:
        talk.readers[0].events(20)
    limit_files(server, PAGES)

    def still() -> bool:
        before = [len(talk.readers[0].frames) for talk in talks]
        time.sleep(0.4)
        return before == [len(talk.readers[0].frames) for talk in talks]

    until(still, 30, "nothing can be stored any more")


def everything_can_be_read(person: Person, done: Reader) -> None:
    """Reading goes on, and a new run is refused or waits."""
    again = person.watch(done.thread, after=done.ids[0], run=done.run).done()
    assert again.logged == done.logged[1:]
    assert person.snapshot(done.thread)["cursor"] == done.ids[-1]


@pytest.mark.sqlite
@pytest.mark.parametrize("kind", KINDS if LONG else KINDS[:1])
def test_a_disk_that_is_full_for_a_moment_is_waited_out(
    servers: Servers,
    database_url: str,
    user: User,
    sqlite_file: Path,
    figure: Callable[[str], None],
    kind: str,
) -> None:
    server = servers.start(kind, database_url, **options())
    person = Person(server, user)
    done = person.run("echo", "stored before the disk was full", thread=new_id()).done()
    talks = crowd(person, [growing(250) for _ in range(2)])
    filled(server, talks, sqlite_file)
    everything_can_be_read(person, done)
    limit_files(server, resource.RLIM_INFINITY)
    ends = [full_disk_was_survived(talk, person) for talk in talks]
    figure(f"disk full for a moment under {kind}: runs {ends}")
    assert ends == ["success", "success"]


@pytest.mark.sqlite
@pytest.mark.parametrize(("kind", "lifted"), WAYS if LONG else WAYS[:2])
def test_a_full_disk_ends_runs_legally_and_leaves_reading_alone(
    servers: Servers,
    database_url: str,
    user: User,
    sqlite_file: Path,
    figure: Callable[[str], None],
    kind: str,
    lifted: str,
) -> None:
    server = servers.start(kind, database_url, **options(**QUICK))
    person = Person(server, user)
    done = person.run("echo", "stored before the disk was full", thread=new_id()).done()
    talks = crowd(person, [growing(1000) for _ in range(2)])
    filled(server, talks, sqlite_file)
    # What is small may still go in: then the sweep takes the run, and its driver is fenced.
    until(
        lambda: "could not be stored" in server.said() or "run fenced" in server.said(),
        20,
        "the runs are given up",
    )
    everything_can_be_read(person, done)
    refused = person.run("echo", "is there room?", thread=new_id()).done()
    limit_files(server, resource.RLIM_INFINITY)
    if lifted == "by a new process":
        server.kill()
        person = Person(servers.start(kind, database_url, **options(**QUICK)), user)
        person.run("echo", "who sweeps has served").done()
    seconds = invariants.all_ended(talk.thread for talk in talks)
    ends = [full_disk_was_survived(talk, person) for talk in talks]
    figure(
        f"disk full under {kind}, room again {lifted}: a post meanwhile {refused.status}, runs"
        f" {ends}, ended {seconds:.1f} s after"
    )
    assert set(ends) <= {"store_failed", "orphaned"}


def full_disk_was_survived(talk: Talk, person: Person) -> str:
    """The run's end, by its code or status."""
    reader = talk.readers[0].done()
    (run,) = invariants.hold(talk.thread, reader, by=person)
    return run.error_code or run.status
