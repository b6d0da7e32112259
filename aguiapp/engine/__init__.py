"""The life of a run: claim, drive, cancel, lease, end, drain."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from asgiref.sync import async_to_sync

from aguiapp import agents, conf, feed, protocol, store
from aguiapp.engine import history, opening, turns
from aguiapp.engine.joins import Gap, Join, gap, join
from aguiapp.engine.runtime import Engine, current
from aguiapp.errors import Draining, Fenced
from aguiapp.models import Command, Run, Thread

__all__ = [
    "Engine",
    "Gap",
    "Join",
    "Request",
    "Started",
    "cancel",
    "current",
    "expect_reader",
    "gap",
    "heal",
    "join",
    "reading",
    "run_now",
    "start",
]


#: How long a post waits for others: for who ends the thread's lost run, or holds its lock.
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
    #: Whether they may stop the run that is in their way, where the agent lets turns take over.
    may_cancel: bool = True
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
    engine.listen()
    agent = agents.get(request.agent)
    await agent.check_ready()
    work = engine.begin(_start(engine, agent, request), "aguiapp start")
    started: Started = await asyncio.shield(work)
    return started


async def _start(engine: Engine, agent: agents.Agent, request: Request) -> Started:
    busy = agent.settings.BUSY
    if not engine.serving:
        busy = "reject"
    elif busy == "interrupt" and not request.may_cancel:
        busy = "enqueue"
    opened = await _open(engine, request, busy)
    run, thread = opened.run, opened.thread
    if opened.next is not None:
        engine.adopt(opened.next)
    if run.offset is None:
        feed.current().announce(thread.pk)
        if opened.active is not None and busy == "interrupt":
            # Word of it stands with the run already; this is only quicker.
            engine.spawn(cancel(opened.active, request.actor), "aguiapp interrupt")
        return Started(thread, run, attached=opened.attached)
    if opened.attached:
        unlogged = await heal(run, request.input)
        return Started(thread, run, attached=True, unlogged=unlogged)
    try:
        begun = await turns.begin(engine, run, request.input, request.user)
    except Fenced:  # it was stopped while it was prepared: its log says how
        return Started(thread, await store.call(store.refresh, run), attached=True)
    if conf.get().WRITER == "inline":
        await begun.task
    return Started(thread, run, unlogged=begun.unlogged, task=begun.task)


async def _open(engine: Engine, request: Request, busy: str) -> store.Opened:
    """Take the thread's slot or a place in its queue; a run that died in the slot is ended first."""
    wanted = _opening(request, busy)
    patience = asyncio.get_running_loop().time() + TAKEOVER_SECONDS
    while True:
        try:
            # One post of a thread at a time, or those to a locked one would take every connection.
            async with engine.turnstile(wanted.thread_key or (wanted.scope, wanted.thread_id)):
                return await store.call(store.open_run, wanted)
        except (store.BeingEnded, store.Contended):
            if asyncio.get_running_loop().time() > patience:
                raise
            await asyncio.sleep(0.05)
        except store.Abandoned as found:
            await engine.overrule(found.run, status=Run.Status.ERROR, code="orphaned")


def _opening(request: Request, busy: str) -> store.Opening:
    given = request.input
    answered = (m["toolCallId"] for m in given["messages"] if m["role"] == "tool")
    return store.Opening(
        scope=request.scope,
        thread_id=given["threadId"],
        run_id=given["runId"],
        agent=request.agent,
        text=request.text,
        input_hash=history.input_hash(given),
        user_id=getattr(request.user, "pk", None),
        actor=request.actor,
        parent_run=given.get("parentRunId", ""),
        busy=busy,
        resume=frozenset(entry["interruptId"] for entry in given.get("resume") or ()),
        answers=frozenset(answered),
        base=opening.base(given),
        thread_key=request.thread_key,
        mode=request.mode,
        transport=request.transport,
    )


async def heal(run: Run, given: dict[str, Any]) -> list[protocol.Event]:
    """What somebody who posted that input is shown ahead of the run, once it has its place."""
    return await store.call(turns.restated, run, given)


def expect_reader(thread_id: int) -> None:
    """Somebody who may speak is about to read that thread."""
    current().attendance.expect(thread_id)


def reading(thread_id: int) -> AbstractContextManager[None]:
    """Somebody who may speak reads that thread through this event loop."""
    return current().attendance.reading(thread_id)


async def cancel(run: Run, actor: str) -> Run:
    """Stop a run from any process, within a second; idempotent. Returns the run as it is then.

    A run that waits in its thread's queue leaves it, and nothing of it is logged.
    """
    engine = current()
    if run.status == Run.Status.QUEUED:
        if await store.call(store.withdraw, run.pk):
            feed.current().announce(run.thread_id)
        run = await store.call(store.refresh, run)
    if run.ended:
        return run
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
        await engine.overrule(run, status=Run.Status.CANCELLED)
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
