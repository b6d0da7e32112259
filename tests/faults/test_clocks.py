"""Processes whose clocks disagree: takeover is by the database's clock, order by seq alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.auth.models import User

from aguiapp.models import Run
from tests.faults import invariants
from tests.faults.crowd import QUICKEST, crowd, options, scripts, watched
from tests.live.servers import Person, Servers, ended, new_id, said, trickle
from tests.services import LONG

HOUR = 3600.0
#: How far the clock of the process with the run is off, and that of the one that sweeps.
SKEWS = [(5.0, -5.0), (-HOUR, HOUR), (-5.0, 5.0), (HOUR, -HOUR)]


@pytest.mark.parametrize(("here", "there"), SKEWS if LONG else SKEWS[:2])
def test_clocks_that_disagree_lose_no_run_and_no_event(
    servers: Servers,
    database_url: str,
    user: User,
    figure: Callable[[str], None],
    here: float,
    there: float,
) -> None:
    # Each believes the other to be on another machine: only the lease tells who lives.
    other = servers.start("uvicorn", database_url, **options("there", there, **QUICKEST))
    sweeping = Person(other, user)
    sweeping.run("echo", "who sweeps has served").done()
    server = servers.start("daphne", database_url, **options("here", here, **QUICKEST))
    person = Person(server, user)

    thread = new_id()
    lasting = person.play(*said(trickle(150, 0.02)), thread=thread).events(3)
    watcher = sweeping.watch(lasting.thread, run=lasting.run)
    for reader in (lasting, watcher):  # three leases long
        assert reader.done().last["type"] == "RUN_FINISHED"
    assert watcher.ids == lasting.ids
    assert ended(lasting.run).status == "success"
    clock_was_off(ended(lasting.run), here)
    # The next turn is written by the other clock: behind the first one, whatever it says.
    invariants.hold(thread, lasting, watcher, by=sweeping)
    whole = person.watch(lasting.thread, after=lasting.ids[0]).events(len(lasting.ids) + 1)
    invariants.hold(thread, lasting, watcher, whole, by=person)
    whole.drop()

    talks = crowd(person, scripts(60))
    watched(talks, sweeping)
    for talk in talks:
        talk.readers[0].events(5)
    server.kill()
    joining = [sweeping.watch(talk.readers[0].thread) for talk in talks]  # during the take-over
    seconds = invariants.all_ended(talk.thread for talk in talks)
    figure(f"clocks off by {here:+g} and {there:+g} s: take-over after {seconds:.1f} s")
    for talk, joined in zip(talks, joining, strict=True):
        for reader in talk.readers:
            reader.done()
        joined.wait(lambda reader: reader.payloads and reader.types[-1] == "RUN_ERROR")
        (run,) = invariants.hold(talk.thread, *talk.readers, joined, by=sweeping)
        assert (run.status, run.error_code) == ("error", "orphaned")
        joined.drop()


def clock_was_off(run: Run, skew: float) -> None:
    """The run's events were stamped by a clock that is not the database's."""
    assert run.started_at is not None
    seconds = (run.events.earliest("seq").created - run.started_at).total_seconds()
    assert seconds == pytest.approx(skew, abs=2)
