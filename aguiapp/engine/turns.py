"""From a stored run to its driver: what the run is given, and what stands in its way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from aguiapp import agents, conf, feed, protocol, store
from aguiapp.engine import history, joins, opening, recovery
from aguiapp.engine.driver import Driver
from aguiapp.engine.leases import leases
from aguiapp.engine.opening import Prepared
from aguiapp.errors import AgentNotReady, AguiError, Fenced, Forbidden, NotFound, StaleHistory
from aguiapp.models import Run

logger = logging.getLogger("aguiapp.run")


class Host(Protocol):
    """Who drives runs, as far as a turn needs it: the engine."""

    def promotes(self) -> bool: ...

    def adopt(self, run: Run) -> None: ...

    def drive(self, driver: Driver) -> asyncio.Task[Any]: ...


#: A preparation that took longer is asked whether the run is still ours.
LONG_SECONDS = 0.3


class Begun(NamedTuple):
    """The task that drives a run, and what its requester is shown first."""

    task: asyncio.Task[Any]
    unlogged: list[protocol.Event]


async def begin(
    host: Host, run: Run, given: dict[str, Any], user: Any, *, overtaken: bool = False
) -> Begun:
    """Drive a run of ours that has its thread's slot; when that fails, the run ends as failed.

    One that was `overtaken` by a later turn says what it was asked, and is cancelled.
    """
    leases.hold(run)
    try:
        agent = agents.get(run.agent)
        begun = await store.call(_read, run, given)
        driver = Driver(_prepared(run, agent, given, user, begun), promotes=host.promotes)
    except BaseException as error:
        await end(host, run, _code(error))
        raise
    if overtaken:
        driver.stop(Run.Status.CANCELLED)
    return Begun(host.drive(driver), begun.unlogged)


def _read(run: Run, given: dict[str, Any]) -> opening.Opening:
    """How the run begins; raises Fenced when it was ended from outside while that was found out."""
    began = time.monotonic()
    begun = opening.read(run.thread, run, given)
    if time.monotonic() - began > LONG_SECONDS and not store.holds(run):
        raise Fenced
    return begun


def _prepared(
    run: Run, agent: agents.Agent, given: dict[str, Any], user: Any, begun: opening.Opening
) -> Prepared:
    merged = begun.merged
    given, repeated = history.distinct_tools(given)
    return Prepared(
        thread=run.thread,
        run=run,
        agent=agent,
        input={**given, "messages": merged.messages, "state": merged.state},
        user=user,
        folder=begun.folder,
        opening=begun.events,
        findings=[*merged.findings, *repeated],
    )


async def adopt(host: Host, run: Run) -> None:
    """Drive a run whose turn has come; whatever is in its way, it ends and the next one starts."""
    leases.hold(run)
    feed.current().announce(run.thread_id)
    try:
        await agents.get(run.agent).check_ready()
        given, overtaken = await store.call(_waiting, run)
    except Exception as error:
        if not isinstance(error, AguiError):
            logger.exception("queued run could not start run=%s", run.key)
        await end(host, run, _code(error))
        return
    try:
        await begin(host, run, given, run.user, overtaken=overtaken)
    except AguiError:
        pass  # the run says so, or belongs to somebody else by now
    except Exception:
        logger.exception("queued run could not start run=%s", run.key)


def _anybody(run: Run, right: str) -> bool:
    return True


#: Whether who asked for a run has that right on its thread now; the app sets it when it is ready.
permits: Callable[[Run, str], bool] = _anybody


def _waiting(run: Run) -> tuple[dict[str, Any], bool]:
    """The input of a run that waited, and whether a turn that interrupts came meanwhile."""
    if not store.holds(run):
        raise Fenced
    if not permits(run, "speak"):
        raise Forbidden
    text = store.rebuild_input(run)
    given = protocol.parse_input(text, max_depth=conf.get().JSON_DEPTH)
    later = store.queued(run.thread_id).filter(pk__gt=run.pk).select_related("thread", "user")
    return given, any(map(_interrupts, later))


def _interrupts(run: Run) -> bool:
    known = run.agent in agents.names() and agents.get(run.agent)
    return bool(known and known.settings.BUSY == "interrupt" and permits(run, "cancel"))


def _code(error: BaseException) -> str:
    if isinstance(error, StaleHistory | Forbidden | Fenced):
        return error.code
    return "agent_not_ready" if isinstance(error, AgentNotReady | NotFound) else "agent_failed"


async def end(host: Host, run: Run, code: str) -> None:
    """End a run of ours that was never driven."""
    if code == Fenced.code:
        leases.drop(run)
        return
    try:
        following = await store.call(
            recovery.end_stored,
            run,
            run.lease_token or 0,
            status=Run.Status.ERROR,
            code=code,
            next_token=store.new_token() if host.promotes() else 0,
        )
    except Exception:
        logger.exception("run left to the sweeper run=%s", run.key)
        return
    finally:
        leases.drop(run)
    feed.current().announce(run.thread_id)
    if following is not None:
        host.adopt(following)


def restated(run: Run, given: dict[str, Any]) -> list[protocol.Event]:
    """What somebody who posted that input is shown ahead of the run: what it lacks of the thread.

    Of a run that is kept no more from its beginning it is told what is missing instead. Blocks on
    the database.
    """
    found = store.refresh(run)
    if (missing := joins.gap(found.thread, found.offset or 0, found)) is not None:
        return missing.marked
    try:
        return opening.read(found.thread, found, given).unlogged
    except StaleHistory:  # the run says so
        return []
