"""SIGTERM and SIGINT: drain first, then let the server stop as it would have."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

from aguiapp import agents

#: How long a stopped process may be held up by a blocking call of an agent.
EXIT_SECONDS = 10.0


class Drainable(Protocol):
    """What has runs to see off before its process ends."""

    loop: asyncio.AbstractEventLoop

    @property
    def alive(self) -> bool: ...

    async def drain(self) -> None: ...


Engines = Callable[[], Iterable[Drainable]]
Handler = Callable[[int, FrameType | None], Any] | int | None

_engines: Engines = tuple
_handed: dict[int, Handler] = {}
_drains: set[asyncio.Task[None]] = set()


def install(engines: Engines) -> None:
    """On SIGTERM and SIGINT drain first, then hand the signal to whoever handled it before.

    Neither Daphne nor uvicorn waits for work that is not a connection; nothing here depends on
    the ASGI lifespan, which Daphne does not speak.
    """
    global _engines
    if threading.current_thread() is not threading.main_thread():
        return
    _engines = engines
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)
        if before is not _handle:
            _handed[number] = before
            signal.signal(number, _handle)


def _handle(number: int, frame: FrameType | None) -> None:
    live = [engine for engine in _engines() if engine.alive]
    if _drains or not live:  # asked twice, or nothing to wait for
        _hand_over(number, frame)
        return
    live[0].loop.call_soon_threadsafe(_start_drain, live[0], number, frame)


def _start_drain(engine: Drainable, number: int, frame: FrameType | None) -> None:
    async def drain() -> None:
        try:
            await engine.drain()
        finally:
            if agents.pool_is_busy():
                _exit_anyway(number)
            _hand_over(number, frame)

    task = engine.loop.create_task(drain())
    _drains.add(task)
    task.add_done_callback(_drains.discard)


def _exit_anyway(number: int) -> None:
    """Python joins threads before it exits, and one of ours is in an agent's blocking call."""
    timer = threading.Timer(EXIT_SECONDS, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()


def _hand_over(number: int, frame: FrameType | None) -> None:
    before = _handed.get(number, signal.SIG_DFL)
    if callable(before):
        before(number, frame)
    elif before == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
