"""Event streams: every frame at once, every cursor exact, whatever the host puts around them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User

from aguiapp.models import Thread
from project.management.commands import demo
from tests.bugs.crowd import positions, script_of
from tests.bugs.world import World, case, sibling
from tests.live.servers import (
    KINDS,
    MOUNTED,
    PLAIN,
    Person as Client,
    Servers,
    delta,
    ended,
    gapless,
    said,
    stored,
    trickle,
)
from tests.scripts import legal, registered, run_input, stored as rows_of, text

GZIP = "django.middleware.gzip.GZipMiddleware"
SYNC = "tests.bugs.middleware.sync_only"
#: Compression at both ends, and sync middleware between async ones.
HOSTILE = {"MIDDLEWARE": [GZIP, SYNC, *django_settings.MIDDLEWARE, SYNC, GZIP]}


@pytest.fixture(params=[MOUNTED, PLAIN], ids=["mounted", "plain"])
def hostile(
    request: pytest.FixtureRequest, servers: Servers, kind: str, database_url: str, user: User
) -> Client:
    """Somebody at a host whose middleware compresses, and is not all async."""
    name = f"hostile {request.param}"
    server = servers.shared(kind, database_url, name, application=request.param, overrides=HOSTILE)
    return Client(server, user)


@case("SSE-02")
@pytest.mark.parametrize("kind", KINDS)
def test_no_middleware_compresses_the_stream(w: World, hostile: Client) -> None:
    given = demo.run_input("gzip", "go", {"script": script_of(w, sleep=0.4)})
    reader = hostile.post("scripted", given, **{"Accept-Encoding": "gzip, deflate, br"}).done()
    assert (reader.status, reader.end) == (200, "clean")
    assert reader.headers["Content-Encoding"] == "identity"
    assert reader.logged == stored(reader.run)
    came = dict(zip(reader.types, reader.times[-len(reader.types) :], strict=True))
    assert 0.25 < came["TEXT_MESSAGE_START"] - came["RUN_STARTED"] < 2
    assert 0.25 < came["RUN_FINISHED"] - came["TEXT_MESSAGE_END"] < 2
    again = hostile.watch(reader.thread, run=reader.run).done()
    assert again.headers["Content-Encoding"] == "identity"
    assert again.logged == reader.logged


@sibling("SSE-02")
@pytest.mark.parametrize("wants", ["text/event-stream", "application/vnd.ag-ui.event+proto"])
@pytest.mark.parametrize("place", ["first", "last"])
async def test_no_chunk_is_held_back(w: World, wants: str, place: str) -> None:
    middleware = [*django_settings.MIDDLEWARE]
    middleware.insert(0 if place == "first" else len(middleware), GZIP)
    w.settings.MIDDLEWARE = middleware
    script = text("m", *(f"{number} " * 200 for number in range(20)))
    body = run_input(script=[*script, {"$hang": True}])
    headers = {"accept": wants, "accept-encoding": "gzip"}
    response = await w.ada.open("/agui/agents/scripted/", body, **headers)
    assert response.headers["Content-Encoding"] == "identity"
    seen = b""
    async for chunk in response.streaming_content:
        seen += chunk
        if b"19 19 19" in seen:  # the run hangs: this came while it was going on
            break
    headers = {name: response.headers[f"AGUI-{name}"] for name in ("Thread", "Run")}
    await w.ada.ask(f"/agui/threads/{headers['Thread']}/runs/{headers['Run']}/cancel", {})
    await response.streaming_content.aclose()


@case("SSE-04")
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_byte_does_not_wait_behind_sync_middleware(w: World, hostile: Client) -> None:
    hostile.run("echo", "warm").done()
    reader = hostile.play(*script_of(w, sleep=0.6))
    reader.wait(lambda r: r.comments)
    assert reader.times[0] - reader.began < 0.5
    reader.events(1)
    assert reader.times[1] - reader.began < 0.7
    reader.done()
    assert reader.headers["X-Sync"] == "seen"
    assert reader.last["type"] == "RUN_FINISHED"
    assert reader.times[-1] - reader.times[0] > 1.1
    gapless(reader)
    said_ = hostile.server.said()
    assert "synchronous iterators" not in said_
    assert "Warning" not in said_
    assert "Traceback" not in said_


@case("SSE-08")
async def test_a_cursor_of_another_time_is_told_apart(w: World) -> None:
    """`<epoch>-<position>`: an old epoch, another thread and the future are 409, all else 400."""
    whole = await w.run()
    ids = [str(frame.id) for frame in whole.frames]
    assert positions(ids) == list(range(1, len(ids) + 1))
    thread, epoch = whole.headers["AGUI-Thread"], ids[0].rpartition("-")[0]
    for path in ("stream", "events"):
        url = f"/agui/threads/{thread}/{path}?run={whole.headers['AGUI-Run']}"
        if path == "stream":
            again = await w.ada.ask(url, **{"last-event-id": ids[4]})
            assert again.logged == whole.logged[5:]
            # A native EventSource repeats its first URL: the header is the newer of the two.
            both = await w.ada.ask(f"{url}&after={ids[1]}", **{"last-event-id": ids[4]})
            assert both.raw == again.raw
        page = await w.ada.ask(f"{url}&after={ids[4]}")
        lines = page.logged if path == "stream" else page.raw.decode().splitlines()
        assert lines == whole.logged[5:]
    other = await w.run(run_input("other", script=text("m", "x")))
    foreign = str(other.frames[1].id)
    wrong = {
        foreign: (409, "cursor_foreign"),
        f"{epoch}-{len(ids) + 1}": (409, "cursor_foreign"),
        f"{epoch}-{10**17}": (409, "cursor_foreign"),
        "r1:5": (400, "cursor_malformed"),
        "5": (400, "cursor_malformed"),
        f"{epoch}-": (400, "cursor_malformed"),
        f"{epoch}--5": (409, "cursor_foreign"),
        f"{epoch}-5.0": (400, "cursor_malformed"),
        f"{epoch}-\u0665": (400, "cursor_malformed"),
        f"{epoch}-{10**30}": (400, "cursor_malformed"),
    }
    for cursor, expected in wrong.items():
        for path in ("stream", "events"):
            refused = await w.ada.ask(f"/agui/threads/{thread}/{path}?after={cursor}")
            assert (refused.status, refused.code) == expected, cursor
        if cursor.isascii():
            refused = await w.ada.ask(f"/agui/threads/{thread}/stream", **{"last-event-id": cursor})
            assert (refused.status, refused.code) == expected, cursor
    await Thread.objects.filter(key=thread).aupdate(epoch="zzzzzz")
    for path in (f"stream?after={ids[4]}", f"events?after={ids[4]}", f"snapshot?at={ids[4]}"):
        refused = await w.ada.ask(f"/agui/threads/{thread}/{path}")
        assert (refused.status, refused.code) == (409, "cursor_foreign")


@sibling("SSE-08")
def test_a_reader_that_was_cut_reads_on(w: World, ada: Client) -> None:
    pieces = [item for event in script_of(w) for item in (event, {"$sleep": 0.02})]
    reader = ada.play(*pieces).events(5)
    reader.drop()
    head = [frame for frame in list(reader.frames) if frame.id][:5]
    resumed = ada.watch(reader.thread, head[-1].id, run=reader.run).done()
    assert resumed.end == "clean"
    assert [frame.data for frame in head] + resumed.logged == stored(reader.run)
    assert positions([frame.id for frame in head] + resumed.ids) == list(range(1, 25))


@case("SSE-09")
async def test_a_resume_behind_every_event_of_one_millisecond(w: World) -> None:
    whole = await w.run()
    assert len({event.get("timestamp") for event in whole.events[2:-2]}) == 1
    thread, run = whole.headers["AGUI-Thread"], whole.headers["AGUI-Run"]
    for k, frame in enumerate(whole.frames, 1):
        resumed = await w.ada.ask(
            f"/agui/threads/{thread}/stream?run={run}", **{"last-event-id": str(frame.id)}
        )
        if k == len(whole.frames):
            assert (resumed.status, resumed.raw) == (204, b"")
        else:
            assert resumed.frames == whole.frames[k:]
        page = await w.ada.ask(f"/agui/threads/{thread}/events?after={frame.id}&run={run}")
        assert page.raw.decode().splitlines() == whole.logged[k:]


@sibling("SSE-09")
async def test_a_resume_behind_every_event_while_the_run_goes_on(w: World) -> None:
    go_on = asyncio.Event()

    async def paused(run: Any) -> AsyncIterator[Any]:
        for event in script_of(w):
            yield event
        await go_on.wait()
        for event in text("m2", "end"):
            yield event

    with registered("paused", paused):
        stream = await w.ada.watch(run_input(), "paused")
        await stream.until(lambda raw: b"TEXT_MESSAGE_END" in raw)
        headers = stream.response.headers
        url = f"/agui/threads/{headers['AGUI-Thread']}/stream?run={headers['AGUI-Run']}"
        epoch = headers["AGUI-Cursor"].rpartition("-")[0]
        opened = [await w.ada.open(url, **{"last-event-id": f"{epoch}-{k}"}) for k in range(1, 54)]
        go_on.set()
        whole = await stream.rest()
    legal(whole.events)
    assert whole.logged == await rows_of()
    for k, response in enumerate(opened, 1):
        resumed = b"".join([chunk async for chunk in response.streaming_content])
        assert resumed.count(b"\nid: ") + resumed.startswith(b"id: ") == len(whole.logged) - k
        assert [line[6:] for line in resumed.decode().split("\n") if line[:6] == "data: "] == (
            whole.logged[k:]
        )


#: What others ask for meanwhile: an async view, and a sync one with its middleware.
ASKED = {"async": "/agui/agents/echo/capabilities", "sync": "/login/"}


@case("SSE-10")
@pytest.mark.parametrize("path", ASKED.values(), ids=ASKED)
def test_blocking_agents_hold_up_nobody(w: World, ada: Client, path: str) -> None:
    """More of them than the pool has threads; other requests of both sorts answer at once."""
    seconds = 2.5
    with httpx.Client(base_url=ada.server.url(""), headers=ada.headers, timeout=30) as visitor:

        def asked() -> float:
            started = time.monotonic()
            assert visitor.get(path).status_code == 200
            return time.monotonic() - started

        usual = statistics.median(asked() for _ in range(5))
        readers = [ada.run("blocked", "go", f"blocked-{n}", seconds=seconds) for n in range(10)]
        readers[0].events(2)
        took = [asked() for _ in range(20)]
    # Behind a blocked loop, or a blocked shared thread, one would have waited for seconds.
    assert statistics.median(took) < max(0.2, 3 * usual)
    assert max(took) < 1
    other = ada.play(*said(delta("meanwhile"))).done()
    assert other.last["type"] == "RUN_FINISHED"
    for reader in readers:
        ada.cancel(reader)
        reader.done()
        assert ended(reader.run).status in ("success", "cancelled")


@sibling("SSE-10")
def test_a_loop_that_is_blocked_loses_nothing(w: World, ada: Client) -> None:
    """`time.sleep` in an async agent stops the process; what comes after is whole all the same."""
    script: list[Any] = [*said(trickle(5, 0.01)), *script_of(w)]
    script = [{"$block_s": 0.7} if "$block_s" in item else item for item in script]
    reader = ada.play(*script, *text("m2", "after"))
    watchers = [ada.watch(reader.opened().thread, run=reader.run) for _ in range(3)]
    reader.done()
    assert reader.last["type"] == "RUN_FINISHED"
    assert reader.logged == stored(reader.run)
    for watcher in watchers:
        assert watcher.done().logged == reader.logged
