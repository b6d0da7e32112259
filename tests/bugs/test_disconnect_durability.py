"""Readers who leave: their run goes on, and nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.urls import reverse

from aguiapp import engine
from aguiapp.models import Participant, Run, Thread
from project import scripted
from project.models import Order
from tests.bugs import middleware
from tests.bugs.crowd import (
    all_of,
    attaching,
    dice,
    drop_socket,
    given,
    nothing_left,
    open_socket,
    posting,
    rounds,
    said,
    script_of,
    send_and_abort,
)
from tests.bugs.test_sse_transport import HOSTILE, SYNC
from tests.bugs.world import World, case, sibling
from tests.live.servers import (
    Person as Client,
    Reader,
    Server,
    Servers,
    ended,
    gapless,
    legal,
    stored,
    until,
)
from tests.live.test_sockets import cookie
from tests.scripts import only_run, registered, run_input, stored as rows_of, text


@case("DIS-05")
def test_who_leaves_before_the_first_byte_leaves_nothing(
    w: World, server: Server, ada: Client
) -> None:
    """The same post over and over, and posts of their own threads."""
    chance = dice(w)
    (same,) = (op["run_input"] for op in w.input["ops"])
    ada.post("echo", {**same, "threadId": "warm"}).done()

    def post(number: int) -> partial[Any]:
        body = same if number % 2 else {**same, "threadId": f"own-{number}"}
        raw = posting(server, ada, body, "echo")
        return partial(send_and_abort, server, raw, chance.choice((0, 0, 0.001, 0.005, 0.02)))

    with nothing_left(server):
        count = rounds(60, w.input["loop"])
        asyncio.run(all_of([post(number) for number in range(count)], 10))
        until(lambda: not Run.objects.filter(status="running").exists(), 30)
    for run in Run.objects.all():
        assert run.status == "success"
        assert len(stored(str(run.key))) == run.last_seq
    assert Run.objects.filter(thread__thread_id=same["threadId"]).count() <= 1
    again = ada.post("echo", {**same, "runId": "next"}).done()
    assert (again.status, again.last["type"]) == (200, "RUN_FINISHED")
    assert "Traceback" not in server.said()


@sibling("DIS-05")
def test_half_a_body_starts_nothing(w: World, server: Server, ada: Client) -> None:
    (body,) = (op["run_input"] for op in w.input["ops"])
    raw = posting(server, ada, body, "echo")
    jobs = [partial(send_and_abort, server, raw[: len(raw) - cut], 0.05) for cut in range(1, 40, 4)]
    with nothing_left(server):
        asyncio.run(all_of(jobs, 10))
    assert not Run.objects.exists()
    assert ada.post("echo", body).done().last["type"] == "RUN_FINISHED"


@case("DIS-06")
def test_leaving_as_a_heartbeat_is_sent_disturbs_nobody(
    w: World, impatient: Server, user: User
) -> None:
    """A heartbeat every 0.3 s; readers leave right around it, and one stays."""
    ada, chance = Client(impatient, user), dice(w)
    reader = ada.play(*script_of(w, sleep=rounds(2, 8)), *said("end")).events(1)
    raw = attaching(impatient, ada, reader.thread, f"?run={reader.run}")
    leaving = [
        partial(send_and_abort, impatient, raw, chance.uniform(0.285, 0.315))
        for _ in range(w.input["ops"][0]["loop"])
    ]
    asyncio.run(all_of(leaving, 25))
    reader.done()
    assert reader.last["type"] == "RUN_FINISHED"
    assert len(reader.comments) > 3
    gapless(reader)
    assert reader.logged == stored(reader.run)
    until(lambda: not [t for t in impatient.inside()["tasks"] if "pump" in t or "_serve" in t])
    log = impatient.said()
    assert "RuntimeError" not in log
    assert "Traceback" not in log


@case("DIS-07")
def test_a_run_goes_on_behind_its_request(
    w: World, servers: Servers, kind: str, database_url: str, user: User
) -> None:
    """Behind sync middleware, whose threads end with the request."""
    application = "project.asgi:application"
    server = servers.shared(
        kind, database_url, f"hostile {application}", application=application, overrides=HOSTILE
    )
    ada = Client(server, user)
    reader = ada.play(*script_of(w, sleep=1.2)).events(1)
    reader.drop()
    assert ended(reader.run).status == "success"
    assert "after request" in "".join(stored(reader.run))
    assert "Traceback" not in server.said()


def order_number() -> int:
    """Write with the ORM, and say in whose context that was."""
    assert middleware.tenant.get() == "nobody's"
    return Order.objects.create(number=4711, status="late", items=[]).number


async def late(run: Any) -> AsyncIterator[Any]:
    """Writes to the database when its request is long gone."""
    yield {"type": "CUSTOM", "name": "tenant", "value": middleware.tenant.get()}
    await asyncio.sleep(0.3)
    yield {"type": "CUSTOM", "name": "order", "value": await run.call(order_number)}


@sibling("DIS-07")
async def test_a_run_inherits_nothing_of_its_request(w: World) -> None:
    w.settings.MIDDLEWARE = [SYNC, *django_settings.MIDDLEWARE]
    with registered("late", late):
        stream = await w.ada.watch(run_input(), "late")
        await stream.until(lambda raw: b"tenant" in raw)
        assert stream.response.headers["X-Sync"] == "seen"
        await stream.source.aclose()
        await stream.response.streaming_content.aclose()
        run = await only_run()
    rows = "".join(await rows_of())
    assert run.status == "success"
    assert '"value":"nobody\'s"' in rows
    assert '"value":4711' in rows
    assert await Order.objects.filter(number=4711).aexists()


@sibling("DIS-07")
async def test_a_run_of_a_sync_view_has_a_context_of_its_own(w: World) -> None:
    def view() -> str:
        token = middleware.tenant.set("the view's")
        try:
            return engine.run_now("late", run_input(), user=w.ada.user).status
        finally:
            middleware.tenant.reset(token)

    with registered("late", late):
        assert await sync_to_async(view, thread_sensitive=False)() == "success"
        await Run.objects.all().adelete()
        await Order.objects.all().adelete()
        found: list[str] = []
        alone = threading.Thread(target=lambda: found.append(view()))
        alone.start()
        await asyncio.to_thread(alone.join, 20)
    assert found == ["success"]
    assert '"value":"nobody\'s"' in "".join(await rows_of())


# -- what becomes of the run when its readers have left -----------------------------


@pytest.fixture
def heeding(servers: Servers, database_url: str, user: User) -> tuple[Client, Client]:
    """A person at two processes that cancel a run which nobody reads."""
    overrides = {"AGUIAPP": {"DISCONNECT": "cancel"}}
    here = servers.shared("daphne", database_url, "heeding", overrides=overrides)
    there = servers.shared("uvicorn", database_url, "heeding", overrides=overrides)
    return Client(here, user), Client(there, user)


class Viewer:
    """A reader of a run by whatever transport, who can leave."""

    def __init__(self, person: Client, body: dict[str, Any], transport: str) -> None:
        self.held, self.socket = ExitStack(), None
        if transport == "ws":
            opened = open_socket(person.server, person.headers)
            self.socket = self.held.enter_context(opened)
            self.socket.send(json.dumps(body))
            assert json.loads(self.socket.recv(timeout=20))["type"] == "RUN_STARTED"
        else:
            headers = {"document": {"Accept": "application/json"}}.get(transport, {})
            self.reader = person.post("scripted", body, **headers).opened()

    def leave(self) -> None:
        if self.socket is not None:
            drop_socket(self.socket)
            self.held.close()
        else:
            self.reader.drop()


def running(thread: str) -> Run:
    """The thread's run, once it runs."""
    found = until(lambda: Run.objects.filter(thread__thread_id=thread, status="running").first())
    assert found is not None
    return found


def still_runs(run: Run, seconds: float) -> None:
    """It goes on all that time."""
    until_then = time.monotonic() + seconds
    while time.monotonic() < until_then:
        assert Run.objects.get(pk=run.pk).status == "running"
        time.sleep(0.1)


def cancelled_soon(run: Run, left: float = 0.0) -> None:
    """Cancelled, with its terminal, within two seconds since they left."""
    left = left or time.monotonic()
    over = ended(str(run.key), 5)
    assert time.monotonic() - left < 2
    assert over.status == "cancelled"
    rows = stored(str(run.key))
    legal(rows)
    assert json.loads(rows[-1])["outcome"] == {"type": "cancelled"}
    assert "late" not in "".join(rows)


TRANSPORTS = ("sse", "ws", "document")


@case("DIS-02")
def test_a_run_that_nobody_reads_is_cancelled_where_that_is_said(
    w: World, heeding: tuple[Client, Client]
) -> None:
    """On both servers, by every transport."""
    names = [(person, way) for person in heeding for way in TRANSPORTS]
    viewers = [
        Viewer(person, given(f"{person.server.kind} {way}", script_of(w)), way)
        for person, way in names
    ]
    runs = [running(f"{person.server.kind} {way}") for person, way in names]
    for viewer, run in zip(viewers, runs, strict=True):
        assert Run.objects.get(pk=run.pk).status == "running"
        viewer.leave()
    left = time.monotonic()
    for run in runs:
        cancelled_soon(run, left)


@sibling("DIS-02")
def test_a_run_goes_on_unread_where_nothing_else_is_said(w: World, ada: Client) -> None:
    script = script_of(w, sleep=2)
    viewers = [Viewer(ada, given(f"left {way}", script), way) for way in TRANSPORTS]
    runs = [running(f"left {way}") for way in TRANSPORTS]
    for viewer in viewers:
        viewer.leave()
    for run in runs:
        assert ended(str(run.key)).status == "success"
        assert "late" in "".join(stored(str(run.key)))


@sibling("DIS-02")
def test_the_last_reader_counts_in_whatever_process(
    w: World, heeding: tuple[Client, Client]
) -> None:
    here, there = heeding
    body = given("shared", script_of(w), "r1")
    first = Viewer(here, body, "sse")
    run = running("shared")
    second = Viewer(there, body, "ws")
    watcher = there.watch(first.reader.thread, run=first.reader.run).events(1)
    first.leave()
    still_runs(run, 1.5)
    second.leave()
    still_runs(run, 1.5)
    watcher.drop()
    cancelled_soon(run)


@sibling("DIS-02")
async def test_who_comes_back_within_the_grace_keeps_the_run(w: World) -> None:
    with registered("patient", scripted.play, disconnect=2):
        body = run_input(script=[*script_of(w, sleep=3.2), *text("m2", "end")])
        stream = await w.ada.watch(body, "patient")
        await stream.until(lambda raw: b"RUN_STARTED" in raw)
        headers = stream.response.headers
        await stream.source.aclose()
        await asyncio.sleep(1.2)
        url = f"/agui/threads/{headers['AGUI-Thread']}/stream?run={headers['AGUI-Run']}"
        reply = await w.ada.ask(url)
    assert reply.types[-1] == "RUN_FINISHED"
    assert reply.events[-1]["outcome"] == {"type": "success"}
    assert (await only_run()).status == "success"


#: Who leaves while the one who posted the run reads on.
BYSTANDERS = ("attach_sse", "attach_ws", "polling", "admin_replay", "see only")


@case("DIS-08")
def test_bystanders_who_leave_end_no_run(
    w: World, heeding: tuple[Client, Client], other: User, staff: User
) -> None:
    """A run for each of them, on which nobody else comes or goes."""
    assert set(w.input["matrix"]) >= {"attach_sse", "attach_ws", "admin_replay"}
    here, there = heeding
    bodies = {name: given(name, [{"$sleep": 3.5}, *said("end")], "r1") for name in BYSTANDERS}
    readers = {name: here.post("scripted", body).events(1) for name, body in bodies.items()}
    for name, reader in readers.items():
        leave_as(name, there, reader, bodies[name], other, staff)
    still_runs(Run.objects.get(key=readers["see only"].run), 1.4)
    for name, reader in readers.items():
        assert reader.done().last["type"] == "RUN_FINISHED", name
        assert ended(reader.run).status == "success", name


def leave_as(
    bystander: str, person: Client, reader: Reader, body: dict[str, Any], other: User, staff: User
) -> None:
    """Look at the run in some way, and leave."""
    if bystander == "attach_ws":
        Viewer(person, body, "ws").leave()
    elif bystander == "attach_sse":
        person.watch(reader.thread, run=reader.run).events(1).drop()
    elif bystander == "polling":
        assert person.get(f"/agui/threads/{reader.thread}/events").status_code == 200
    elif bystander == "admin_replay":
        run = Run.objects.get(key=reader.run)
        page = reverse("admin:aguiapp_run_replay", args=[run.pk])
        answer = httpx.get(person.server.url(page), headers=cookie(staff), timeout=30)
        assert answer.status_code == 200
    else:
        thread = Thread.objects.get(key=reader.thread)
        Participant.objects.create(thread=thread, user=other, role="viewer")
        Client(person.server, other).watch(reader.thread).events(1).drop()


@sibling("DIS-08")
@pytest.mark.parametrize("role", ["viewer", "member"])
def test_a_reader_without_the_right_to_speak_keeps_no_run(
    w: World, heeding: tuple[Client, Client], other: User, role: str
) -> None:
    here, there = heeding
    reader = here.post("scripted", given("roles", [{"$sleep": 3}, *said("late")])).events(1)
    run = running("roles")
    thread = Thread.objects.get(key=reader.thread)
    Participant.objects.create(thread=thread, user=other, role=role)
    watcher = Client(there.server, other).watch(reader.thread, run=reader.run).events(1)
    reader.drop()
    if role == "viewer":
        cancelled_soon(run)
        assert watcher.done().last["outcome"] == {"type": "cancelled"}
    else:
        assert watcher.done().last["type"] == "RUN_FINISHED"
        assert ended(reader.run).status == "success"


@sibling("DIS-08")
def test_a_replay_in_the_admin_keeps_no_run(
    w: World, heeding: tuple[Client, Client], staff: User
) -> None:
    here, there = heeding
    reader = here.post("scripted", given("watched", [{"$sleep": 4}, *said("late")])).events(1)
    run = running("watched")
    page = reverse("admin:aguiapp_run_replay", args=[run.pk])
    assert httpx.get(there.server.url(page), headers=cookie(staff)).status_code == 200
    reader.drop()
    cancelled_soon(run)
