"""Agents that behave worse than any script can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

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
