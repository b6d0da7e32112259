"""What keeps runs alive in a process: leases, commands, the sweep, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from django.db import connections

from aguiapp import agents, conf, feed, store
from aguiapp.engine import recovery, turns
from aguiapp.engine.attendance import Attendance
from aguiapp.engine.driver import Driver
from aguiapp.errors import Fenced
from aguiapp.models import Command, Run

logger = logging.getLogger("aguiapp.engine")

#: How long a stopping process waits for its readers to take their last bytes.
FLUSH_SECONDS = 2.0
#: How long a stopped process may be held up by a blocking call of an agent.
EXIT_SECONDS = 10.0


#: How long a loop has to end a run whose time is up, before the lease's thread does.
OVERDUE_SECONDS = 2.0


class Leases:
    """Renews the leases of all runs of this process from a thread that no busy loop delays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drivers: dict[int, tuple[Driver, asyncio.AbstractEventLoop]] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()

    def add(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
        """Hold the lease of this run from now on."""
        with self._lock:
            self._drivers[driver.run.pk] = driver, loop
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="aguiapp-lease", daemon=True
                )
                self._thread.start()

    def drop(self, driver: Driver) -> None:
        """The run ended."""
        with self._lock:
            self._drivers.pop(driver.run.pk, None)
            if not self._drivers:
                self._changed.set()

    def _work(self) -> None:
        while True:
            self._changed.wait(conf.get().LEASE_SECONDS / 5)
            with self._lock:
                self._changed.clear()
                drivers = list(self._drivers.values())
                if not drivers:
                    self._thread = None
                    return
            self._renew(drivers)
            for driver, _ in drivers:
                self._overrule(driver)

    @staticmethod
    def _overrule(driver: Driver) -> None:
        """End a run whose time is up and whose loop does not: its agent blocks it."""
        code = driver.patience.overdue(late=OVERDUE_SECONDS)
        if not code or driver.done.is_set() or driver.ending:
            return
        try:
            recovery.take_over(driver.run, status=Run.Status.ERROR, code=code)
        except Exception as error:  # the database is away: the next look may find it
            logger.warning("run not ended run=%s: %s", driver.run.key, error)
        finally:
            connections.close_all()

    def _renew(self, drivers: list[tuple[Driver, asyncio.AbstractEventLoop]]) -> None:
        lanes = [driver.lane for driver, _ in drivers]
        rows = [
            (lane.run_id, lane.token, lane.seq - len(lane.pending), lane.bytes) for lane in lanes
        ]
        try:
            gone = set(store.submit("writer", store.renew, rows).result())
        except Exception as error:  # the database is away: the next renewal may find it
            logger.warning("leases not renewed: %s", error)
            return
        for driver, loop in drivers:
            if driver.lane.run_id in gone and not driver.done.is_set() and not loop.is_closed():
                loop.call_soon_threadsafe(self._fence, driver)

    @staticmethod
    def _fence(driver: Driver) -> None:
        if not driver.ending:
            driver.lane.give_up(Fenced())


leases = Leases()


class Engine:
    """The runs that one event loop drives."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.drivers: dict[int, Driver] = {}
        self.draining = False
        self.loop = loop
        self.attendance = Attendance(self.spawn)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._poller: asyncio.Task[None] | None = None
        self._signals_installed = False

    @property
    def alive(self) -> bool:
        """Whether the loop runs and this engine takes part in it."""
        return self.loop.is_running() and not self.draining

    def promotes(self) -> bool:
        """Whether this engine drives the runs that wait for their turn."""
        return not self.draining and conf.get().WRITER == "group"

    def adopt(self, run: Run) -> None:
        """Drive a run that has been promoted for this process."""
        self.spawn(turns.adopt(self, run), f"aguiapp turn {run.key}")

    async def overrule(self, run: Run, *, status: str, code: str = "") -> None:
        """End a run that this engine does not drive, and drive the one that follows it."""
        self._take_in(
            await store.call(
                recovery.take_over, run, status=status, code=code, promotes=self.promotes()
            )
        )

    def _take_in(self, ended: recovery.Ended | None) -> None:
        if ended is not None:
            feed.current().announce(ended.run.thread_id)
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
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = self.spawn(self._sweep(), "aguiapp sweeper")
        if not self._signals_installed:
            self._signals_installed = True
            install_signal_handler()

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
        leases.drop(driver)
        self.drivers.pop(driver.run.pk, None)
        if driver.following is not None:
            self.adopt(driver.following)

    async def _sweep(self) -> None:
        while not self.draining:
            try:
                for ended in await store.call(recovery.sweep, promotes=True):
                    self._take_in(ended)
                for thread_id in await store.call(store.claimable):
                    if (run := await store.call(store.claim, thread_id)) is not None:
                        self.adopt(run)
                if agents.heed_readers():
                    await store.call(store.watchers.forget)
            except Exception as error:
                logger.warning("sweep failed: %s", error)
            self.attendance.renew()
            await asyncio.sleep(conf.get().SWEEP_SECONDS)

    async def _poll(self) -> None:
        """What befalls our runs from outside: commands, the clock, readers who leave."""
        while self.drivers:
            await asyncio.sleep(conf.get().COMMAND_SECONDS)
            for driver in list(self.drivers.values()):
                if code := driver.patience.overdue():
                    driver.stop(code)
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
        """Take no new runs, let the running ones finish for a moment, end the rest legally."""
        self.draining = True
        drivers = list(self.drivers.values())
        logger.info("draining %d runs", len(drivers))
        if drivers:
            waits = [asyncio.ensure_future(driver.done.wait()) for driver in drivers]
            await asyncio.wait(waits, timeout=conf.get().DRAIN_SECONDS)
            for driver in drivers:
                driver.stop("shutdown")
            await asyncio.wait(waits, timeout=conf.get().CANCEL_SECONDS + 5)
        feed.current().close()
        await feed.current().flushed(FLUSH_SECONDS)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1)


_engines: WeakKeyDictionary[asyncio.AbstractEventLoop, Engine] = WeakKeyDictionary()


def current() -> Engine:
    """The engine of the running loop."""
    loop = asyncio.get_running_loop()
    found = _engines.get(loop)
    if found is None:
        found = _engines[loop] = Engine(loop)
    return found


Handler = Callable[[int, FrameType | None], Any] | int | None

_handed: dict[int, Handler] = {}
_drains: set[asyncio.Task[None]] = set()


def install_signal_handler() -> None:
    """On SIGTERM and SIGINT drain first, then hand the signal to whoever handled it before.

    Neither Daphne nor uvicorn waits for work that is not a connection; nothing here depends on
    the ASGI lifespan, which Daphne does not speak.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)
        if before is not _handle:
            _handed[number] = before
            signal.signal(number, _handle)


def _handle(number: int, frame: FrameType | None) -> None:
    live = [engine for engine in _engines.values() if engine.alive]
    if _drains or not live:  # asked twice, or nothing to wait for
        _hand_over(number, frame)
        return
    live[0].loop.call_soon_threadsafe(_start_drain, live[0], number, frame)


def _start_drain(engine: Engine, number: int, frame: FrameType | None) -> None:
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
