"""One Django view per route: parse, ask who it is, answer. Streams are an `EventStream`."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from django.core.handlers.asgi import ASGIRequest
from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt

from aguiapp import (
    access,
    agents,
    conf,
    engine,
    eventstream,
    feed,
    parameters,
    protocol,
    replies,
    store,
)
from aguiapp.errors import (
    AguiError,
    BadParameter,
    MethodNotAllowed,
    NeedsAsgi,
    NotFound,
    StoreUnavailable,
)
from aguiapp.models import Run, Thread

logger = logging.getLogger("aguiapp.views")

View = Callable[..., Awaitable[HttpResponseBase]]
MAX_WAIT_SECONDS = 30.0


def endpoint(*methods: str) -> Callable[[View], Callable[..., Any]]:
    """Make a view: it gets an Identity, and every refusal is JSON of one shape."""

    def wrap(view: View) -> Callable[..., Any]:
        @_outside_transactions
        @csrf_exempt
        @functools.wraps(view)
        async def served(request: HttpRequest, **kwargs: Any) -> HttpResponseBase:
            if request.method not in methods:
                return refusal(MethodNotAllowed(details={"allowed": list(methods)}))
            if isinstance(request, ASGIRequest):
                engine.current().wake()
            try:
                identity = await access.identify(request)
                return await view(request, identity, **kwargs)
            except AguiError as error:
                return refusal(error)
            except (OperationalError, InterfaceError):
                logger.warning("database away or locked path=%s", request.path, exc_info=True)
                return refusal(StoreUnavailable())
            except Exception:
                logger.exception("view failed path=%s", request.path)
                return refusal(AguiError())

        return served

    return wrap


def _outside_transactions(view: Callable[..., Any]) -> Callable[..., Any]:
    """ATOMIC_REQUESTS is for views that live in one transaction; these never do."""
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view


def refusal(error: AguiError) -> HttpResponse:
    """The response for an error that came before any stream."""
    response = HttpResponse(
        json.dumps(error.as_dict()), status=error.status, content_type="application/json"
    )
    if error.status == 401:
        response["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        response["Retry-After"] = "1"
    if isinstance(error, MethodNotAllowed):
        response["Allow"] = ", ".join(error.details["allowed"])
    return response


# -- agents ----------------------------------------------------------------------


@endpoint("POST")
async def agent_run(
    request: HttpRequest, identity: access.Identity, agent: str
) -> HttpResponseBase:
    """The AG-UI endpoint: RunAgentInput in, the run's events out."""
    agents.get(agent)
    wants = parameters.mode(request)
    inline = conf.get().WRITER == "inline"
    if not inline and not isinstance(request, ASGIRequest):
        raise NeedsAsgi
    posted = await parameters.parsed(request, identity, agent, mode=wants, transport="http")
    started = await engine.start(posted)
    if wants == "async":
        return replies.accepted(request, started)
    resumes = parameters.resumes(request, wants)
    reading = await replies.read_run(identity, posted, started, resumes=resumes)
    run = started.run
    headers = replies.headers_of(started.thread, run, replies.first_position(run))
    stream = replies.streamed(wants, reading, headers)
    return await replies.whole(stream) if inline else stream


@endpoint("POST")
async def agent_connect(
    request: HttpRequest, identity: access.Identity, agent: str
) -> HttpResponseBase:
    """Join a thread without a run of one's own: what is there, then the active run to its end."""
    agents.get(agent)
    if not isinstance(request, ASGIRequest):
        raise NeedsAsgi
    given = parameters.parse_input(parameters.body(request))
    wants = parameters.stream_mode(request)
    thread = await store.call(parameters.joined_thread, request, identity, given)
    if thread is None:
        return replies.nothing(wants)
    joined = await store.call(engine.join, thread, given["messages"])
    resumes = parameters.resumes(request, wants)
    reading = await replies.read_joined(identity, thread, joined, resumes=resumes)
    first = None if joined.run is None else joined.position + 1
    return replies.streamed(wants, reading, replies.headers_of(thread, joined.run, first))


@endpoint("GET")
async def agent_capabilities(
    request: HttpRequest, identity: access.Identity, agent: str
) -> HttpResponse:
    """AgentCapabilities: what is served here, and what the agent declares of itself."""
    found = agents.get(agent)
    transport: dict[str, Any] = {"streaming": True, "resumable": True}
    if getattr(request, "scope", {}).get("aguiapp"):
        transport["websocket"] = True
    declared = {"identity": {"name": agent}, "transport": transport}
    for group, values in found.capabilities.items():
        declared[group] = {**declared.get(group, {}), **values}
    return JsonResponse(declared)


class Handshake(HttpResponse):
    """The gate's answer to a WebSocket handshake that may be accepted."""

    def __init__(self, request: HttpRequest, identity: access.Identity, agent: str) -> None:
        super().__init__(status=426, headers={"Upgrade": "websocket"})
        self.request = request
        self.identity = identity
        self.agent = agent


@endpoint("GET")
async def agent_socket(request: HttpRequest, identity: access.Identity, agent: str) -> HttpResponse:
    """The handshake of the plain WebSocket; over HTTP it asks to upgrade."""
    agents.get(agent)
    return Handshake(request, identity, agent)


# -- threads ---------------------------------------------------------------------


@endpoint("GET")
async def threads(request: HttpRequest, identity: access.Identity) -> HttpResponse:
    """The threads one may see, by key; `?thread_id=` finds one's own by its id."""
    limit = parameters.number(request, "limit", 50, 1, 200)
    after = request.GET.get("after")
    wanted = Q()
    if after:
        wanted &= Q(key__gt=parameters.thread_key(after))
    if thread_id := request.GET.get("thread_id"):
        if not protocol.is_id(thread_id):
            raise BadParameter(details={"parameter": "thread_id"})
        wanted &= Q(thread_id=thread_id, scope=identity.scope)

    def page() -> list[Thread]:
        return list(access.threads(identity).filter(wanted).order_by("key")[: limit + 1])

    found = await store.call(page)
    listed = [
        {
            "key": str(thread.key),
            "threadId": thread.thread_id,
            "title": thread.title,
            "created": thread.created.isoformat(),
            "updated": thread.updated.isoformat(),
            "own": thread.scope == identity.scope,
        }
        for thread in found[:limit]
    ]
    more = listed[-1]["key"] if len(found) > limit else None
    return JsonResponse({"threads": listed, "next": more})


@endpoint("GET")
async def thread_stream(
    request: HttpRequest, identity: access.Identity, key: uuid.UUID
) -> HttpResponseBase:
    """Resume or watch: every event behind a cursor, then live; `?run=` ends with that run."""
    if not isinstance(request, ASGIRequest):
        raise NeedsAsgi
    thread = await store.call(access.find, identity, key, "see")
    cursor = request.headers.get("Last-Event-ID") or request.GET.get("after") or ""
    after = await store.call(parameters.position, thread, cursor)
    run = await store.call(parameters.run, request, thread)
    gap = await store.call(engine.gap, thread, after, run) if cursor else None
    start = after if gap is None else gap.last
    follower = feed.Follower(thread, start, run, strict=bool(cursor))
    if follower.finished and gap is None:
        return HttpResponse(status=204)
    wants = parameters.streaming(request)
    reading = await replies.reading(
        identity,
        thread,
        follower,
        unlogged=() if gap is None else gap.marked,
        resumes=parameters.resumes(request, wants, cursor),
    )
    return replies.streamed(wants, reading, replies.headers_of(thread, None, None))


@endpoint("GET")
async def thread_events(
    request: HttpRequest, identity: access.Identity, key: uuid.UUID
) -> HttpResponse:
    """A page of events behind a cursor, as NDJSON or one JSON document; `?wait=` long-polls."""
    thread = await store.call(access.find, identity, key, "see")
    cursor = request.GET.get("after") or ""
    after = await store.call(parameters.position, thread, cursor)
    run = await store.call(parameters.run, request, thread)
    limit = parameters.number(request, "limit", conf.get().PAGE_EVENTS, 1, conf.get().PAGE_EVENTS)
    wait = parameters.seconds(request, "wait", MAX_WAIT_SECONDS)
    wants = protocol.negotiate(request.headers.get("Accept"), binary=False)
    gap = await store.call(engine.gap, thread, after, run) if cursor else None
    start = after if gap is None else gap.last
    if gap is None and feed.Follower(thread, start, run).finished:
        return HttpResponse(status=204)
    presence = await replies.presence(identity, thread)

    async def page() -> eventstream.Body:
        follower = feed.Follower(thread, start, run, strict=bool(cursor))
        with presence():
            batches = await follower.read(limit)
        return replies.page(thread, wants, batches, follower.cursor, gap)

    async def arrival() -> None:
        follower = feed.Follower(thread, start, run)
        with presence():
            async with contextlib.aclosing(follower.batches(wait)) as batches:
                async for _ in batches:
                    return

    response = eventstream.Later(page, arrival if wait else None)
    if getattr(request, "scope", {}).get("aguiapp"):
        return response  # the consumer waits, when the host's middleware has let go of its thread
    await response.finish()
    return response


@endpoint("GET")
async def thread_snapshot(
    request: HttpRequest, identity: access.Identity, key: uuid.UUID
) -> HttpResponse:
    """The thread folded at its end, or at `?at=` (a position or a cursor)."""
    thread = await store.call(access.find, identity, key, "see")
    at = request.GET.get("at")
    position = None if at is None else await store.call(parameters.at, thread, at)
    found, active, queue = await store.call(_snapshot, thread, position)
    fold = found.fold
    document = {
        "thread": str(thread.key),
        "threadId": thread.thread_id,
        "cursor": feed.cursor(thread.epoch, found.position),
        "position": found.position,
        "messages": fold.messages,
        "state": fold.state,
        "openItems": [
            {
                "kind": item.kind,
                "id": item.id,
                **({} if item.subagentRunId is None else {"subagentRunId": item.subagentRunId}),
            }
            for item in fold.open_items
        ],
        "pendingToolCallIds": fold.pending_tool_calls,
        "interrupts": fold.interrupts,
        "run": None if active is None else {"key": str(active.key), "runId": active.run_id},
        "queue": [_waiting(run) for run in queue],
        "unreadable": found.unreadable,
    }
    return HttpResponse(
        json.dumps(document, separators=(",", ":")), content_type="application/json"
    )


def _snapshot(thread: Thread, at: int | None) -> tuple[store.ThreadSnapshot, Run | None, list[Run]]:
    queue = list(store.queued(thread.pk))
    return store.snapshot(thread, at), store.active_run(thread.pk), queue


def _waiting(run: Run) -> dict[str, Any]:
    """A turn in the queue, as everybody on the thread may see it."""
    return {
        "key": str(run.key),
        "runId": run.run_id,
        "agent": run.agent,
        "actor": run.actor,
        "queuedAt": run.queued_at.isoformat(),
    }


@endpoint("POST")
async def run_cancel(
    request: HttpRequest, identity: access.Identity, key: uuid.UUID, run: uuid.UUID
) -> HttpResponse:
    """Stop a run for everybody; answers with how it ended. Stopping it again changes nothing."""
    thread = await store.call(access.find, identity, key, "cancel")
    found = await store.call(store.run_by_key, thread.pk, run)
    if found is None:
        raise NotFound
    ended = await engine.cancel(found, identity.actor)
    return JsonResponse({"run": str(ended.key), "runId": ended.run_id, "status": ended.status})
