"""What is answered once a request is understood: streams, documents, joins, pages."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import reverse

from aguiapp import access, agents, conf, engine, eventstream, feed, protocol, store
from aguiapp.eventstream import Reading
from aguiapp.models import Run, Thread


async def presence(identity: access.Identity, thread: Thread) -> eventstream.Presence:
    """That somebody reads who may speak. Others keep no run alive."""
    heeded = agents.heed_readers() and conf.get().WRITER == "group"
    if not heeded or not await store.call(access.may, identity, thread, "speak"):
        return nullcontext
    return functools.partial(engine.reading, thread.pk)


async def reading(
    identity: access.Identity, thread: Thread, follower: feed.Follower, **more: Any
) -> Reading:
    """Somebody's reading of a thread, for as long as they may."""
    present = await presence(identity, thread)
    if present is not nullcontext:
        engine.expect_reader(thread.pk)
    return Reading(
        follower=follower,
        recheck=functools.partial(store.call, access.refusal, identity, thread),
        presence=present,
        **more,
    )


async def read_run(
    identity: access.Identity, posted: engine.Request, started: engine.Started, **more: Any
) -> Reading:
    """The reading of a run by who posted it: from its first event, once its turn has come."""
    thread, run = started.thread, started.run
    unlogged: Any = started.unlogged
    after = run.offset or 0
    if run.offset is None:
        # Who is ended while it waits goes on from here.
        after = await store.call(store.end_position, thread.pk)
        unlogged = functools.partial(engine.heal, run, posted.input)
    follower = feed.Follower(thread, after, run)
    return await reading(identity, thread, follower, unlogged=unlogged, **more)


async def read_joined(
    identity: access.Identity, thread: Thread, joined: engine.Join, **more: Any
) -> Reading:
    """The reading of who joins: the prologue, then the run that goes on there, to its end."""
    if joined.run is None:
        follower = feed.Follower.at_end(thread, joined.position)
    else:
        follower = feed.Follower(thread, joined.position, joined.run)
    return await reading(identity, thread, follower, unlogged=joined.prologue, **more)


def nothing(wants: str) -> eventstream.EventStream:
    """A stream of no event: who joins a thread that is not there yet."""

    async def body() -> AsyncGenerator[bytes, None]:
        yield b'{"events":[]}' if wants == "json" else eventstream.FRAMINGS[wants].opening

    kind = "application/json" if wants == "json" else eventstream.FRAMINGS[wants].content_type
    return eventstream.EventStream(body(), {}, kind)


def streamed(wants: str, source: Reading, headers: dict[str, str]) -> eventstream.EventStream:
    """A reading as the response the client wants: "sse", "proto" or "json"."""
    if isinstance(source.unlogged, Sequence) and source.unlogged:
        headers = {**headers, "AGUI-Unlogged": str(len(source.unlogged))}
    if wants == "json":
        body = eventstream.document(source)
        return eventstream.EventStream(body, headers, "application/json")
    framing = eventstream.FRAMINGS[wants]
    body = eventstream.framed(framing, source)
    return eventstream.EventStream(body, headers, framing.content_type)


async def whole(stream: eventstream.EventStream) -> HttpResponse:
    """The stream of a run that was driven to its end before the response began, as one body."""
    body = b"".join([chunk async for chunk in stream.source])
    return HttpResponse(body, headers=dict(stream.items()))


def headers_of(thread: Thread, run: Run | None, first: int | None) -> dict[str, str]:
    """Where thread and run are kept, and the cursor of the first logged frame, where one is known."""
    headers = {"AGUI-Thread": str(thread.key)}
    if run is not None:
        headers["AGUI-Run"] = str(run.key)
    if first is not None:
        headers["AGUI-Cursor"] = feed.cursor(thread.epoch, first)
    return headers


def first_position(run: Run) -> int | None:
    """The position of a run's first event; None while its turn has not come."""
    return None if run.offset is None else run.offset + run.pruned_to + 1


def accepted(request: HttpRequest, started: engine.Started) -> HttpResponse:
    """202 for who does not wait: where the run is kept, and where its events will be."""
    thread, run = started.thread, started.run
    space = getattr(request.resolver_match, "namespace", None) or "aguiapp"

    def address(name: str, **more: Any) -> str:
        return reverse(f"{space}:{name}", kwargs={"key": thread.key, **more})

    of_run = f"?run={run.key}"
    urls = {
        "events": address("events") + of_run,
        "stream": address("stream") + of_run,
        "snapshot": address("snapshot"),
        "cancel": address("cancel", run=run.key),
    }
    document = {
        "thread": str(thread.key),
        "threadId": thread.thread_id,
        "run": str(run.key),
        "runId": run.run_id,
        "status": run.status,
        "urls": urls,
    }
    headers = headers_of(thread, run, first_position(run))
    headers |= {"Preference-Applied": "respond-async", "Location": urls["events"]}
    return JsonResponse(document, status=202, headers=headers)


def page(
    thread: Thread, wants: str, batches: Sequence[feed.Batch], cursor: str, gap: engine.Gap | None
) -> eventstream.Body:
    """Stored events as NDJSON or one JSON document; `gap` is what is missing before them."""
    headers = headers_of(thread, None, batches[0].first if batches else None)
    headers |= {"AGUI-Next": cursor, "Cache-Control": "no-store"}
    events = [payload for batch in batches for payload in batch.payloads]
    found = bool(events) or gap is not None
    missing = ""
    if gap is not None:
        unlogged = list(map(protocol.dumps, gap.prologue))
        if wants == "json":
            missing = f'"gap":{protocol.dumps(gap.value)},"unlogged":{len(unlogged)},'
        else:
            unlogged.insert(0, protocol.dumps({"type": "aguiapp.gap", **gap.value}))
        headers["AGUI-Unlogged"] = str(len(unlogged))
        events = unlogged + events
    if wants == "json":
        text = f'{{{missing}"events":[{",".join(events)}],"next":"{cursor}"}}'
        return eventstream.Body(text, {**headers, "Content-Type": "application/json"}, found)
    text = "".join(f"{event}\n" for event in events)
    return eventstream.Body(text, {**headers, "Content-Type": "application/x-ndjson"}, found)
