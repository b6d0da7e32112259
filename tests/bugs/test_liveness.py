"""Runs that make no progress are ended, whatever they still say and whether they listen or not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User

from aguiapp import agents
from aguiapp.models import Run
from project import scripted
from tests.bugs.crowd import script_of
from tests.bugs.world import World, case, sibling
from tests.live.servers import Person as Client, Servers, delta, ended, said, stored as rows_of
from tests.scripts import legal, only_run, registered, run_input, stored

NOISES: dict[str, Any] = {
    "ping": {"type": "CUSTOM", "name": "ping", "value": None},
    "raw": {"type": "RAW", "event": {"ping": 1}},
    "state": {"type": "STATE_DELTA", "delta": []},
    "text": {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m1", "delta": "."},
}


@case("LIV-02")
@pytest.mark.parametrize("noise", NOISES)
async def test_noise_does_not_prolong_a_run_for_ever(w: World, noise: str) -> None:
    """Any event counts as progress for the idle limit; the total limit ends it all the same."""
    start = [{"type": "TEXT_MESSAGE_START", "messageId": "m1", "role": "assistant"}]
    assert script_of(w)[0]["$forever"][0] == NOISES["ping"]
    script: list[Any] = [
        *(start if noise == "text" else []),
        {"$forever": [NOISES[noise], {"$sleep": 0.1}]},
    ]
    limits = {"run_seconds": 1.2, "idle_seconds": 0.5}
    began = time.monotonic()
    with registered("noisy", scripted.play, limits=limits):
        reply = await w.ada.run(run_input(script=script), "noisy")
    took = time.monotonic() - began
    assert 1.1 < took < 3
    legal(reply.events)
    assert reply.logged == await stored()
    assert (reply.types[-1], reply.events[-1]["code"]) == ("RUN_ERROR", "run_timeout")
    assert len(reply.events) > 5
    run = await only_run()
    assert (run.status, run.error_code) == ("error", "run_timeout")


@sibling("LIV-02")
async def test_heartbeats_of_the_server_are_no_progress(w: World) -> None:
    w.settings.AGUIAPP = {"HEARTBEAT_SECONDS": 0.1}
    began = time.monotonic()
    with registered("silent", scripted.play, limits={"idle_seconds": 0.8}):
        reply = await w.ada.run(run_input(script=[{"$hang": True}]), "silent")
    assert 0.7 < time.monotonic() - began < 3
    assert reply.raw.count(b": keep-alive") >= 3
    assert (reply.types, reply.events[-1]["code"]) == (["RUN_STARTED", "RUN_ERROR"], "idle_timeout")


@sibling("LIV-02")
async def test_an_agent_that_goes_on_talking_is_never_idle(w: World) -> None:
    script = [{"$repeat": 8, "events": [NOISES["ping"], {"$sleep": 0.2}]}]
    with registered("steady", scripted.play, limits={"idle_seconds": 0.8, "run_seconds": 0}):
        reply = await w.ada.run(run_input(script=script), "steady")
    assert reply.types == ["RUN_STARTED", *["CUSTOM"] * 8, "RUN_FINISHED"]


@case("LIV-03")
async def test_an_agent_that_blocks_its_thread_is_ended_at_the_limit(
    w: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread counts as busy until it lets go; what it says then is not heard."""
    let_go, blocked = threading.Event(), threading.Event()

    def deaf(run: Any) -> Iterator[Any]:
        yield {"type": "CUSTOM", "name": "begun", "value": 1}
        blocked.set()
        let_go.wait(20)
        yield {"type": "CUSTOM", "name": "too late", "value": 2}

    caplog.set_level("INFO", "aguiapp")
    began = time.monotonic()
    with registered("deaf", deaf, limits={"run_seconds": 0.5}):
        try:
            reply = await w.ada.run(run_input(), "deaf")
            took = time.monotonic() - began
            rows = await stored()
            assert blocked.is_set()
            assert agents.pool_is_busy()
            again = await w.ada.run(run_input("t1", "r2", script=[]), "scripted")
            assert again.types[-1] == "RUN_FINISHED"
        finally:
            let_go.set()
        await only_run(run_id="r1")
    assert took < 2.5
    assert (reply.types[-1], reply.events[-1]["code"]) == ("RUN_ERROR", "run_timeout")
    assert reply.logged == rows == await stored(run__run_id="r1")
    async with asyncio.timeout(5):
        while agents.pool_is_busy():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "too late" not in "".join(await stored())
    key = str((await Run.objects.aget(run_id="r1")).key)
    lines = [record for record in caplog.records if key in record.getMessage()]
    assert len([line for line in lines if "run ended" in line.getMessage()]) == 1
    assert len(lines) <= 2, [line.getMessage() for line in lines]


@sibling("LIV-03")
def test_an_agent_that_blocks_the_loop_is_ended_at_the_limit(
    w: World, servers: Servers, kind: str, database_url: str, user: User
) -> None:
    """Nobody in its process can say so to its readers, but another process can."""
    overrides = {"AGUIAPP": {"RUN_SECONDS": 0.6}}
    ada = Client(servers.shared(kind, database_url, "hurried", overrides=overrides), user)
    reader = ada.play(*said(delta("x"), {"$sleep": 0.2}, {"$block_s": 3.5}, delta("late")))
    reader.events(3)
    began = time.monotonic()
    run = ended(reader.run, 10)
    assert time.monotonic() - began < 3.4
    assert (run.status, run.error_code) == ("error", "run_timeout")
    rows = rows_of(reader.run)
    assert reader.done().logged == rows == rows_of(reader.run)
    assert "late" not in "".join(rows)
