"""The leases of this process's runs, held from a thread that no busy event loop delays."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from django.db import connections

from aguiapp import conf, store
from aguiapp.engine import recovery
from aguiapp.engine.driver import Driver
from aguiapp.errors import Fenced
from aguiapp.models import Run

logger = logging.getLogger("aguiapp.engine")

#: How long a loop has to end a run whose time is up, before the lease's thread does.
OVERDUE_SECONDS = 2.0

#: Run id, token, and how far the run got: its last committed seq, its bytes.
Claim = Callable[[], tuple[int, int, int, int]]


class Leases:
    """Renews the leases of all runs of this process from a thread that no busy loop delays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[int, Claim] = {}
        self._drivers: dict[int, tuple[Driver, asyncio.AbstractEventLoop]] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()

    def hold(self, run: Run) -> None:
        """Hold the lease of a run that is about to be driven: preparing it may take long."""
        if conf.get().WRITER == "group":
            self._add(run, lambda: (run.pk, run.lease_token or 0, 0, 0))

    def add(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
        """Hold the lease of a run that is driven, and see that its time is kept."""
        with self._lock:
            self._drivers[driver.run.pk] = driver, loop
        self._add(driver.run, driver.lane.claim)

    def _add(self, run: Run, claim: Claim) -> None:
        with self._lock:
            self._claims[run.pk] = claim
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="aguiapp-lease", daemon=True
                )
                self._thread.start()

    def drop(self, run: Run) -> None:
        """The run ended."""
        with self._lock:
            self._drivers.pop(run.pk, None)
            self._claims.pop(run.pk, None)
            if not self._claims:
                self._changed.set()

    def _work(self) -> None:
        while True:
            self._changed.wait(conf.get().LEASE_SECONDS / 5)
            with self._lock:
                self._changed.clear()
                claims = list(self._claims.values())
                drivers = list(self._drivers.values())
                if not claims:
                    self._thread = None
                    return
            self._renew(claims, drivers)
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

    def _renew(
        self, claims: list[Claim], drivers: list[tuple[Driver, asyncio.AbstractEventLoop]]
    ) -> None:
        rows = [claim() for claim in claims]
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
