"""What keeps runs alive in a process: leases, commands, the sweep, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from aguiapp import agents, conf, feed, store
from aguiapp.engine import recovery, signals, turns
from aguiapp.engine.attendance import Attendance
from aguiapp.engine.driver import Driver
from aguiapp.engine.leases import leases
from aguiapp.models import Command, Run

logger = logging.getLogger("aguiapp.engine")

#: How long a stopping process waits for its readers to take their last bytes.
FLUSH_SECONDS = 2.0


class Engine:
    """The runs that one event loop drives."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.drivers: dict[int, Driver] = {}
        #: Whether requests are served here; a loop that only runs one agent drives no other runs.
        self.serving = False
        self.draining = False
        self.loop = loop
        self.attendance = Attendance(self.spawn)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beginnings: set[asyncio.Task[Any]] = set()
        self._turnstiles: WeakValueDictionary[Any, asyncio.Lock] = WeakValueDictionary()
        self._sweeper: asyncio.Task[None] | None = None
        self._poller: asyncio.Task[None] | None = None
        self._signals_installed = False

    @property
    def alive(self) -> bool:
        """Whether the loop runs and this engine takes part in it."""
        return self.loop.is_running() and not self.draining

    def promotes(self) -> bool:
        """Whether this engine drives the runs that wait for their turn."""
        return self.serving and not self.draining and conf.get().WRITER == "group"

    def turnstile(self, thread: Any) -> asyncio.Lock:
        """Who opens a run on that thread passes one by one."""
        lock = self._turnstiles.get(thread)
        if lock is None:
            lock = self._turnstiles[thread] = asyncio.Lock()
        return lock

    def adopt(self, run: Run) -> None:
        """Drive a run that has been promoted for this process, or let others do so."""
        name = f"aguiapp turn {run.key}"
        if self.promotes():
            self.begin(turns.adopt(self, run), name)
        else:
            self.begin(store.call(store.give_back, run), name)

    def begin(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """A task that is about to drive a run: a stopping process waits for it."""
        task = self.spawn(work, name)
        self._beginnings.add(task)
        task.add_done_callback(self._beginnings.discard)
        return task

    async def overrule(self, run: Run, *, status: str, code: str = "") -> None:
        """End a run that this engine does not drive, and drive the one that follows it."""
        ended = await store.call(
            recovery.take_over, run, status=status, code=code, promotes=self.promotes()
        )
        if ended is not None:
            feed.current().announce(run.thread_id)
            if ended.following is not None:
                self.adopt(ended.following)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """A task that depends on no request: a fresh context, held until it is done.

        The inline writer works in its caller's thread, which asgiref finds by the context.
        """
        inline = conf.get().WRITER == "inline"
        context = contextvars.copy_context() if inline else contextvars.Context()
        task = self.loop.create_task(work, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def wake(self) -> None:
        """Start what every serving process does: sweep, and listen for SIGTERM."""
        if self.draining or conf.get().WRITER == "inline":
            return
        self.serving = True
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = self.spawn(self._sweep(), "aguiapp sweeper")
        self.listen()

    def listen(self) -> None:
        """Drain on SIGTERM."""
        if not self._signals_installed and conf.get().WRITER == "group":
            self._signals_installed = True
            signals.install(_engines.values)

    def drive(self, driver: Driver) -> asyncio.Task[Any]:
        """Drive a run to its end in a task of its own."""
        self.drivers[driver.run.pk] = driver
        if conf.get().WRITER == "group":
            leases.add(driver, self.loop)
            if self._poller is None or self._poller.done():
                self._poller = self.spawn(self._poll(), "aguiapp commands")
        return self.spawn(self._drive(driver), f"run {driver.run.key}")

    async def _drive(self, driver: Driver) -> None:
        ended = self.loop.create_task(driver.done.wait())
        ended.add_done_callback(lambda _: self._forget(driver))
        try:
            await driver.drive()
        finally:
            ended.cancel()

    def _forget(self, driver: Driver) -> None:
        leases.drop(driver.run)
        self.drivers.pop(driver.run.pk, None)
        if driver.following is not None:
            self.adopt(driver.following)

    async def _sweep(self) -> None:
        """End what other processes lost, start the turns that nobody drives, one by one."""
        while not self.draining:
            try:
                for run in await store.call(store.abandoned):
                    await self._apart(self._end_lost, run)
                for thread_id in await store.call(store.claimable):
                    await self._apart(self._claim, thread_id)
                if agents.heed_readers():
                    await store.call(store.watchers.forget)
            except Exception as error:
                logger.warning("sweep failed: %s", error)
            self.attendance.renew()
            await asyncio.sleep(conf.get().SWEEP_SECONDS)

    async def _apart(self, work: Callable[[Any], Coroutine[Any, Any, None]], subject: Any) -> None:
        """A part of the sweep that a stopping process waits for; its failure keeps no other."""
        if self.draining:
            return
        try:
            await asyncio.shield(self.begin(work(subject), "aguiapp sweep"))
        except Exception as error:
            logger.warning("sweep failed for %s: %s", subject, error)

    async def _end_lost(self, run: Run) -> None:
        await self.overrule(run, status=Run.Status.ERROR, code="orphaned")

    async def _claim(self, thread_id: int) -> None:
        if (run := await store.call(store.claim, thread_id)) is not None:
            self.adopt(run)

    async def _poll(self) -> None:
        """What befalls our runs from outside: commands, and readers who leave."""
        while self.drivers:
            await asyncio.sleep(conf.get().COMMAND_SECONDS)
            try:
                for command in await store.call(store.pending_commands, list(self.drivers)):
                    self.obey(command)
                await self._heed_readers()
            except Exception as error:
                logger.warning("commands not read: %s", error)

    async def _heed_readers(self) -> None:
        """Stop the runs that end when everybody who may speak has left."""
        heeding = [d for d in self.drivers.values() if d.patience.heeds_readers]
        if not heeding:
            return
        read = await self.attendance.read([driver.thread.pk for driver in heeding])
        for driver in heeding:
            if driver.patience.deserted(is_read=driver.thread.pk in read):
                driver.stop(Run.Status.CANCELLED, "everybody who may speak here had left")

    def obey(self, command: Command) -> None:
        """Do what a command says to a run of ours."""
        driver = self.drivers.get(command.run_id or 0)
        if driver is not None and command.kind == Command.Kind.CANCEL:
            driver.stop(Run.Status.CANCELLED)

    async def drain(self) -> None:
        """Take no new runs, let the running ones finish for a moment, end the rest legally.

        Turns that wait are left to other processes.
        """
        self.draining = True
        logger.info("draining %d runs", len(self.drivers))
        if not await self._idle(conf.get().DRAIN_SECONDS):
            await self._idle(conf.get().CANCEL_SECONDS + 5, stop="shutdown")
        feed.current().close()
        await feed.current().flushed(FLUSH_SECONDS)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1)

    async def _idle(self, patience: float, stop: str = "") -> bool:
        """Wait for the last run, also one that is only beginning; False when it took too long."""
        deadline = self.loop.time() + patience
        while self.drivers or self._beginnings:
            for driver in self.drivers.values() if stop else ():
                driver.stop(stop)
            if self.loop.time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True


_engines: WeakKeyDictionary[asyncio.AbstractEventLoop, Engine] = WeakKeyDictionary()


def current() -> Engine:
    """The engine of the running loop."""
    loop = asyncio.get_running_loop()
    found = _engines.get(loop)
    if found is None:
        found = _engines[loop] = Engine(loop)
    return found
