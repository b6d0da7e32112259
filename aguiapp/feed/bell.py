"""How followers of a thread are woken."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes the followers of one thread; `version` tells a follower what it has seen."""

    def __init__(self) -> None:
        self.version = 0
        self.followers = 0
        self._waiting: set[asyncio.Future[bool]] = set()

    def ring(self) -> None:
        """Wake everybody who waits."""
        self.version += 1
        for waiter in self._waiting:
            _answer(waiter, True)

    async def wait(self, seen: int, patience: float) -> bool:
        """Wait until the bell rang since `seen`; False when `patience` seconds passed instead."""
        if self.version != seen:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(patience, _answer, waiter, False)
        self._waiting.add(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiting.discard(waiter)


def _answer(waiter: asyncio.Future[bool], rang: bool) -> None:
    if not waiter.done():
        waiter.set_result(rang)
