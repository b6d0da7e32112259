"""The leases of this process's runs, held from a thread that no busy event loop delays."""

from __future__ import annotations

import asyncio
import logging
import threading

from django.db import connections

from aguiapp import conf, store
from aguiapp.engine import recovery
from aguiapp.engine.driver import Driver
from aguiapp.errors import Fenced
from aguiapp.models import Run

logger = logging.getLogger("aguiapp.engine")

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
