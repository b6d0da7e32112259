"""The peer: FastAPI with the official encoder, which stores nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ag_ui.core import RunAgentInput, RunFinishedEvent, RunStartedEvent
from ag_ui.encoder import EventEncoder
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from bench import corpus

app = FastAPI()
encoder = EventEncoder()


@app.post("/agui/agents/bench/")
async def run(given: RunAgentInput) -> StreamingResponse:
    """Stream `forwardedProps.n` events of the corpus."""
    return StreamingResponse(stream(given), media_type=encoder.get_content_type())


async def stream(given: RunAgentInput) -> AsyncIterator[str]:
    """The same run as ours: the same models, the same yields to the loop."""
    ids = {"thread_id": given.thread_id, "run_id": given.run_id}
    yield encoder.encode(RunStartedEvent(**ids))
    for event in corpus.opening():
        yield encoder.encode(event)
    for event in corpus.events(given.forwarded_props["n"]):
        await asyncio.sleep(0)
        yield encoder.encode(event)
    for event in corpus.closing():
        yield encoder.encode(event)
    yield encoder.encode(RunFinishedEvent(**ids))
