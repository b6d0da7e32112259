"""The life of a run: claim, drive, cancel, lease, end, drain."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from asgiref.sync import async_to_sync

from aguiapp import agents, conf, feed, protocol, store
from aguiapp.engine import history, opening, recovery
from aguiapp.engine.driver import Driver
from aguiapp.engine.opening import Prepared
from aguiapp.engine.runtime import Engine, current
from aguiapp.errors import Draining
from aguiapp.models import Command, Run, Thread

__all__ = ["Engine", "Request", "Started", "cancel", "current", "run_now", "start"]


#: How long a post waits for another process that is ending the thread's lost run.
TAKEOVER_SECONDS = 3.0
#: A run of this process ends by itself; whoever cancels it waits this much longer for a slow
#: database, and then answers that it still runs.
OWN_CANCEL_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """A post to an agent, parsed and allowed: who, what, and the text as it came."""

    agent: str
    input: dict[str, Any]
    text: str
    scope: str
    actor: str
    user: Any = None
    thread_key: Any = None
    mode: str = "sse"
    transport: str = "http"


@dataclass(frozen=True)
class Started:
    """A run that was started or attached to; `unlogged` goes ahead of its events, without ids."""

    thread: Thread
    run: Run
    attached: bool = False
    unlogged: list[protocol.Event] = field(default_factory=list)
    task: asyncio.Task[Any] | None = None


async def start(request: Request) -> Started:
    """Store the run and drive it in a task that no connection owns, or attach to the same post.

    Whoever asked may go away at any moment: what was begun is finished.
    """
    engine = current()
    if engine.draining:
        raise Draining
    engine.wake()
    agent = agents.get(request.agent)
    await agent.check_ready()
    work = engine.spawn(_start(engine, agent, request), "aguiapp start")
    started: Started = await asyncio.shield(work)
    return started


async def _start(engine: Engine, agent: agents.Agent, request: Request) -> Started:
    opened = await _open(request)
    run, thread = opened.run, opened.thread
    if opened.attached:
        return Started(thread, run, attached=True)
    try:
        begun = await store.call(opening.read, thread, run, request.input, request.actor)
        driver = Driver(_prepared(opened, agent, request, begun))
    except BaseException:
        await store.call(
            recovery.end_stored,
            run,
            run.lease_token or 0,
            status=Run.Status.ERROR,
            code="agent_failed",
        )
        raise
    task = engine.drive(driver)
    if conf.get().WRITER == "inline":
        await task
    return Started(thread, run, unlogged=begun.unlogged, task=task)


def _prepared(
    opened: store.Opened, agent: agents.Agent, request: Request, begun: opening.Opening
) -> Prepared:
    merged = begun.merged
    given, repeated = history.distinct_tools(request.input)
    return Prepared(
        thread=opened.thread,
        run=opened.run,
        agent=agent,
        input={**given, "messages": merged.messages, "state": merged.state},
        user=request.user,
        folder=begun.folder,
        opening=begun.events,
        findings=[*merged.findings, *repeated],
    )


async def _open(request: Request) -> store.Opened:
    """Take the thread's slot; a run that died in it is ended first."""
    given = request.input
    wanted = store.Opening(
        scope=request.scope,
        thread_id=given["threadId"],
        run_id=given["runId"],
        agent=request.agent,
        text=request.text,
        input_hash=history.input_hash(given),
        user_id=getattr(request.user, "pk", None),
        parent_run=given.get("parentRunId", ""),
        resume=frozenset(entry["interruptId"] for entry in given.get("resume") or ()),
        base=opening.base(given),
        thread_key=request.thread_key,
        mode=request.mode,
        transport=request.transport,
    )
    patience = asyncio.get_running_loop().time() + TAKEOVER_SECONDS
    while True:
        try:
            return await store.call(store.open_run, wanted)
        except store.BeingEnded:
            if asyncio.get_running_loop().time() > patience:
                raise
            await asyncio.sleep(0.05)
        except store.Abandoned as found:
            await store.call(
                recovery.take_over, found.run, status=Run.Status.ERROR, code="orphaned"
            )
            feed.current().announce(found.run.thread_id)


async def cancel(run: Run, actor: str) -> Run:
    """Stop a run from any process, within a second; idempotent. Returns the run as it is then."""
    if run.ended:
        return run
    engine = current()
    loop = asyncio.get_running_loop()
    settings = conf.get()
    deadline = loop.time() + settings.COMMAND_SECONDS + settings.CANCEL_SECONDS
    driver = engine.drivers.get(run.pk)
    if driver is not None:
        driver.stop(Run.Status.CANCELLED)
        deadline += OWN_CANCEL_SECONDS
    else:
        await store.call(store.command, run, Command.Kind.CANCEL, actor)
    while loop.time() < deadline:
        run = await store.call(store.refresh, run)
        if run.ended:
            return run
        await asyncio.sleep(0.05)
    if driver is None:
        await store.call(recovery.take_over, run, status=Run.Status.CANCELLED)
        feed.current().announce(run.thread_id)
    return await store.call(store.refresh, run)


def run_now(agent: str, input: dict[str, Any], *, user: Any, scope: str | None = None) -> Run:
    """Run an agent to its end and store it; for commands, seeds and tests without a server."""
    given = protocol.parse_input(protocol.dumps(input))
    request = Request(
        agent=agent,
        input=given,
        text=protocol.dumps(input),
        scope=scope or f"user:{user.pk}",
        actor="system",
        user=user,
        mode="direct",
        transport="none",
    )

    async def whole() -> Run:
        started = await start(request)
        if started.task is not None:
            await started.task
        return await store.call(store.refresh, started.run)

    return async_to_sync(whole)()
