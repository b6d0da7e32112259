"""Servers that are replaced while people read."""

from __future__ import annotations

import time

import pytest
from django.contrib.auth.models import User

from tests.bugs.crowd import positions
from tests.bugs.world import World, case, sibling
from tests.live.servers import (
    Person as Client,
    Servers,
    ended,
    legal,
    said,
    stored,
    trickle,
    until,
)

#: Events at the moment of SIGTERM, and how the run ends: by itself in its grace, or ended.
LENGTHS = {"short": (40, "success"), "long": (60_000, "error")}


@pytest.fixture
def rolling(servers: Servers, kind: str, database_url: str, user: User) -> tuple[Client, Client]:
    """The same person at the old server and at the new one."""
    other = {"daphne": "uvicorn", "uvicorn": "daphne"}[kind]
    old = servers.launch(kind, database_url, overrides={"AGUIAPP": {"DRAIN_SECONDS": 1}})
    new = servers.shared(other, database_url)
    return Client(old.ready(), user), Client(new, user)


@case("SHU-02")
@pytest.mark.parametrize("length", LENGTHS)
def test_a_rolling_restart_loses_no_event(
    w: World, rolling: tuple[Client, Client], length: str
) -> None:
    old, new = rolling
    count, status = LENGTHS[length]
    reader = old.play(*said(trickle(count, 0.02)), thread="rolling").events(10)
    resuming = old.watch(reader.thread, resume="1").events(10)
    old.server.process.terminate()
    reader.drop()
    head = [frame for frame in list(reader.frames) if frame.id][:8]
    attached = new.watch(reader.thread, head[-1].id, run=reader.run)
    resuming.done()
    old.server.process.wait(15)
    attached.done()
    rows = stored(reader.run)
    legal(rows)
    assert ended(reader.run).status == status
    assert attached.end == "clean"
    assert [frame.data for frame in head] + attached.logged == rows
    assert positions([frame.id for frame in head] + attached.ids) == list(range(1, len(rows) + 1))
    # Who declared to resume is told where, and misses nothing between the two either.
    assert resuming.end == "clean"
    mark = resuming.comments[-1].removeprefix("aguiapp.resume ")
    assert mark == resuming.ids[-1]
    onward = new.watch(reader.thread, mark)
    again = new.run("echo", "next", "rolling").done()
    onward.wait(lambda r: again.ids[-1] in r.ids)
    assert resuming.logged + onward.logged == rows + again.logged
    onward.drop()


@sibling("SHU-02")
def test_polling_across_a_rolling_restart(w: World, rolling: tuple[Client, Client]) -> None:
    old, new = rolling
    reader = old.play(*said(trickle(60_000, 0.02))).events(5)
    path, after = f"/agui/threads/{reader.thread}/events", ""
    rows: list[str] = []
    began = time.monotonic()
    old.server.process.terminate()
    while not rows or '"RUN_ERROR"' not in rows[-1]:
        assert time.monotonic() - began < 20
        page = new.get(path, params={"after": after, "wait": 2, "limit": 7})
        rows += page.text.splitlines()
        after = page.headers["AGUI-Next"]
    old.server.process.wait(15)
    until(lambda: reader.end)
    assert rows == reader.logged == stored(reader.run)
