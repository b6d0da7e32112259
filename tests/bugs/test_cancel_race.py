"""Stop against the end, against the agent's own tidying up, and against the next turn."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
from django.contrib.auth.models import User

from aguiapp.models import Run
from tests.bugs.crowd import dice, given, open_socket, read_frames, rounds, said, script_of
from tests.bugs.world import World, case, sibling
from tests.live.servers import Person as Client, Reader, Servers, ended, stored as rows_of
from tests.scripts import SECONDS, legal, of, only_run, registered, run_input, stored

TERMINAL = {"RUN_FINISHED", "RUN_ERROR"}


def statuses(events: list[dict[str, Any]]) -> list[str]:
    """What each terminal event among them says."""
    return [
        str(event.get("outcome", {"type": "success"})["type"])
        for event in events
        if event["type"] in TERMINAL
    ]


async def raced(w: World, number: int, after: float) -> str:
    """Stop a run of half a second so many seconds after its start; how it ended."""
    stream = await w.ada.watch(run_input(f"t{number}", script=script_of(w, sleep=0.5)))
    headers = stream.response.headers
    await asyncio.sleep(after)
    path = f"/agui/threads/{headers['AGUI-Thread']}/runs/{headers['AGUI-Run']}/cancel"
    answers = [await w.ada.ask(path, {}), await w.ada.ask(path, {})]
    reply = await stream.rest()
    run = await only_run(key=headers["AGUI-Run"])
    assert reply.logged == await stored(run_id=run.pk)
    legal(reply.events)
    assert statuses(reply.events) == [run.status]
    assert {answer.json["status"] for answer in answers} == {run.status}
    return str(run.status)


@case("CAN-01")
async def test_a_stop_at_the_very_end_leaves_one_ending(w: World) -> None:
    chance = dice(w)
    moments = [0.5 + chance.uniform(-0.02, 0.02) for _ in range(rounds(40, 200))]
    found: list[str] = []
    for start in range(0, len(moments), 20):
        jobs = [raced(w, start + n, after) for n, after in enumerate(moments[start : start + 20])]
        found += await asyncio.gather(*jobs)
    assert set(found) <= {"success", "cancelled"}
    # One who is early and one who is late, so that both answers have been seen.
    assert await raced(w, 1000, 0.0) == "cancelled"
    assert await raced(w, 1001, 1.5) == "success"


@sibling("CAN-01")
def test_a_stop_from_another_process_at_the_very_end(
    w: World, servers: Servers, database_url: str, user: User
) -> None:
    here = Client(servers.shared("daphne", database_url), user)
    there = here.at(servers.shared("uvicorn", database_url))
    chance = dice(w)

    def once(number: int) -> tuple[Reader, str]:
        reader = here.play({"$sleep": 0.4}, thread=f"race-{number}").events(1)
        # The other process hears of it up to 0.4 s later.
        time.sleep(chance.uniform(0.0, 0.35))
        answer = str(there.cancel(reader).json()["status"])
        return reader.done(), answer

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(once, range(rounds(12, 100))))
    for reader, answer in found:
        events = [json.loads(payload) for payload in rows_of(reader.run)]
        assert reader.logged == rows_of(reader.run)
        legal(events)
        assert statuses(events) == [ended(reader.run).status] == [answer]


@case("CAN-02")
async def test_tidying_up_never_outlives_the_ending(w: World) -> None:
    """Clean-up events within the second of a stop are logged, later ones are findings."""
    stream = await w.ada.watch(w.play())
    await stream.until(lambda raw: b'"a"' in raw)
    headers = stream.response.headers
    path = f"/agui/threads/{headers['AGUI-Thread']}/runs/{headers['AGUI-Run']}/cancel"
    stopping = asyncio.ensure_future(w.ada.ask(path, {}))
    seen: list[str] = []
    for _ in range(34):
        status = (await Run.objects.aget(key=headers["AGUI-Run"])).status
        rows = await stored(run__key=headers["AGUI-Run"])
        terminal = any(json.loads(row)["type"] in TERMINAL for row in rows)
        # Read one after the other: the end may come between the two.
        assert terminal or status == "running"
        if not seen or seen[-1] != status:
            seen.append(status)
        await asyncio.sleep(0.05)
    assert seen in (["running", "cancelled"], ["cancelled"])
    assert (await stopping).json["status"] == "cancelled"
    reply = await stream.rest()
    assert reply.logged == await stored(run__key=headers["AGUI-Run"])
    legal(reply.events)
    assert [event["delta"] for event in of(reply.events, "TEXT_MESSAGE_CONTENT")] == ["a", "b"]
    assert reply.types[-2:] == ["TEXT_MESSAGE_END", "RUN_FINISHED"]
    assert statuses(reply.events) == ["cancelled"]


@sibling("CAN-02")
async def test_what_is_said_after_the_ending_is_a_finding(w: World) -> None:
    async def deaf(run: Any) -> AsyncIterator[Any]:
        yield from_agent("begun")
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        # It is told once; what it does to tidy up is not cut.
        await asyncio.sleep(1)
        yield from_agent("too late")

    with registered("deaf", deaf):
        stream = await w.ada.watch(run_input(), "deaf")
        await stream.until(lambda raw: b"begun" in raw)
        headers = stream.response.headers
        path = f"/agui/threads/{headers['AGUI-Thread']}/runs/{headers['AGUI-Run']}/cancel"
        assert (await w.ada.ask(path, {})).json["status"] == "cancelled"
        rows = await stored()
        reply = await stream.rest()
        async with asyncio.timeout(SECONDS):
            while not (run := await only_run()).findings:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert reply.logged == rows == await stored()
    assert "too late" not in "".join(rows)
    assert [finding["kind"] for finding in run.findings] == ["after_terminal"]


def from_agent(name: str) -> dict[str, Any]:
    """A plain event."""
    return {"type": "CUSTOM", "name": name, "value": 1}


@case("CAN-05")
def test_the_next_turn_is_taken_the_moment_the_ending_is_read(w: World, ada: Client) -> None:
    url = ada.server.url("/agui/agents/scripted/")
    runs = [given("same", script_of(w), f"r{n}") for n in range(w.input["loop"])]

    def turn(number: int) -> None:
        """Post a turn, and from within its last frame the next one."""
        body = b""
        with httpx.stream("POST", url, json=runs[number], headers=ada.headers) as response:
            assert response.status_code == 200, (number, response.read())
            for chunk in response.iter_raw():
                body += chunk
                if read_frames(body)[1] and '"RUN_FINISHED"' in read_frames(body)[1][-1]:
                    if number + 1 < len(runs):
                        turn(number + 1)
                    return
        raise AssertionError(body)

    turn(0)
    assert Run.objects.filter(status="success").count() == len(runs)


@sibling("CAN-05")
def test_the_next_turn_by_socket_or_in_another_process(
    w: World, servers: Servers, ada: Client, database_url: str, kind: str
) -> None:
    other = {"daphne": "uvicorn", "uvicorn": "daphne"}[kind]
    there = ada.at(servers.shared(other, database_url))
    for number in range(10):
        person = (ada, there)[number % 2]
        with open_socket(person.server, person.headers) as socket:
            socket.send(json.dumps(given("by turns", said(f"{number}"), f"s{number}")))
            frame: dict[str, Any] = {}
            while frame.get("type") != "RUN_FINISHED" or frame["runId"] != f"s{number}":
                frame = json.loads(socket.recv(timeout=20))
                assert frame["type"] != "aguiapp.error", frame
    assert Run.objects.filter(status="success").count() == 10
