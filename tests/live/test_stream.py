"""One run, event by event, on every way out, during it and after it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from project.management.commands import demo
from tests.live.servers import Person, Reader, Server, delta, ended, gapless, said, stored, trickle

EVENTS = 5004


def test_headers_and_a_comment_come_before_the_agents_first_event(ada: Person) -> None:
    reader = ada.play({"$sleep": 0.7}, *said(delta("late")))
    reader.wait(lambda r: r.comments)
    assert "TEXT_MESSAGE_START" not in reader.types
    assert reader.frames[0].comment
    reader.done()
    assert reader.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert reader.headers["Cache-Control"] == "no-cache, no-transform"
    assert reader.headers["X-Accel-Buffering"] == "no"
    assert reader.headers["Content-Encoding"] == "identity"
    assert "Content-Length" not in reader.headers
    assert reader.ids[0] == reader.headers["AGUI-Cursor"]
    gap = reader.times[reader.frames.index(next(f for f in reader.frames if "late" in f.data))]
    assert gap - reader.times[0] > 0.5


def test_events_arrive_one_by_one(ada: Person) -> None:
    reader = ada.play(*said(trickle(10, 0.05))).done()
    assert (reader.status, reader.end) == (200, "clean")
    gapless(reader)
    assert len(set(reader.times)) >= 10
    assert reader.logged == stored(reader.run)
    assert reader.last["type"] == "RUN_FINISHED"


def pages(ada: Person, thread: str, accept: str, limit: int = 700) -> list[str]:
    """Everything by polling, as text of the events; ends with the terminal event."""
    found: list[str] = []
    after = ""
    while not found or '"RUN_FINISHED"' not in found[-1]:
        response = ada.get(
            f"/agui/threads/{thread}/events",
            params={"after": after, "limit": limit, "wait": 5},
            headers={"Accept": accept},
        )
        assert response.status_code == 200, response.text
        after = response.headers["AGUI-Next"]
        if accept == "application/json":
            events = json.loads(response.text)["events"]
            texts = [json.dumps(e, ensure_ascii=False, separators=(",", ":")) for e in events]
            assert response.text == f'{{"events":[{",".join(texts)}],"next":"{after}"}}'
        else:
            texts = response.text.split("\n")[:-1]
        found += texts
    return found


def heads_and_tails(ada: Person, whole: Reader, cuts: list[int]) -> list[Reader]:
    return [ada.watch(whole.thread, whole.ids[cut - 1], run=whole.run) for cut in cuts]


def test_five_thousand_events_are_the_same_bytes_everywhere(ada: Person) -> None:
    pulse = [{"$repeat": 50, "event": delta("é$i ")}, {"$sleep": 0.02}]
    whole = ada.play(*said({"$repeat": 100, "events": pulse})).events(300)
    cuts = [1, 100, 300]
    with ThreadPoolExecutor(2) as pool:
        during = heads_and_tails(ada, whole, cuts)
        lines = pool.submit(pages, ada, whole.thread, "application/x-ndjson", 237)
        document = pool.submit(pages, ada, whole.thread, "application/json")
        assert whole.end == "", "the run was over before it was read during it"
        whole.done(60)
        rows = stored(whole.run)
        assert lines.result() == rows
        assert document.result() == rows
    assert len(rows) == EVENTS
    gapless(whole)
    assert whole.logged == rows
    after = heads_and_tails(ada, whole, [1, 2500, EVENTS - 1])
    for cut, resumed in [
        *zip(cuts, during, strict=True),
        *zip([1, 2500, EVENTS - 1], after, strict=True),
    ]:
        resumed.done(60)
        assert resumed.end == "clean"
        assert whole.ids[:cut] + resumed.ids == whole.ids
        assert whole.logged[:cut] + resumed.logged == rows
    assert pages(ada, whole.thread, "application/x-ndjson") == rows
    assert pages(ada, whole.thread, "application/json") == rows


def test_a_finished_run_says_204_and_a_thread_stays_open(ada: Person) -> None:
    done = ada.play(*said(delta("x"))).done()
    assert ada.watch(done.thread, done.ids[-1], run=done.run).done().status == 204
    watcher = ada.watch(done.thread, done.ids[-1]).wait(lambda r: r.comments)
    assert watcher.end == ""
    given = demo.run_input(thread_id_of(ada, done), "again", {"script": said(delta("y"))})
    again = ada.post("scripted", given).done()
    watcher.wait(lambda r: again.ids[-1] in r.ids)
    assert watcher.logged == again.logged
    assert watcher.end == ""
    watcher.drop()


def thread_id_of(ada: Person, reader: Reader) -> str:
    return str(ada.snapshot(reader.thread)["threadId"])


def test_a_long_poll_returns_when_an_event_arrives(ada: Person) -> None:
    reader = ada.play(*said(delta("a"), {"$sleep": 0.8}, delta("b"))).events(3)
    started = time.monotonic()
    answer = ada.get(
        f"/agui/threads/{reader.thread}/events",
        params={"after": reader.ids[2], "wait": 20},
        headers={"Accept": "application/json"},
    )
    assert answer.json()["events"][0]["delta"] == "b"
    assert 0.2 < time.monotonic() - started < 3
    reader.done()


def test_a_long_poll_of_a_quiet_thread_ends_when_it_was_told(ada: Person) -> None:
    done = ada.play(*said(delta("x"))).done()
    started = time.monotonic()
    answer = ada.get(
        f"/agui/threads/{done.thread}/events", params={"after": done.ids[-1], "wait": 0.5}
    )
    assert answer.text == ""
    assert answer.headers["AGUI-Next"] == done.ids[-1]
    assert 0.4 < time.monotonic() - started < 3


def test_the_same_post_twice_is_one_run(ada: Person) -> None:
    given = demo.run_input("same", "go", {"script": said(trickle(20, 0.02))})
    first = ada.post("scripted", given).events(3)
    second = ada.post("scripted", given).done()
    first.done()
    assert first.logged == second.logged == stored(first.run)
    assert first.run == second.run


def test_fifty_streams_at_once_are_gapless(server: Server, ada: Person) -> None:
    async def stream(client: httpx.AsyncClient, number: int) -> bytes:
        given = demo.run_input(f"many-{number}", "go", {"n": 46, "delay": 0.01})
        response = await client.post(server.url("/agui/agents/tokens/"), json=given)
        assert response.status_code == 200
        return response.content

    async def everybody() -> list[bytes]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(headers=ada.headers, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(stream(client, number) for number in range(50)))

    for body in asyncio.run(everybody()):
        ids = [line for line in body.split(b"\n") if line.startswith(b"id: ")]
        assert [int(line.rpartition(b"-")[2]) for line in ids] == list(range(1, 51))
        assert body.endswith(b"\n\n")
        assert body.count(b'"RUN_FINISHED"') == 1


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_a_run_as_one_document(ada: Person, accept: str) -> None:
    given = demo.run_input("document", "one two", {})
    response = httpx.post(
        ada.server.url("/agui/agents/echo/"),
        json=given,
        params={} if accept == "application/json" else {"stream": "0"},
        headers={**ada.headers, "Accept": accept},
    )
    rows = stored(response.headers["AGUI-Run"])
    assert response.text == '{"events":[' + ",".join(rows) + "]}"


def test_readers_of_one_run_get_the_same_frames(ada: Person) -> None:
    first = ada.play(*said(trickle(100, 0.005))).events(5)
    watchers = [ada.watch(first.thread, run=first.run) for _ in range(20)]
    first.done()
    for watcher in watchers:
        watcher.done()
        assert watcher.ids == first.ids
        assert watcher.logged == first.logged
    assert ended(first.run).status == "success"


def test_one_run_after_another_on_one_thread(ada: Person) -> None:
    readers: list[Reader] = []
    errors: list[Any] = []

    def follow() -> None:
        try:
            readers.append(
                ada.watch(first.thread).wait(lambda r: r.types.count("RUN_FINISHED") == 3)
            )
        except BaseException as error:
            errors.append(error)

    first = ada.run("echo", "one", "chain").done()
    following = threading.Thread(target=follow)
    following.start()
    runs = [first, *(ada.run("echo", text, "chain").done() for text in ("two", "three"))]
    following.join()
    assert not errors
    gapless(readers[0])
    assert readers[0].logged == [p for run in runs for p in stored(run.run)]
    readers[0].drop()
