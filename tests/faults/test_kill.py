"""Processes that die at any moment, or stop for a while: no run is lost, none stays open."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import pytest
from django.contrib.auth.models import User

from aguiapp.models import Run
from tests.faults import invariants
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
from tests.live.servers import Person, Servers, ended, new_id, said, stored, trickle, until
from tests.services import LONG

KINDS = ("daphne", "uvicorn")
#: Where the killed process ran: on the survivor's host, which sees that it is gone, or elsewhere.
HOSTS = ("", "elsewhere")


@pytest.mark.parametrize("host", HOSTS)
def test_kill_9_at_any_moment_loses_nothing_and_ends_every_run(
    servers: Servers,
    database_url: str,
    user: User,
    rng: random.Random,
    figure: Callable[[str], None],
    host: str,
) -> None:
    settings = {} if LONG or not host else QUICK
    survivor = Person(servers.shared("uvicorn", database_url, f"survivor {settings}",
                                     **options(**settings)), user)  # fmt: skip
    survivor.run("echo", "who sweeps has served").done()
    took: list[float] = []
    for turn in rounds(2 - bool(host), 400):
        kind = KINDS[turn % 2]
        victim = servers.start(kind, database_url, **options(host, **settings))
        talks = crowd(Person(victim, user), scripts(60))
        if rng.random() < 0.8:
            watched(talks[:3], survivor)
        time.sleep(pause(rng, 0, 1.5))
        victim.kill()
        seconds = invariants.all_ended((talk.thread for talk in talks), 20)
        took.append(seconds)
        for talk in talks:
            killed_run_is_sound(talk, survivor)
    figure(
        f"orphans after kill -9{f' on host {host}' if host else ''} ({settings or 'defaults'}):"
        f" ended after {max(took):.1f} s at most, {min(took):.1f} s at least, {len(took)} kills"
    )


def killed_run_is_sound(talk: Talk, survivor: Person) -> None:
    """The run of a dead process is ended as an orphan, and its watchers saw that."""
    for reader in talk.readers:
        reader.done()
    assert talk.readers[0].end == "aborted"
    for watcher in talk.readers[1:]:
        assert (watcher.end, watcher.last["code"]) == ("clean", "orphaned")
    found = invariants.hold(talk.thread, *talk.readers, by=survivor)
    assert [(run.status, run.error_code) for run in found] in ([], [("error", "orphaned")])


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_wakes_after_its_lease_writes_nothing(
    servers: Servers, kind: str, database_url: str, user: User, figure: Callable[[str], None]
) -> None:
    other = Person(servers.shared("uvicorn", database_url, "quick", **options(**QUICK)), user)
    other.run("echo", "who sweeps has served").done()
    sleeper = servers.start(kind, database_url, **options(**QUICK))
    talks = crowd(Person(sleeper, user), scripts(60))
    watched(talks, other)
    for talk in talks:
        talk.readers[0].events(8)
    sleeper.process.send_signal(signal.SIGSTOP)
    took = invariants.all_ended((talk.thread for talk in talks), 20)
    figure(f"SIGSTOP of {kind}, lease of 2 s: ended elsewhere after {took:.1f} s")
    runs = [talk.readers[0].run for talk in talks]
    before = [stored(run) for run in runs]
    sleeper.process.send_signal(signal.SIGCONT)
    for talk, rows in zip(talks, before, strict=True):
        first = talk.readers[0].done()
        assert first.end == "aborted" or first.logged[-1] == rows[-1]
    # Its runs are over there as well: it serves the same threads again, and other work too.
    for talk in talks:
        (run,) = invariants.hold(talk.thread, *talk.readers, by=other.at(sleeper))
        assert (run.status, run.error_code) == ("error", "orphaned")
    until(
        lambda: not any("agent " in name for name in sleeper.inside()["tasks"]),
        15,
        "no agent plays on for nobody",
    )
    assert [stored(run) for run in runs] == before
    assert "Traceback" not in sleeper.said()


@pytest.mark.parametrize("kind", KINDS if LONG else KINDS[:1])
def test_an_agent_that_blocks_the_loop_beyond_the_lease_keeps_its_run(
    servers: Servers, kind: str, database_url: str, user: User
) -> None:
    other = Person(servers.shared("uvicorn", database_url, "quickest", **options(**QUICKEST)), user)
    other.run("echo", "who sweeps has served").done()
    server = servers.start(kind, database_url, **options("busy", **QUICKEST))
    person = Person(server, user)
    neighbour = person.play(*said(trickle(200, 0.01)))
    neighbour.events(5)
    blocking = person.play(*said({"$block_s": 2.5}), thread=new_id())
    until(lambda: Run.objects.filter(status="running").count() == 2)
    began = time.monotonic()
    for reader in (neighbour, blocking):
        reader.done()
        assert (reader.end, reader.last["type"]) == ("clean", "RUN_FINISHED")
    assert time.monotonic() - began > 2 * QUICKEST["LEASE_SECONDS"]
    for reader in (neighbour, blocking):
        run = ended(reader.run)
        assert run.status == "success"
        invariants.hold(run.thread.thread_id, reader, by=other)
