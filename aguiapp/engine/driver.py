"""Driving one run: the agent in a task of its own, its events into the log, the ending always."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from django.db import InterfaceError, OperationalError

from aguiapp import conf, feed, protocol, store
from aguiapp.agents import RunContext
from aguiapp.engine import recovery
from aguiapp.engine.acting import Acting
from aguiapp.engine.clock import moment, now_ms
from aguiapp.engine.endings import fields_of
from aguiapp.engine.history import state_hash
from aguiapp.engine.limits import LimitExceeded
from aguiapp.engine.opening import Prepared
from aguiapp.engine.patience import Patience
from aguiapp.engine.recorder import Recorder
from aguiapp.errors import Fenced, RunError
from aguiapp.models import Run

logger = logging.getLogger("aguiapp.run")

#: An agent that never waits is made to let the loop run this often, in seconds.
SLICE_SECONDS = 0.002
#: How long an agent may go on after its run ended (to tidy up, say), in seconds and in events.
AFTERLIFE_SECONDS = 10.0
AFTERLIFE_EVENTS = 100


class RunOver(Exception):
    """The run has ended; its agent goes on and is not heard."""


class Driver:
    """One run of this process from RUN_STARTED to its end; `done` is set once it ended."""

    def __init__(self, prepared: Prepared, *, promotes: Callable[[], bool]) -> None:
        run, thread = prepared.run, prepared.thread
        self.run = run
        self.thread = thread
        self.done = asyncio.Event()
        self.patience = Patience(prepared.agent.settings, mode=run.mode)
        #: The thread's next run, once this one ended and gave it the slot.
        self.following: Run | None = None
        self._promotes = promotes
        self._prepared = prepared
        self._loop = asyncio.get_running_loop()
        self._recorder = Recorder(
            thread_id=thread.thread_id,
            run_id=run.run_id,
            run_key=str(run.key),
            folder=prepared.folder,
            now=now_ms,
            limits=prepared.agent.settings,
        )
        self._recorder.findings += prepared.findings
        self._writer = store.writer()
        self._tail = feed.current().open_tail(thread, run)
        self.lane = store.Lane(run.pk, run.lease_token or 0, self)
        self._limit = conf.get().UNCOMMITTED_BYTES
        self._stop: str = ""
        self._lost: Exception | None = None
        self._refused: Exception | None = None
        self._detail = ""
        self._wake = asyncio.Event()
        self._agent: Acting | None = None
        self._terminal_row: tuple[int, str] | None = None
        self._slice_end = 0.0
        self._first_event: float | None = None
        self._first_event_at: datetime | None = None
        self._noted = 0
        #: The last transaction is on its way: from here a missing token is our own doing.
        self.ending = False

    # -- what the store reports ------------------------------------------------

    def committed(self, rows: Sequence[store.Row]) -> None:
        """Rows are safe: only now may anybody see them."""
        if self._first_event is None:
            self._first_event = self.patience.elapsed
            self._first_event_at = moment(rows[0].created)
        self._tail.publish(rows)

    def lost(self, error: Exception) -> None:
        """No more can be written: fenced, or the store failed."""
        self._lost = error
        self._wake.set()

    # -- what the context of the agent uses ------------------------------------

    async def emit(self, event: Any) -> None:
        """Record an event of the agent; waits while too much is uncommitted."""
        if self._refused is not None:
            raise self._refused
        if self._recorder.late > AFTERLIFE_EVENTS:
            raise RunOver
        self.patience.heard()
        try:
            self._recorder.feed(event)
        except (protocol.ProtocolError, LimitExceeded) as error:
            if self._recorder.terminal is not None:
                self._recorder.find("after_terminal", str(error))
                return
            self._refused = error
            self._wake.set()
            raise
        finally:
            self._append()
        if self._recorder.terminal is not None:
            self._wake.set()
        elif self.lane.uncommitted > self._limit:
            await self._writer.below(self.lane, self._limit)
        now = self._loop.time()
        if now > self._slice_end:
            await asyncio.sleep(0)
            self._slice_end = self._loop.time() + SLICE_SECONDS

    @property
    def state(self) -> Any:
        return self._recorder.fold.state

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self._recorder.fold.snapshot().messages)

    # -- stopping --------------------------------------------------------------

    def stop(self, reason: str, note: str = "") -> None:
        """End the run: "cancelled", or the code of an error such as "shutdown"."""
        if self._recorder.terminal is not None:
            return
        if note and not self._stop:
            self._recorder.find("stopped", note)
        self._stop = self._stop or reason
        self._wake.set()

    # -- the run ---------------------------------------------------------------

    async def drive(self) -> None:
        """Run the agent to its end and end the run, whatever happens."""
        try:
            self._start()
            self._agent = self._act()
            await self._wait_for_end()
            await self._end()
        except Exception:
            logger.exception("run failed in the engine run=%s", self.run.key)
            self._append()
            await self._save_pending()
            await self._end_from_log("store_failed", traceback.format_exc())
        finally:
            self._tail.close()
            self.done.set()
        await self._see_the_agent_off()

    def _act(self) -> Acting:
        run = RunContext(
            input=self._prepared.input,
            user=self._prepared.user,
            thread=self.thread,
            emitter=self,
        )
        return Acting(self._prepared.agent, run, self.emit, self._wake.set)

    def _start(self) -> None:
        for event in self._prepared.opening:
            self._recorder.write(event, free=True)
        self._append()

    def _append(self) -> None:
        """Hand recorded rows to the writer; the terminal waits for the run's last transaction."""
        created = now_ms()
        for row in self._recorder.drain():
            if row[0] in feed.TERMINAL_CODES:
                self._terminal_row = row
            elif self._lost is None:
                self._writer.append(self.lane, row[0], row[1], created)

    async def _wait_for_end(self) -> None:
        """Until the terminal is recorded, the agent returned, or somebody stops the run."""
        agent = self._agent
        assert agent is not None  # noqa: S101
        while not (agent.done or self._recorder.terminal or self._stopped()):
            self._wake.clear()
            try:
                async with asyncio.timeout(self.patience.remaining()):
                    await self._wake.wait()
            except TimeoutError:
                self._stop = self.patience.overdue()
        if self._recorder.terminal is not None:
            return
        seconds = conf.get().CANCEL_SECONDS
        if self._refused is not None:
            # The refusal unwinds the agent by itself; a cancellation would cut its `finally`.
            await agent.wait(seconds)
        if not agent.done:
            # A cancelled agent may still write for a moment; what comes later is a finding.
            agent.tell()
            await agent.wait(seconds)

    @property
    def _failure(self) -> BaseException | None:
        return self._agent.failure if self._agent is not None else None

    def _stopped(self) -> bool:
        return bool(self._stop or self._lost or self._refused)

    async def _end(self) -> None:
        if self._lost is not None:
            await self._end_lost(self._lost)
            return
        if self._recorder.terminal is None:
            self._recorder.close(self._owed())
            self._append()
        try:
            await self._finish()
        except Fenced:
            logger.warning("run fenced run=%s", self.run.key)
        else:
            assert self._recorder.terminal is not None  # noqa: S101
            fields = fields_of(self._recorder.terminal)
            self._log(fields["status"], fields.get("error_code", ""))

    async def _finish(self) -> None:
        rows = await self.lane.settle()
        self.ending = True
        assert self._terminal_row is not None  # noqa: S101
        code, text = self._terminal_row
        rows.append(store.Row(self.lane.seq + 1, code, text, now_ms()))
        recorder = self._recorder
        assert recorder.terminal is not None  # noqa: S101
        ending = store.Ending(
            **fields_of(recorder.terminal),
            counts=dict(recorder.counts),
            error_detail=self._detail,
            findings=list(recorder.findings),
            fold_hash=state_hash(recorder.fold.state),
            first_event_at=self._first_event_at or moment(rows[0].created),
        )
        self._noted = len(recorder.findings)
        self.following = await self._store_end(rows, ending)
        self.committed(rows)

    async def _store_end(self, rows: list[store.Row], ending: store.Ending) -> Run | None:
        """Write the last transaction; a lock or a lost connection is waited out, within the lease."""
        deadline = time.monotonic() + conf.get().LEASE_SECONDS
        next_token = self._next_token()
        again = False
        while True:
            try:
                return await store.call(
                    store.finish,
                    self.run.pk,
                    self.lane.token,
                    rows,
                    self._recorder.bytes,
                    ending,
                    next_token=next_token,
                    again=again,
                )
            except (OperationalError, InterfaceError):
                if time.monotonic() > deadline:
                    raise
                again = True
                await asyncio.sleep(0.1)

    def _next_token(self) -> int:
        """What the thread's next run is held by; 0 when this process takes no more of them."""
        return store.new_token() if self._promotes() else 0

    async def _save_pending(self) -> None:
        """Bring to the table what the agent wrote before the engine failed."""
        with suppress(Exception):
            async with asyncio.timeout(conf.get().LEASE_SECONDS):
                await self._writer.below(self.lane, 0)

    async def _end_lost(self, error: Exception) -> None:
        if isinstance(error, Fenced):
            logger.warning("run fenced run=%s", self.run.key)
            return
        logger.error("run could not be stored run=%s: %s", self.run.key, error)
        await self._end_from_log("store_failed", repr(error))

    async def _end_from_log(self, code: str, detail: str) -> None:
        """Memory is not to be trusted any more: what is stored decides how the run ends."""
        try:
            self.following = await store.call(
                recovery.end_stored,
                self.run,
                self.lane.token,
                status=Run.Status.ERROR,
                code=code,
                detail=detail,
                next_token=self._next_token(),
            )
        except Exception:
            logger.exception("run left to the sweeper run=%s", self.run.key)
        else:
            self._log(Run.Status.ERROR, code)

    def _owed(self) -> Any:
        """The terminal that the agent left to us."""
        if self._stop == Run.Status.CANCELLED:
            return recovery.terminal(self.run, status=Run.Status.CANCELLED)
        code, message = self._stop, ""
        if not self._stop and self._refused is None and self._failure is None:
            self._end_chunks()
        failure = self._refused or self._failure
        if not code and failure is not None:
            code, message = self._explain(failure)
        elif not code and (self._recorder.agent_started or self._recorder.verifier.open_items):
            code = "incomplete"
        if code:
            return recovery.terminal(self.run, status=Run.Status.ERROR, code=code, message=message)
        return recovery.terminal(self.run, status=Run.Status.SUCCESS)

    def _end_chunks(self) -> None:
        try:
            self._recorder.end_chunks()
        except (protocol.ProtocolError, LimitExceeded) as error:
            self._refused = error

    def _explain(self, error: BaseException) -> tuple[str, str]:
        """Code and public sentence; everything else is for staff and the server's log."""
        if isinstance(error, RunError):
            return error.code, error.message
        if isinstance(error, protocol.ProtocolError):
            self._detail = str(error)
            sentence = f"The agent broke a rule of AG-UI, {error.rule}: {error.message}"
            return "protocol_violation", sentence[:500]
        if isinstance(error, LimitExceeded):
            return error.code, error.message
        self._detail = "".join(traceback.format_exception(error))
        logger.error("agent failed run=%s", self.run.key, exc_info=error)
        return "agent_failed", ""

    async def _see_the_agent_off(self) -> None:
        """Let an agent that outlives its run finish; what it still says becomes findings."""
        agent, recorder = self._agent, self._recorder
        if agent is None:
            return
        if self._stopped():
            agent.tell()
        await agent.wait(AFTERLIFE_SECONDS)
        if not agent.done:
            await agent.end()
        if self._failure is not None and not self._stopped() and not self._detail:
            recorder.find("failed_after_terminal", type(self._failure).__name__)
        late = recorder.findings[self._noted :]
        if late:
            await store.call(store.add_findings, self.run.pk, late)

    def _log(self, status: str, code: str) -> None:
        """One line per run: ids and numbers, no content."""
        recorder, run = self._recorder, self.run
        counts = ",".join(f"{kind}:{n}" for kind, n in sorted(recorder.counts.items()))
        logger.info(
            "run ended thread=%s run=%s agent=%s mode=%s transport=%s status=%s code=%s"
            " events=%d types=%s bytes=%d first_event_ms=%.1f total_ms=%.1f",
            self.thread.key,
            run.key,
            run.agent,
            run.mode,
            run.transport,
            status,
            code,
            recorder.events,
            counts,
            recorder.bytes,
            (self._first_event or 0.0) * 1000,
            self.patience.elapsed * 1000,
        )
