"""Wake-ups between processes: they carry no event, and losing one costs a poll interval."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any

from channels.layers import InMemoryChannelLayer, get_channel_layer

from aguiapp import conf

logger = logging.getLogger("aguiapp.feed")


def group(thread_id: int) -> str:
    """The channel-layer group of a thread."""
    return "aguiapp." + hashlib.sha256(f"thread {thread_id}".encode()).hexdigest()[:32]


class Hints:
    """Hints through the shared channel layer; `ring` is called with a thread's id per hint.

    Without a shared layer nothing happens here, and readers elsewhere find by polling.
    """

    def __init__(self, ring: Callable[[int], None]) -> None:
        self._ring = ring
        self._layer: Any = _shared_layer()
        self._channel: str | None = None
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: dict[int, bool] = {}
        self._listener: asyncio.Task[None] | None = None

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def send(self, thread_id: int) -> None:
        """Tell other processes, one message in flight per thread."""
        if self._layer is None:
            return
        if thread_id in self._sending:
            self._sending[thread_id] = True
            return
        self._sending[thread_id] = False
        self._spawn(self._send(thread_id))

    async def _send(self, thread_id: int) -> None:
        try:
            again = True
            while again:
                self._sending[thread_id] = False
                hint = {"type": "aguiapp.hint", "thread": thread_id}
                await self._layer.group_send(group(thread_id), hint)
                again = self._sending[thread_id]
        finally:
            self._sending.pop(thread_id, None)

    def join(self, thread_id: int) -> None:
        """Listen for a thread."""
        if self._layer is not None:
            self._spawn(self._join(thread_id))

    async def _join(self, thread_id: int) -> None:
        async with self._opening:
            if self._channel is None:
                self._channel = await self._layer.new_channel("aguiapp")
                self._listener = self._spawn(self._listen(self._channel))
        await self._layer.group_add(group(thread_id), self._channel)

    def leave(self, thread_id: int) -> None:
        """Listen no more for a thread."""
        if self._layer is not None and self._channel is not None:
            self._spawn(self._layer.group_discard(group(thread_id), self._channel))

    async def _listen(self, channel: str) -> None:
        while True:
            try:
                message = await self._layer.receive(channel)
            except Exception as error:  # whatever the layer raises while it is away
                logger.warning("channel layer: %s; readers poll meanwhile", type(error).__name__)
                await asyncio.sleep(1)
            else:
                self._ring(message.get("thread", 0))


def _shared_layer() -> Any:
    layer = get_channel_layer(conf.get().CHANNEL_LAYER)
    return None if layer is None or isinstance(layer, InMemoryChannelLayer) else layer


async def _quietly(work: Any) -> None:
    """A hint that fails is a hint that is lost."""
    try:
        await work
    except Exception as error:  # whatever the layer raises: the poll covers it
        logger.warning("channel layer: %s", type(error).__name__)
