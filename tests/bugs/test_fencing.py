"""Who may write a run: the holder of its token, and nobody whom another has replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import psutil
import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.db import connection
from django.utils import timezone

from aguiapp import store
from aguiapp.engine import recovery
from aguiapp.models import Run, RunEvent
from tests.bugs.crowd import given, open_socket, said, script_of
from tests.bugs.world import World, case, sibling
from tests.live.servers import (
    Person as Client,
    Servers,
    ended,
    legal as legal_texts,
    stored as rows_of,
    until,
)
from tests.scripts import events_of, legal, opening, row, run_input, stored, text

#: Leases of a second and a half, looked after all the time.
HASTY = {"AGUIAPP": {"LEASE_SECONDS": 1.5, "SWEEP_SECONDS": 0.3}}


@pytest.fixture
def hasty(servers: Servers, kind: str, database_url: str, user: User) -> tuple[Client, Client]:
    """A person at a server of this test's own, and at another one that ends lost runs."""
    own = servers.launch(kind, database_url, overrides=HASTY)
    other = {"daphne": "uvicorn", "uvicorn": "daphne"}[kind]
    there = Client(servers.shared(other, database_url, "hasty", overrides=HASTY), user)
    there.get("/agui/threads/")  # a process looks for lost runs from its first request on
    return there.at(own.ready()), there


@case("FEN-01")
def test_a_process_that_was_stopped_writes_nothing_more(
    w: World, hasty: tuple[Client, Client]
) -> None:
    here, there = hasty
    reader = here.play(*script_of(w, sleep=3)).events(3)
    watcher = there.watch(reader.thread, run=reader.run).events(3)
    process = psutil.Process(here.server.process.pid)
    process.suspend()
    try:
        assert watcher.done(15).last["code"] == "orphaned"
        rows = rows_of(reader.run)
        assert ended(reader.run).status == "error"
        again = there.run("echo", "next", "after the zombie").done()
        assert again.last["type"] == "RUN_FINISHED"
    finally:
        process.resume()
    until(lambda: "run fenced" in here.server.said(), 10, "it notices")
    reader.done()
    assert reader.logged == watcher.logged == rows == rows_of(reader.run)
    assert "zombie" not in "".join(rows)
    legal_texts(rows)
    until(lambda: not [t for t in here.server.inside()["tasks"] if t.startswith("run ")])
    time.sleep(1)  # the agent's own three seconds are over now
    assert rows_of(reader.run) == rows
    assert here.run("echo", "fine again").done().last["type"] == "RUN_FINISHED"


@sibling("FEN-01")
def test_a_stop_overrules_a_process_that_stands_still(
    w: World, hasty: tuple[Client, Client]
) -> None:
    here, there = hasty
    reader = here.play(*script_of(w, sleep=0.3), thread="still").events(3)
    process = psutil.Process(here.server.process.pid)
    process.suspend()
    try:
        assert there.cancel(reader).json()["status"] in ("cancelled", "error")
        rows = rows_of(reader.run)
        next_turn = there.run("echo", "next", "still").done()
        assert next_turn.last["type"] == "RUN_FINISHED"
    finally:
        process.resume()
    reader.done()
    assert reader.logged == rows == rows_of(reader.run)
    legal_texts(rows)


@sibling("FEN-01")
async def test_the_token_is_checked_where_the_rows_are_written(w: World) -> None:
    """Rows of an old holder and of the new one in one commit: only the new one's arrive."""
    from tests.scripts import writer

    opened = await store.call(store.open_run, opening())
    run, old = opened.run, opened.run.lease_token or 0
    events = [{"type": "CUSTOM", "name": f"{n}", "value": n} for n in range(1, 9)]
    job = writer.Job
    assert await store.call(writer.commit, [job(run.pk, old, [row(1, events[0])])]) == [None]
    new = await store.call(store.take, run)
    assert new not in (None, old)
    zombie = [row(2, {**events[1], "name": "zombie"}), row(3, events[2])]
    (refused,) = await store.call(writer.commit, [job(run.pk, old, zombie)])
    assert type(refused).__name__ == "Fenced"
    assert await store.call(writer.commit, [job(run.pk, new, [row(2, events[1])])]) == [None]
    (refused,) = await store.call(writer.commit, [job(run.pk, old, zombie)])
    assert type(refused).__name__ == "Fenced"
    assert await store.call(store.take, run) is None  # it saw an older token
    ending = store.Ending(status="success")
    last = row(3, {"type": "RUN_FINISHED", "threadId": "t1", "runId": "r1"})
    with pytest.raises(Exception, match="no longer holds"):
        await store.call(store.finish, run.pk, old, [last], 9, ending)
    assert await RunEvent.objects.filter(run_id=run.pk).acount() == 2
    await store.call(store.finish, run.pk, new, [last], 9, ending)
    assert "zombie" not in "".join(await stored(run_id=run.pk))


def program(database_url: str, code: str) -> subprocess.Popen[str]:
    """A management process of the same project that runs some code; it may not come back."""
    lines = ["import django, os, signal", "django.setup()", code]
    environment = {
        **os.environ,
        "DATABASE_URL": database_url,
        "DJANGO_SETTINGS_MODULE": "tests.live.settings",
        "SCRIPTED_AGENT": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=django_settings.BASE_DIR,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
    )


COMMAND = """
from django.contrib.auth.models import User
from aguiapp import engine
body = {body!r}
engine.run_now("scripted", body, user=User.objects.get(username="ada"))
"""


@case("FEN-02")
def test_a_process_that_was_killed_leaves_no_run_open(
    w: World, hasty: tuple[Client, Client], database_url: str
) -> None:
    """By stream, by socket, as a document, by a command."""
    here, there = hasty
    hang = [*said("x"), {"$hang": True}]
    command = program(database_url, COMMAND.format(body=given("command", hang)))
    here.post("scripted", given("sse", hang)).events(4)
    document = here.post("scripted", given("document", hang), Accept="application/json").opened()
    with open_socket(here.server, here.headers) as socket:
        socket.send(json.dumps(given("ws", hang)))
        socket.recv()

        def all_run() -> bool:
            seqs = [RunEvent.objects.filter(run=run).count() for run in Run.objects.all()]
            return seqs == [4, 4, 4, 4]

        until(all_run, 20, "four runs")
        for run in Run.objects.all():
            assert run.status == "running"
            assert run.lease_token
            assert run.lease_owner
            assert run.lease_expires is not None
        before = {run.key: rows_of(str(run.key)) for run in Run.objects.all()}
        command.kill()
        here.server.kill()
        killed = time.monotonic()
        command.wait(10)
    modes = set()
    for run in Run.objects.select_related("thread"):
        over = ended(str(run.key), 20)
        rows = rows_of(str(run.key))
        assert (over.status, over.error_code) == ("error", "orphaned")
        assert rows[:4] == before[run.key]
        assert json.loads(rows[-1])["code"] == "orphaned"
        legal_texts(rows)
        modes.add((run.mode, run.thread.thread_id))
    assert time.monotonic() - killed < 20
    assert len(modes) == 4
    document.done()
    assert document.end == "aborted"
    for thread in ("sse", "document", "ws", "command"):
        assert there.run("echo", "next", thread).done().last["type"] == "RUN_FINISHED"
    assert command.stdout is not None
    command.stdout.close()


@sibling("FEN-02")
@pytest.mark.parametrize("late", [True, False])
async def test_a_machine_that_is_gone_is_known_by_its_lease_alone(w: World, late: bool) -> None:
    opened = await store.call(store.open_run, opening())
    seconds = -1 if late else 3600
    expires = timezone.now() + timedelta(seconds=seconds)
    runs = Run.objects.filter(pk=opened.run.pk)
    await runs.aupdate(lease_owner="elsewhere 7 boot 9", lease_expires=expires)
    swept = await store.call(recovery.sweep)
    assert [over.pk for over in swept] == ([opened.run.pk] if late else [])
    assert (await runs.aget()).status == ("error" if late else "running")
    assert await store.call(recovery.sweep) == []


CRASH = """
from aguiapp import store
from tests.scripts import opening, run_input, said
from aguiapp import protocol
body = protocol.dumps(run_input("t1", "r1", messages=[said("u1", "do not lose me")]))
store.open_run(opening(scope={scope!r}, text=body, input_hash=store.digest(body)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def crashed(database_url: str, scope: str) -> None:
    """A process that takes a thread's slot and is killed before it writes anything."""
    process = program(database_url, CRASH.format(scope=scope))
    assert process.wait(60) == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()
    run = Run.objects.get()
    assert (run.status, RunEvent.objects.count()) == ("running", 0)


@case("FEN-04")
def test_a_run_that_was_claimed_and_never_begun_is_ended(
    w: World, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    crashed(database_url, f"user:{w.ada.user.pk}")
    run = Run.objects.get()
    assert [over.pk for over in recovery.sweep()] == [run.pk]
    assert recovery.sweep() == []
    events = [json.loads(payload) for payload in rows_of(str(run.key))]
    legal(events)
    assert [event["type"] for event in events] == ["RUN_STARTED", "RUN_ERROR"]
    assert events[-1]["code"] == "orphaned"
    assert events[0]["messages" if "messages" in events[0] else "input"]["messages"][0][
        "content"
    ] == ("do not lose me")
    assert len(caplog.records) <= 2
    connection.close()


@sibling("FEN-04")
async def test_the_thread_of_a_run_never_begun_takes_the_next_turn(
    w: World, database_url: str
) -> None:
    await store.call(crashed, database_url, f"user:{w.ada.user.pk}")
    reply = await w.ada.run(run_input("t1", "r2", script=text("m2", "here")))
    assert (reply.status, reply.types[-1]) == (200, "RUN_FINISHED")
    lost = await Run.objects.aget(run_id="r1")
    assert (lost.status, lost.error_code) == ("error", "orphaned")
    assert [event["type"] for event in await events_of(lost)] == ["RUN_STARTED", "RUN_ERROR"]
    contents = [m["content"] for m in (await w.snapshot(reply))["messages"]]
    assert contents == ["do not lose me", "here"]
