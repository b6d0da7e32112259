"""The benchmark's agent: the corpus, yielding to the loop before each event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from aguiapp import RunContext, agent
from bench import corpus


@agent("bench")
async def bench(run: RunContext) -> AsyncIterator[Any]:
    """Stream `forwardedProps.n` events of the corpus."""
    for event in corpus.opening():
        yield event
    for event in corpus.events(run.forwarded["n"]):
        await asyncio.sleep(0)
        yield event
    for event in corpus.closing():
        yield event
