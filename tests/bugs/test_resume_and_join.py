"""Who comes late, comes back or comes with a strange cursor gets the log, exactly."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
from django.contrib.auth.models import User

from aguiapp import protocol
from aguiapp.models import Run, RunEvent
from tests.bugs.crowd import (
    attaching,
    client_of,
    dice,
    given,
    open_socket,
    positions,
    read_frames,
    rounds,
    said,
    script_of,
    viewer,
)
from tests.bugs.world import World, case, sibling
from tests.live.servers import (
    Person as Client,
    Reader,
    Server,
    Servers,
    ended,
    legal as legal_texts,
    stored as rows_of,
)
from tests.scripts import (
    Reply,
    Stream,
    frames,
    legal,
    registered,
    run_input,
    said as message,
    stored,
    text,
)


async def polled(client: httpx.AsyncClient, url: str, delay: float) -> tuple[list[int], list[str]]:
    """Read a run by polling from some moment on."""
    await asyncio.sleep(delay)
    found: tuple[list[int], list[str]] = [], []
    after = ""
    while not found[1] or '"RUN_FINISHED"' not in found[1][-1]:
        page = await client.get(url, params={"after": after, "wait": 5, "limit": 300})
        lines = page.text.splitlines()
        if lines:
            first = positions([page.headers["AGUI-Cursor"]])[0]
            found[0].extend(range(first, first + len(lines)))
            found[1].extend(lines)
        after = page.headers["AGUI-Next"]
    return found


@case("RES-03")
def test_fifty_who_come_at_any_moment_get_everything_once(
    w: World, server: Server, ada: Client
) -> None:
    chance = dice(w)
    (crowd,) = w.input["ops"]

    async def everybody(reader: Reader) -> list[tuple[list[int], list[str]]]:
        url = server.url(f"/agui/threads/{reader.thread}")
        async with client_of(ada) as client:
            stream, events = f"{url}/stream?run={reader.run}", f"{url}/events"
            return await asyncio.gather(
                *(
                    polled(client, events, chance.uniform(0, 0.6))
                    if n % 10 == 0
                    else viewer(client, stream, delay=chance.uniform(0, 0.6))
                    for n in range(crowd["viewers"])
                )
            )

    for _ in range(rounds(1, 20)):
        reader = ada.play(*script_of(w)).opened()
        found = asyncio.run(everybody(reader))
        rows = rows_of(reader.run)
        assert len(rows) == 2004
        for seqs, payloads in found:
            assert seqs == list(range(1, len(rows) + 1))
            assert payloads == rows
        assert reader.done().logged == rows


@case("RES-04")
def test_a_slow_reader_misses_nothing_where_memory_ends_and_the_table_begins(
    w: World, impatient: Server, user: User
) -> None:
    ada = Client(impatient, user)

    reader = ada.play(*script_of(w)).opened()
    (pause,) = (op["reader_delay_ms"] / 1000 for op in w.input["ops"])
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(impatient.address)
    # HTTP/1.0: the body comes without chunks, to the end of the connection.
    request = attaching(impatient, ada, reader.thread, f"?run={reader.run}")
    client.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
    raw = bytearray()
    while piece := client.recv(rounds(1000, 140)):  # a frame has about 140 bytes
        raw += piece
        time.sleep(pause)
    client.close()
    reader.done()
    seqs, payloads = read_frames(bytes(raw).partition(b"\r\n\r\n")[2])
    assert seqs == list(range(1, 5005))
    assert payloads == reader.logged == rows_of(reader.run)


@sibling("RES-04")
@pytest.mark.parametrize("tail", [0, 500, 20_000])
async def test_a_slow_reader_of_a_short_tail(w: World, tail: int) -> None:
    """The reader takes its time for each batch, so it falls out of the tail again and again."""
    w.settings.AGUIAPP = {"TAIL_BYTES": tail, "PAGE_EVENTS": 40}
    script = [{**item, "$repeat": 1500} if "$repeat" in item else item for item in script_of(w)]
    stream = await w.ada.watch(run_input(script=script))
    raw = b""
    async for chunk in stream.source:
        raw += chunk
        await asyncio.sleep(0.001)
    found = frames(raw)
    assert positions([str(frame.id) for frame in found]) == list(range(1, 1505))
    assert [frame.data for frame in found] == await stored()


@case("RES-07")
async def test_a_cursor_is_good_for_its_own_thread_and_its_own_readers(w: World) -> None:
    """A position is of the thread: one from run r1 reads r2 from its beginning, without a gap."""
    first, second = await w.turns(text("m1", "a"), text("m2", "b"))
    thread, run = second.headers["AGUI-Thread"], second.headers["AGUI-Run"]
    url = f"/agui/threads/{thread}/stream?run={run}"
    for op in w.input["ops"]:
        person = w.bob if op.get("as") else w.ada
        refused = await person.ask(url, **{"last-event-id": op["Last-Event-ID"]})
        assert refused.status == (404 if op.get("as") else 400)
    elsewhere = await w.bob.run(run_input("t1", script=text("m", "x")))
    cursor = str(elsewhere.frames[2].id)
    refused = await w.ada.ask(url, **{"last-event-id": cursor})
    assert (refused.status, refused.code) == (409, "cursor_foreign")
    for frame in first.frames:
        reply = await w.ada.ask(url, **{"last-event-id": str(frame.id)})
        assert reply.logged == second.logged
    # A stranger with a good cursor sees what he would see of a thread that is not there.
    good = {"last-event-id": str(first.frames[2].id)}
    unknown = url.replace(thread, str(uuid.uuid4()))
    answers = [await w.bob.ask(where, **good) for where in (url, unknown)]
    assert {answer.status for answer in answers} == {404}
    assert answers[0].raw == answers[1].raw
    refused = await w.ada.ask(f"/agui/threads/{thread}/stream?run={uuid.uuid4()}", **good)
    assert (refused.status, refused.code) == (404, "not_found")


@case("RES-08")
def test_attaching_behind_a_restart(
    w: World, servers: Servers, kind: str, database_url: str, user: User
) -> None:
    first = Client(servers.start(kind, database_url), user)
    finished = first.play(*said("done")).done()
    orphan = first.play(*said("x"), {"$hang": True}).events(4)
    first.server.kill()
    again = first.at(servers.start(kind, database_url))
    whole = again.watch(finished.thread, run=finished.run).done(5)
    assert (whole.end, whole.logged) == ("clean", finished.logged)
    for key, run in ((str(uuid.uuid4()), finished.run), (finished.thread, str(uuid.uuid4()))):
        assert again.watch(key, run=run).done(5).status == 404
    lost = again.watch(orphan.thread, run=orphan.run).done(20)
    assert (lost.end, lost.last["code"]) == ("clean", "orphaned")
    assert lost.logged == rows_of(orphan.run)
    legal_texts(lost.logged)
    orphan.done()


@case("RES-09")
async def test_who_missed_the_ending_alone_gets_the_ending_alone(w: World) -> None:
    """Cut before the terminal, back when all is over: by every way of reading."""
    whole = await w.run()
    thread, run = whole.headers["AGUI-Thread"], whole.headers["AGUI-Run"]
    last = str(whole.frames[-2].id)
    url = f"/agui/threads/{thread}/stream?run={run}"
    by_header = await w.ada.ask(url, **{"last-event-id": last})
    by_query = await w.ada.ask(f"{url}&after={last}")
    for reply in (by_header, by_query):
        assert not reply.aborted
        assert reply.frames == whole.frames[-1:]
    page = await w.ada.ask(f"/agui/threads/{thread}/events?after={last}&wait=5")
    assert page.raw.decode().splitlines() == whole.logged[-1:]
    binary = await w.ada.ask(
        url, **{"last-event-id": last, "accept": "application/vnd.ag-ui.event+proto"}
    )
    assert binary.raw.count(b"r1") == 1
    assert (await w.ada.ask(f"{url}&after={whole.frames[-1].id}")).status == 204


@sibling("RES-09")
async def test_who_was_cut_before_an_error_or_a_stop_gets_that(w: World) -> None:
    ends: list[dict[str, Any]] = [{"$raise": "RuntimeError"}, {"$return": True}]
    for number, end in enumerate(ends):
        script = [{"type": "RUN_STARTED", "threadId": f"t{number}", "runId": "r1"}, end]
        whole = await w.run(run_input(f"t{number}", script=script))
        run = whole.headers["AGUI-Run"]
        url = f"/agui/threads/{whole.headers['AGUI-Thread']}/stream?run={run}"
        reply = await w.ada.ask(url, **{"last-event-id": str(whole.frames[-2].id)})
        assert reply.types == ["RUN_ERROR"]
        assert reply.frames == whole.frames[-1:]


@case("RES-10")
def test_a_cursor_outlives_the_process_that_was_killed(
    w: World, servers: Servers, kind: str, database_url: str, user: User
) -> None:
    """What was delivered by stream and by socket is a prefix of what is stored."""
    ada = Client(servers.start(kind, database_url), user)
    body = given("killed", script_of(w, sleep=0.2), "r1")
    reader = ada.post("scripted", body).events(5)
    with open_socket(ada.server, ada.headers) as socket:
        socket.send(json.dumps(body))
        frames_ = [str(socket.recv(timeout=20)) for _ in range(4)]
        ada.server.kill()
    reader.done()
    assert reader.end == "aborted"
    again = ada.at(servers.start(kind, database_url))
    resumed = again.watch(reader.thread, reader.ids[-1], run=reader.run).done()
    rows = rows_of(reader.run)
    assert reader.logged + resumed.logged == rows
    assert frames_ == rows[:4]
    assert positions(reader.ids + resumed.ids) == list(range(1, len(rows) + 1))
    assert resumed.last["code"] == "orphaned"
    assert ended(reader.run).status == "error"
    legal_texts(rows)


@case("RES-11")
async def test_a_post_while_the_thread_is_read_carries_its_own_run_alone(w: World) -> None:
    (post,) = (op["run_input"] for op in w.input["ops"] if op["do"] == "post_run")
    first = await w.run(run_input("t1", "r1", script=text("m1", *map(str, range(200)))))
    thread = first.headers["AGUI-Thread"]
    url = f"/agui/threads/{thread}/stream"
    reading = Stream(await w.ada.open(url))
    alone = Stream(await w.ada.open(f"{url}?run={first.headers['AGUI-Run']}"))
    await reading.until(lambda raw: b"id: " in raw)
    body = {**post, "forwardedProps": {"script": text("m2", "second")}}
    reply = await w.ada.run(body)
    own = [frame for frame in reply.frames if frame.id]
    assert [json.loads(frame.data).get("runId", "r2") for frame in own] == ["r2"] * 5
    await reading.until(lambda raw: str(own[-1].id).encode() in raw)
    found = frames(reading.raw)
    assert found == [*first.frames, *own]
    assert positions([str(frame.id) for frame in found]) == list(range(1, 210))
    # `?run=` is how to read one run without what comes after it.
    assert (await alone.rest()).frames == first.frames
    await reading.source.aclose()
    legal(reply.events)


@sibling("RES-11")
async def test_a_thread_read_from_the_start_goes_on_over_all_runs(w: World) -> None:
    """The reader is in the middle of r1 when r2 and r3 are posted."""
    go_on = asyncio.Event()

    async def paused(run: Any) -> AsyncIterator[Any]:
        yield {"type": "CUSTOM", "name": "first half", "value": run.input["runId"]}
        await go_on.wait()
        yield {"type": "CUSTOM", "name": "second half", "value": run.input["runId"]}

    with registered("paused", paused):
        stream = await w.ada.watch(run_input("t1", "r1"), "paused")
        await stream.until(lambda raw: b"first half" in raw)
        thread = stream.response.headers["AGUI-Thread"]
        reading = Stream(await w.ada.open(f"/agui/threads/{thread}/stream"))
        await reading.until(lambda raw: b"first half" in raw)
        go_on.set()
        replies: list[Reply] = [await stream.rest()]
        for name in ("r2", "r3"):
            replies.append(await w.ada.run(run_input("t1", name), "paused"))
    ends = [str(reply.frames[-1].id) for reply in replies]
    await reading.until(lambda raw: ends[-1].encode() in raw)
    await reading.source.aclose()
    assert [frame.data for frame in frames(reading.raw)] == await stored()
    assert len(set(ends)) == 3


# -- those who join afresh, and those whose events are gone ---------------------------


def holds(count: int, raw: bytes) -> bool:
    """Whether so many events have come."""
    return len(frames(raw)) >= count


@case("RES-01")
async def test_who_joins_at_any_moment_ends_where_everybody_does(w: World) -> None:
    """A fresh client at each event of a run with items open in each other, by `connect`."""
    (k_events,) = (w.input["agent_events"][1:-1],)
    steps = [asyncio.Event() for _ in k_events]

    async def stepwise(run: Any) -> AsyncIterator[Any]:
        for event, step in zip(k_events, steps, strict=True):
            yield event
            await step.wait()

    joined: list[Stream] = []
    with registered("stepwise", stepwise):
        stream = await w.ada.watch(run_input(messages=[message("u1", "go")]), "stepwise")
        for number, step in enumerate(steps):
            await stream.until(partial(holds, number + 2))
            joined.append(await w.ada.watch(run_input("t1", "j"), "stepwise", "connect"))
            await joined[-1].until(lambda raw: b"RUN_STARTED" in raw)
            step.set()
        whole = await stream.rest()
        replies = [await each.rest() for each in joined]
    full = protocol.fold(whole.events)
    for reply in replies:
        legal(reply.events)
        assert reply.types[0] == "RUN_STARTED"
        found = protocol.fold(reply.events)
        assert (found.messages, found.state) == (full.messages, full.state)
        assert found.open_items == []
        # What came live came with its cursor, from where the prologue stands on.
        assert reply.logged == whole.logged[len(whole.logged) - len(reply.logged) :]
        assert not [frame for frame in reply.frames if frame.id and frame not in whole.frames]
    assert len({len(reply.logged) for reply in replies}) > len(replies) / 2


@sibling("RES-01")
async def test_who_resumes_at_any_event_gets_the_rest_and_no_more(w: World) -> None:
    whole = await w.run()
    url = f"/agui/threads/{whole.headers['AGUI-Thread']}/stream?run={whole.headers['AGUI-Run']}"
    for k, frame in enumerate(whole.frames[:-1], 1):
        reply = await w.ada.ask(url, **{"last-event-id": str(frame.id)})
        assert reply.frames == whole.frames[k:]


@case("RES-02")
@pytest.mark.parametrize("way", ["connect", "stream"])
async def test_the_first_event_of_who_joins_is_the_runs_start(w: World, way: str) -> None:
    """Without a cursor, in the middle of a message."""
    go_on = asyncio.Event()

    async def paused(run: Any) -> AsyncIterator[Any]:
        for item in script_of(w):
            if "$sleep" in item:
                await go_on.wait()
            else:
                yield item

    with registered("paused", paused):
        stream = await w.ada.watch(run_input(), "paused")
        await stream.until(lambda raw: b'"a"' in raw)
        headers = stream.response.headers
        if way == "connect":
            late = await w.ada.watch(run_input("t1", "j"), "paused", "connect")
        else:
            path = f"/agui/threads/{headers['AGUI-Thread']}/stream?run={headers['AGUI-Run']}"
            late = Stream(await w.ada.open(path))
        await late.until(lambda raw: b'"a"' in raw)
        go_on.set()
        whole, reply = await stream.rest(), await late.rest()
    legal(reply.events)
    assert reply.types[0] == "RUN_STARTED"
    assert reply.types.count("RUN_STARTED") == (2 if way == "connect" else 1)
    assert "r1" in {e["runId"] for e in reply.events if e["type"] == "RUN_STARTED"}
    assert protocol.fold(reply.events).messages == protocol.fold(whole.events).messages
    assert reply.events[-1] == whole.events[-1]


async def pruned(w: World) -> tuple[Reply, str, int]:
    """A run whose events below the case's number are kept no more; its epoch and that number.

    What is kept begins with a message.
    """
    (prune,) = (op["seq"] for op in w.input["ops"] if op["do"] == "prune_below")
    first = {"type": "CUSTOM", "name": "n", "value": 1}
    script = [first, first, *(event for n in range(60) for event in text(f"m{n}", f"{n}"))]
    whole = await w.run(run_input(script=script))
    assert whole.types[prune - 1] == "TEXT_MESSAGE_START"
    run = await Run.objects.aget()
    await RunEvent.objects.filter(run=run, seq__lt=prune).adelete()
    await Run.objects.filter(pk=run.pk).aupdate(pruned_to=prune - 1)
    return whole, str(whole.frames[0].id).rpartition("-")[0], prune


@case("RES-06")
async def test_a_cursor_older_than_what_is_kept_is_told_of_the_gap(w: World) -> None:
    whole, epoch, prune = await pruned(w)
    url = f"/agui/threads/{whole.headers['AGUI-Thread']}"
    kept, end = whole.logged[prune - 1 :], str(whole.frames[-1].id).encode()
    stream = Stream(await w.ada.open(f"{url}/stream", **{"last-event-id": f"{epoch}-50"}))
    await stream.until(lambda raw: end in raw)
    found = frames(stream.raw)
    events = [json.loads(frame.data) for frame in found]
    gaps = [event["value"] for event in events if event.get("name") == "aguiapp.gap"]
    assert gaps == [{"from": 51, "to": prune - 1}]
    assert [frame.data for frame in found if frame.id] == kept
    assert not [frame for frame in found if "aguiapp.gap" in frame.data and frame.id]
    page = await w.ada.ask(f"{url}/events?after={epoch}-50")
    lines = page.raw.decode().splitlines()
    assert json.loads(lines[0]) == {"type": "aguiapp.gap", "from": 51, "to": prune - 1}
    assert lines[-len(kept) :] == kept
    document = await w.ada.ask(f"{url}/events?after={epoch}-50", accept="application/json")
    assert document.json["gap"] == {"from": 51, "to": prune - 1}
    # At the edge, and behind it, nothing is missing.
    for position in (prune - 1, prune, prune + 7):
        page = await w.ada.ask(f"{url}/events?after={epoch}-{position}")
        assert page.raw.decode().splitlines() == whole.logged[position:]
    for path in ("stream", "events"):
        future = await w.ada.ask(f"{url}/{path}?after={epoch}-{10**9}")
        assert (future.status, future.code) == (409, "cursor_foreign")
        for garbage in ("%00;drop", "r1:50", "r1:1000000000", "-", "drop"):
            refused = await w.ada.ask(f"{url}/{path}?after={garbage}")
            assert (refused.status, refused.code) == (400, "cursor_malformed"), garbage


@sibling("RES-06")
async def test_what_follows_a_gap_is_legal_for_a_stock_client(w: World) -> None:
    """Also where the gap ends in the middle of a run, whose RUN_STARTED went with it."""
    whole, epoch, _ = await pruned(w)
    url = f"/agui/threads/{whole.headers['AGUI-Thread']}/stream?after={epoch}-50"
    stream = Stream(await w.ada.open(url))
    end = str(whole.frames[-1].id).encode()
    await stream.until(lambda raw: end in raw)
    legal([json.loads(frame.data) for frame in frames(stream.raw)])


@sibling("RES-06")
@pytest.mark.parametrize("path", ["stream", "events"])
async def test_a_reader_of_one_run_is_told_of_the_gap_as_well(w: World, path: str) -> None:
    whole, epoch, prune = await pruned(w)
    url = f"/agui/threads/{whole.headers['AGUI-Thread']}/{path}?run={whole.headers['AGUI-Run']}"
    reply = await w.ada.ask(f"{url}&after={epoch}-50")
    assert "aguiapp.gap" in reply.raw.decode()
    lines = reply.logged if path == "stream" else reply.raw.decode().splitlines()
    kept = whole.logged[prune - 1 :]
    assert lines[-len(kept) :] == kept
