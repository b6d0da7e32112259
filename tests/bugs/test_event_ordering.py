"""Positions order events, clocks do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.contrib.auth.models import User

from tests.bugs.crowd import positions
from tests.bugs.test_fencing import HASTY
from tests.bugs.world import World, case, sibling
from tests.live.servers import (
    Person as Client,
    Servers,
    delta,
    ended,
    gapless,
    legal,
    said,
    stored,
    trickle,
)

SKEW = str(Path(__file__).with_name("skew"))


def skewed(w: World, place: int) -> dict[str, Any]:
    """A server whose clock is wrong by what the case says."""
    seconds = str(w.input["clock_skew_s"][place])
    return {"environment": {"PYTHONPATH": SKEW, "CLOCK_SKEW": seconds}, "overrides": HASTY}


def times(payloads: list[str]) -> list[int]:
    """When events say they were."""
    return [json.loads(payload)["timestamp"] for payload in payloads]


@case("ORD-04")
def test_clocks_that_disagree_cost_no_event(
    w: World, servers: Servers, kind: str, database_url: str, user: User
) -> None:
    other = {"daphne": "uvicorn", "uvicorn": "daphne"}[kind]
    launched = [servers.launch(kind, database_url, **skewed(w, 1))]
    launched.append(servers.launch(other, database_url, **skewed(w, 0)))
    ahead, behind = (Client(server.ready(), user) for server in launched)
    behind.get("/agui/threads/")
    reader = ahead.play(*said(trickle(400, 0.01))).events(5)
    before = behind.watch(reader.thread, run=reader.run).events(5)
    ahead.server.kill()
    # One who comes while the run is being taken over, at a position from before.
    during = [behind.watch(reader.thread, reader.ids[n], run=reader.run) for n in range(4)]
    assert before.done().last["code"] == "orphaned"
    reader.done()
    rows = stored(reader.run)
    legal(rows)
    stamps = times(rows)
    assert stamps[-1] < max(stamps), "the clocks do not disagree"
    gapless(before)
    assert before.logged == rows
    for n, late in enumerate(during):
        late.done()
        assert late.logged == rows[n + 1 :]
    again = behind.run("echo", "next", behind.snapshot(reader.thread)["threadId"]).done()
    assert positions(again.ids) == list(range(len(rows) + 1, len(rows) + len(again.ids) + 1))
    page = behind.get(f"/agui/threads/{reader.thread}/events")
    assert page.text.splitlines() == rows + again.logged


@sibling("ORD-04")
def test_a_wrong_clock_takes_no_living_run_over(
    w: World, servers: Servers, database_url: str, user: User
) -> None:
    """Leases are judged by the database's clock; the two differ by ten seconds, a lease has 1.5."""
    launched = [servers.launch("uvicorn", database_url, **skewed(w, place)) for place in (0, 1)]
    here, there = (Client(server.ready(), user) for server in launched)
    both = ((here, there), (there, here))
    for person in (here, there):
        person.get("/agui/threads/")
    readers = [first.play(*said(trickle(60, 0.04), delta("end"))).opened() for first, _ in both]
    for reader, (_, second) in zip(readers, both, strict=True):
        follower = second.watch(reader.thread, run=reader.run).done()
        assert ended(reader.run).status == "success"
        reader.done()
        assert reader.logged == follower.logged == stored(reader.run)
        assert times(reader.logged) == sorted(times(reader.logged))
