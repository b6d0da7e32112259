"""Agents that behave worse than any script can."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.db import connection

from aguiapp import agent
from project import scripted

if TYPE_CHECKING:
    from aguiapp import RunContext


@agent("stubborn")
async def stubborn(run: RunContext) -> AsyncIterator[dict[str, Any]]:
    """Talks on for three seconds, whatever it is told."""
    until = time.monotonic() + 3
    while time.monotonic() < until:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
        yield {"type": "CUSTOM", "name": "still here", "value": time.monotonic()}


@agent("plodding")
def plodding(run: RunContext) -> Iterator[dict[str, Any]]:
    """A plain generator that blocks its thread between its events."""
    for number in range(20):
        yield {"type": "CUSTOM", "name": "step", "value": number}
        time.sleep(0.2)


#: The scripted agent with options: how it takes a post to a busy thread, and readers who leave.
OPTIONS: dict[str, dict[str, Any]] = {
    "queueing": {"busy": "enqueue"},
    "impulsive": {"busy": "interrupt"},
    "attached": {"disconnect": "cancel"},
    "forgiving": {"disconnect": 3},
    "hasty": {"limits": {"run_seconds": 1}},
}
for name, options in OPTIONS.items():
    agent(name, **options)(scripted.play)


@agent("gated")
async def gated(run: RunContext) -> AsyncIterator[dict[str, Any]]:
    """Plays a script; each byte of the file `gate` lets one more event pass, at last the end."""
    gate = str(run.forwarded["gate"])
    events = scripted.Script().play(run.forwarded["script"])
    for passed in itertools.count():
        while os.stat(gate).st_size <= passed:  # noqa: ASYNC110 - it is a file
            await asyncio.sleep(0.005)
        try:
            yield await anext(events)
        except StopAsyncIteration:
            return


@agent("querying")
async def querying(run: RunContext) -> AsyncIterator[dict[str, Any]]:
    """Asks the database, then waits; asks again at the time `at`, and waits for ever."""
    yield {"type": "CUSTOM", "name": "asked", "value": await run.call(ask, 0.0)}
    await asyncio.sleep(max(0.0, run.forwarded["at"] - time.time()))
    yield {"type": "CUSTOM", "name": "asked", "value": await run.call(ask, 0.05)}
    await asyncio.Event().wait()


def ask(seconds: float) -> int:
    """A query that holds its connection for a while."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        (found,) = cursor.fetchone()
        time.sleep(seconds)
    return int(found)


@agent("blocked")
def blocked(run: RunContext) -> Iterator[dict[str, Any]]:
    """A plain generator that blocks its thread for as long as it is told."""
    yield {"type": "CUSTOM", "name": "before", "value": 1}
    time.sleep(float(run.forwarded.get("seconds", 1)))
    yield {"type": "CUSTOM", "name": "after", "value": 2}


@agent("unready", ready=lambda: False)
async def unready(run: RunContext) -> None:
    """Never takes a run."""
