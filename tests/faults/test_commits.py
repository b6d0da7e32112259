"""Connections to PostgreSQL that break just before a COMMIT, or before its answer is back."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable

import pytest
from django.contrib.auth.models import User

from aguiapp.models import Run
from project.management.commands import demo
from tests.faults import invariants, proxy
from tests.faults.crowd import QUICK, Talk, crowd, options, rounds, scripts
from tests.live.servers import KINDS, Person, Server, Servers, new_id, said, stored, trickle, until
from tests.services import LONG

pytestmark = pytest.mark.postgres

#: What a server speaks to clients has no part in this: all pairs only where there is time.
PAIRS = [("daphne", "before"), ("uvicorn", "after"), ("daphne", "after"), ("uvicorn", "before")]
PLACES = pytest.mark.parametrize(("kind", "where"), PAIRS if LONG else PAIRS[:2])

#: A transaction of each kind, by what is said in it.
KINDS_OF_WORK: dict[str, Callable[[str], bool]] = {
    "opening": lambda text: 'INSERT INTO "aguiapp_run"' in text,
    "append": lambda text: "COPY" in text and "UPDATE" not in text,
    "ending": lambda text: "COPY" in text and 'UPDATE "aguiapp_run"' in text,
    "renewal": lambda text: "lease_expires = statement_timestamp()" in text,
}


class Cuts:
    """Cuts some of the commits of one kind, with a chance, at most so many."""

    def __init__(self, rng: random.Random, work: str, where: str, chance: float, most: int) -> None:
        self._matches = KINDS_OF_WORK[work]
        self._rng = rng
        self._where = where
        self._chance = chance
        self._left = most
        self._lock = threading.Lock()
        self.made = 0

    def __call__(self, statements: list[str]) -> str:
        """Whether to cut this COMMIT, and where."""
        if not self._matches("\n".join(statements)):
            return ""
        with self._lock:
            if not self._left or self._rng.random() > self._chance:
                return ""
            self._left -= 1
            self.made += 1
        return self._where


@pytest.fixture
def behind(servers: Servers, database_url: str, kind: str, cutting: proxy.PostgresProxy) -> Server:
    """A server whose connections to PostgreSQL can be cut; its lease is short."""
    url = proxy.at_port(database_url, cutting.port)
    return servers.shared(kind, url, "behind", **options(LEASE_SECONDS=4, SWEEP_SECONDS=0.3))


@PLACES
def test_a_connection_cut_around_a_commit_leaves_neither_hole_nor_duplicate(
    behind: Server,
    cutting: proxy.PostgresProxy,
    user: User,
    rng: random.Random,
    figure: Callable[[str], None],
    where: str,
) -> None:
    person = Person(behind, user)
    for work, chance, most in (("append", 0.4, 25), ("ending", 0.7, 6), ("renewal", 1, 2)):
        for _ in rounds(1, 20):
            talks, cuts = cut_crowd(person, cutting, Cuts(rng, work, where, chance, most))
            seconds = invariants.all_ended([talk.thread for talk in talks])
            runs: list[Run] = []
            for talk in talks:
                reader = talk.readers[0].done()
                assert reader.end == "clean"
                (run,) = invariants.hold(talk.thread, reader, by=person)
                assert reader.logged[-1] == run.events.latest("seq").payload
                runs.append(run)
            assert cuts.made
            ends = sorted(f"{run.status} {run.error_code}".strip() for run in runs)
            figure(
                f"{behind.kind}, {cuts.made} connections cut {where} the COMMIT of {work}:"
                f" {ends}, all ended {seconds:.1f} s after the last cut could come"
            )
            # One lost connection is waited out: nobody's run fails of it.
            assert {run.status for run in runs} == {"success"}


def cut_crowd(
    person: Person, cutting: proxy.PostgresProxy, cuts: Cuts
) -> tuple[list[Talk], Cuts]:  # fmt: skip
    """Runs of which some commits are cut."""
    finite = [said(trickle(80, 0.01)), *scripts(0.8)[2:], said(trickle(100, 0.008))]
    talks = crowd(person, finite)
    for talk in talks:
        talk.readers[0].events(3)
    cutting.decide = cuts
    try:
        for talk in talks:
            talk.readers[0].done(30)
    finally:
        cutting.decide = proxy.calm
    return talks, cuts


@PLACES
def test_a_post_whose_opening_is_cut_may_be_posted_again(
    behind: Server,
    cutting: proxy.PostgresProxy,
    user: User,
    rng: random.Random,
    figure: Callable[[str], None],
    where: str,
) -> None:
    person = Person(behind, user)
    for _ in rounds(1, 20):
        thread = new_id()
        given = demo.run_input(thread, "play", {"script": said(trickle(5, 0.01))})
        cuts = cutting.decide = Cuts(rng, "opening", where, 1, 1)
        try:
            first = person.post("scripted", given).done()
        finally:
            cutting.decide = proxy.calm
        assert cuts.made == 1
        again = person.post("scripted", given).done()
        (run,) = invariants.hold(thread, first, again, by=person)
        figure(
            f"{behind.kind}, opening cut {where} COMMIT: first {first.status}, again"
            f" {again.status}, run {run.status} {run.error_code}"
        )
        assert again.status == 200
        assert again.logged[-1] == run.events.latest("seq").payload


@pytest.mark.parametrize("kind", KINDS if LONG else KINDS[:1])
def test_all_connections_break_again_and_again(
    behind: Server,
    cutting: proxy.PostgresProxy,
    user: User,
    rng: random.Random,
    figure: Callable[[str], None],
) -> None:
    person = Person(behind, user)
    for _ in rounds(1, 40):
        talks = crowd(person, [said(trickle(150, 0.01)), *scripts(1.5)[2:]])
        for talk in talks:
            talk.readers[0].opened()
        until_over = threading.Event()
        breaking = threading.Thread(target=break_all, args=(cutting, rng, until_over))
        breaking.start()
        try:
            seconds = invariants.all_ended(talk.thread for talk in talks)
        finally:
            until_over.set()
            breaking.join()
        ends = []
        for talk in talks:
            read_to_the_end(person, talk)
            (run,) = invariants.hold(talk.thread, *talk.readers, by=person)
            ends.append(f"{run.status} {run.error_code}".strip())
        aborted = sum(reader.end == "aborted" for talk in talks for reader in talk.readers)
        figure(
            f"{behind.kind}, all connections to PostgreSQL cut every 0.2 s: {sorted(ends)} in"
            f" {seconds:.1f} s, {aborted} readers aborted and resumed"
        )
        assert set(ends) == {"success"}


def break_all(cutting: proxy.PostgresProxy, rng: random.Random, over: threading.Event) -> None:
    """Cut every connection there is, every now and then."""
    while not over.wait(rng.uniform(0.05, 0.4)):
        for link in list(cutting.links):
            link.cut()


def read_to_the_end(person: Person, talk: Talk) -> None:
    """Resume what was aborted, with its cursor, until the run's terminal came."""
    reader = talk.readers[-1].done()
    while reader.end == "aborted":
        last = next((part.ids[-1] for part in talk.readers[::-1] if part.ids), "")
        first = talk.readers[0]
        reader = person.watch(first.thread, last, run=first.run).done()
        talk.readers.append(reader)


def test_a_process_that_freezes_within_a_transaction_does_not_keep_its_run(
    servers: Servers,
    database_url: str,
    user: User,
    cutting: proxy.PostgresProxy,
    figure: Callable[[str], None],
) -> None:
    # It holds a lock on its run's row, and its machine may be gone without a word.
    sweeping = Person(servers.shared("uvicorn", database_url, "quick", **options(**QUICK)), user)
    sweeping.run("echo", "who sweeps has served").done()
    url = proxy.at_port(database_url, cutting.port)
    frozen = Person(servers.start("daphne", url, **options("elsewhere", **QUICK)), user)
    thread = new_id()
    reader = frozen.play(*said(trickle(2000, 0.01)), thread=thread).events(5)
    watcher = sweeping.watch(reader.thread, run=reader.run).events(5)
    held = Cuts(random.Random(0), "append", "hold", 1, 1)
    cutting.released.clear()
    cutting.decide = held
    try:
        until(lambda: held.made, what="a COMMIT is held back")
        frozen.server.process.send_signal(signal.SIGSTOP)
        seconds = invariants.all_ended([thread], 10)
        rows = stored(reader.run)
        invariants.takes_a_new_run(sweeping, thread)
    finally:
        cutting.decide = proxy.calm
        cutting.released.set()
        frozen.server.process.send_signal(signal.SIGCONT)
    figure(f"frozen within a transaction, lease of 2 s: ended elsewhere after {seconds:.1f} s")
    assert watcher.done().last["code"] == "orphaned"
    reader.done()
    invariants.hold(thread, reader, watcher, by=sweeping)
    assert stored(reader.run) == rows
