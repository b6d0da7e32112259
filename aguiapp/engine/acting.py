"""One agent at work, in a task of its own; nothing that it raises gets out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aguiapp.agents import Agent, RunContext

Emit = Callable[[Any], Awaitable[None]]


class Acting:
    """The agent's whole life; `over` is called when it is over, `failure` is what it raised."""

    def __init__(self, agent: Agent, run: RunContext, emit: Emit, over: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._agent = agent
        self._run = run
        self._emit = emit
        self._over = over
        self._told = False
        self._task = asyncio.create_task(self._play(), name=f"agent {agent.name}")

    @property
    def done(self) -> bool:
        """Whether the agent is gone."""
        return self._task.done()

    def tell(self) -> None:
        """Cancel the agent, once: a second time would cut what it does to tidy up."""
        if not self._told:
            self._told = True
            self._task.cancel()

    async def wait(self, seconds: float) -> None:
        """Wait for the end of the agent, no longer than that."""
        await asyncio.wait([self._task], timeout=seconds)

    async def end(self) -> None:
        """Cancel the agent, whatever it does, and wait for its end."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _play(self) -> None:
        # Not even SystemExit gets past here.
        try:
            source = await self._agent.open(self._run)
            if source is not None:
                await self._pull(source)
        except BaseException as error:
            self.failure = error
        finally:
            self._over()

    async def _pull(self, source: AsyncIterator[Any]) -> None:
        """Take what the agent yields; a cancellation reaches it wherever it is.

        A generator that waits in its own code gets the CancelledError there. One whose event is
        being recorded gets it at its `yield`, and may yield what tidies up.
        """
        throw = getattr(source, "athrow", None)
        close = getattr(source, "aclose", None)
        following = source.__anext__()
        try:
            while True:
                try:
                    event = await following
                except StopAsyncIteration:
                    return
                try:
                    await self._emit(event)
                except asyncio.CancelledError as cancelled:
                    if throw is None:
                        raise
                    following = throw(cancelled)
                else:
                    following = source.__anext__()
        finally:
            if close is not None:
                await close()
