"""The database behind an event loop: connections that break, threads that wait, bytes written."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.db import connection

from aguiapp.models import Command, Run, RunEvent, Thread
from tests.bugs.crowd import (
    all_of,
    attaching,
    dice,
    given,
    nothing_left,
    open_socket,
    rounds,
    said,
    script_of,
    send_and_abort,
)
from tests.bugs.world import World, case, sibling
from tests.live.servers import (
    Person as Client,
    Reader,
    Server,
    Servers,
    ended,
    gapless,
    legal as legal_texts,
    said as around,
    stored as rows_of,
    trickle,
    until,
)
from tests.live.test_readers import backends
from tests.live.test_sockets import cookie, drained

POSTGRES = "postgresql"


def backend_pids(servers: list[Server]) -> list[int]:
    """The database's processes that serve these servers, and no others."""
    ports = {
        found.laddr.port
        for server in servers
        for found in psutil.Process(server.process.pid).net_connections()
    }
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid, client_port FROM pg_stat_activity WHERE datname = current_database()"
        )
        return [pid for pid, port in cursor.fetchall() if port in ports]


@contextmanager
def database_away(servers: list[Server]) -> Iterator[None]:
    """What a restart of the database does to these servers; SQLite is locked by somebody.

    Their connections are ended, and new ones are refused, in the test's own database.
    """
    if connection.vendor != POSTGRES:
        with connection.cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                cursor.execute("ROLLBACK")
        return
    allow = f'ALTER DATABASE "{connection.settings_dict["NAME"]}" ALLOW_CONNECTIONS '
    with connected("postgres") as elsewhere:
        elsewhere.autocommit = True
        elsewhere.execute(allow + "false")
        try:
            for pid in backend_pids(servers):
                elsewhere.execute("SELECT pg_terminate_backend(%s)", [pid])
            yield
        finally:
            elsewhere.execute(allow + "true")


def connected(name: str) -> psycopg.Connection[Any]:
    """A connection of its own to a database of the test's server."""
    default = connection.settings_dict
    return psycopg.connect(
        dbname=name,
        user=default["USER"],
        password=default["PASSWORD"],
        host=default["HOST"],
        port=default["PORT"] or 5432,
    )


def aged(database_url: str, age: int | None) -> dict[str, Any]:
    """Settings of a server whose requests keep their connection so long."""
    from project.settings import database

    made = {**database(database_url), "CONN_MAX_AGE": age}
    return {"DATABASES": {"default": json.loads(json.dumps(made))}}


@case("DBA-01")
def test_readers_and_runs_live_through_a_restart_of_the_database(
    w: World, servers: Servers, database_url: str, user: User
) -> None:
    """Three ages of connections; each viewer's log is whole, at once or by its cursor."""
    ages = w.input["matrix"]["CONN_MAX_AGE"]
    launched = [
        servers.launch("uvicorn", database_url, overrides=aged(database_url, age)) for age in ages
    ]
    people = [Client(server.ready(), user) for server in launched]
    runner = people[0]
    body = given("restarted", around(trickle(60, 0.05)), "r1")
    reader = runner.post("scripted", body).events(5)
    watchers = [p.watch(reader.thread, run=reader.run, resume="1").events(5) for p in people]
    framed: list[list[str]] = [[] for _ in people]

    def by_socket(number: int) -> None:
        with open_socket(people[number].server, people[number].headers) as socket:
            socket.send(json.dumps(body))
            framed[number] = drained(socket)

    sockets = [threading.Thread(target=by_socket, args=(n,)) for n in range(len(people))]
    for thread in sockets:
        thread.start()
    time.sleep(0.3)
    with database_away(launched):
        time.sleep(1.0)  # as long as it is away
        if connection.vendor == POSTGRES:
            for person in people:
                answer = person.get(f"/agui/threads/{reader.thread}/snapshot")
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "store_unavailable"
    run = ended(reader.run, 30)
    rows = rows_of(reader.run)
    assert run.status in ("success", "error")
    legal_texts(rows)
    for person, watcher in zip(people, [reader, *watchers[1:]], strict=True):
        read_to_the_end(person, watcher, rows)
    for thread in sockets:
        thread.join(30)
    for frames in framed:
        assert frames == rows[: len(frames)]
        assert len(frames) >= 5
    for person in people:
        assert person.get(f"/agui/threads/{reader.thread}/snapshot").status_code == 200
        assert person.run("echo", "all well").done().last["type"] == "RUN_FINISHED"


def read_to_the_end(person: Client, reader: Reader, rows: list[str]) -> None:
    """The reader, or who comes back with its cursor, has got all of it."""
    reader.done(30)
    found = reader.logged
    if found != rows:
        assert reader.end == "aborted" or "aguiapp.resume" in reader.comments[-1]
        assert found == rows[: len(found)]
        rest = person.watch(reader.thread, reader.ids[-1], run=reader.run).done()
        found += rest.logged
    assert found == rows
    gapless(reader)


@sibling("DBA-01")
def test_connections_that_were_ended_are_replaced(
    w: World, servers: Servers, database_url: str, user: User
) -> None:
    """Who meets a dead connection is told to try again; there are as many as threads."""
    server = servers.start("daphne", database_url, overrides=aged(database_url, None))
    ada = Client(server, user)
    done = ada.run("echo", "hi").done()
    for _ in range(3):
        if connection.vendor == POSTGRES:
            with connection.cursor() as cursor:
                for pid in backend_pids([server]):
                    cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
        tries = [ada.play(*said("x"), thread=f"t{n}").done() for n in range(6)]
        refused = [found for found in tries if found.status != 200]
        assert len(refused) <= 3
        for found in refused:
            assert (found.status, found.headers["Retry-After"]) == (503, "1")
            assert b'"store_unavailable"' in found.raw
        reader = tries[-1]
        assert (reader.status, reader.end) == (200, "clean")
        assert reader.last["type"] == "RUN_FINISHED"
        assert reader.logged == rows_of(reader.run)
        assert ada.get(f"/agui/threads/{done.thread}/snapshot").status_code == 200


@contextmanager
def reads_held_up() -> Iterator[None]:
    """Whoever reads the log waits meanwhile, where the database knows how to do that."""
    if connection.vendor != POSTGRES:
        yield
        return
    with connected(connection.settings_dict["NAME"]) as holder:
        holder.execute(f"LOCK TABLE {RunEvent._meta.db_table} IN ACCESS EXCLUSIVE MODE")
        yield
        holder.rollback()


def idle_in_transaction() -> int:
    """How many connections of the test's database hold a transaction and do nothing."""
    if connection.vendor != POSTGRES:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND state LIKE 'idle in transaction%'"
        )
        return int(cursor.fetchone()[0])


@case("DBA-03")
def test_readers_who_leave_during_a_read_leave_no_connection(
    w: World, server: Server, ada: Client
) -> None:
    chance = dice(w)
    done = ada.run("echo", "hi").done()
    paths = ("", f"?run={done.run}", f"?after={done.ids[0]}")

    def leaving(count: int) -> list[partial[Any]]:
        return [
            partial(
                send_and_abort,
                server,
                attaching(server, ada, done.thread, chance.choice(paths)),
                chance.uniform(0, 0.1),
            )
            for _ in range(count)
        ]

    asyncio.run(all_of(leaving(40), 40))
    with nothing_left(server, 30):
        before = backends()
        for _ in range(rounds(60, 1000) // 20):
            with reads_held_up():
                asyncio.run(all_of(leaving(20), 20))
        until(lambda: idle_in_transaction() == 0, 10, "no transaction is left open")
        again = ada.watch(done.thread, run=done.run).done()
        assert again.logged == rows_of(done.run)
    print(f"backends {before} -> {backends()}")  # noqa: T201
    assert "Traceback" not in server.said()


@case("DBA-06")
def test_requests_cancelled_in_their_sync_part_hold_up_nobody(
    w: World, server: Server, ada: Client, user: User
) -> None:
    """A session is read in a thread: the client leaves while that part waits for the loop."""
    chance = dice(w)
    login = cookie(user)["Cookie"]
    head = [f"Host: 127.0.0.1:{server.port}", f"Cookie: {login}"]
    done = ada.run("echo", "hi").done()
    targets = [f"/agui/threads/{done.thread}/stream", "/agui/threads/", "/login/", "/"]
    raws = ["\r\n".join([f"GET {path} HTTP/1.1", *head, "", ""]).encode() for path in targets]
    took: list[float] = []
    over = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=server.url(""), timeout=30) as visitor:
            while not over.is_set():
                started = time.monotonic()
                assert visitor.get("/login/").status_code == 200
                took.append(time.monotonic() - started)
                over.wait(0.005)

    prober = threading.Thread(target=probe)
    prober.start()
    wanted, sent = rounds(200, 4 * w.input["loop"]), 0
    try:
        while sent < wanted or len(took) < 5:
            jobs = [
                partial(send_and_abort, server, chance.choice(raws), chance.uniform(0, 0.006))
                for _ in range(50)
            ]
            asyncio.run(all_of(jobs, 5))
            sent += len(jobs)
            assert prober.is_alive()
    finally:
        over.set()
        prober.join(30)
    print(f"probe: worst {max(took) * 1000:.0f} ms of {len(took)}, {sent} cancelled")  # noqa: T201
    # One that is stuck waits for its time-out; a second is what a quiet machine must keep.
    assert max(took) < rounds(3, 1)
    assert ada.run("echo", "well").done().last["type"] == "RUN_FINISHED"
    assert "Traceback" not in server.said()


TENANTS = """
import sys
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django.contrib.auth import get_user_model
from django.test import Client
from tests.bugs.tenants.models import Tenant
import json
made = {}
for name, allowed in (("ada", True), ("bob", False)):
    tenant = Tenant.objects.create(name=name + "'s", allowed=allowed)
    user = get_user_model()._default_manager.create_user(name, password=name, tenant=tenant)
    browser = Client()
    browser.force_login(user)
    made[name] = browser.cookies["sessionid"].value
print(json.dumps(made))
"""


def tenants(hook: str) -> dict[str, Any]:
    """Settings of a host with a user model and rules of its own."""
    apps = ["tests.bugs.tenants", *django_settings.INSTALLED_APPS, "tests.live"]
    rules = "tests.bugs.tenants.rules"
    agui = {"POLICY": f"{rules}.Policy", "AUTHENTICATE": f"{rules}.{hook}"}
    return {"INSTALLED_APPS": apps, "AUTH_USER_MODEL": "tenants.User", "AGUIAPP": agui}


@case("DBA-09")
@pytest.mark.parametrize(("kind", "hook"), [("daphne", "known"), ("uvicorn", "aknown")])
def test_a_user_model_with_relations_works_in_sync_and_async_hooks(
    w: World, servers: Servers, kind: str, hook: str, tmp_path: Path
) -> None:
    """A host of its own, with a database of its own."""
    url = f"sqlite:///{tmp_path}/tenants.sqlite3"
    overrides = tenants(hook)
    environment = {
        **os.environ,
        "DATABASE_URL": url,
        "DJANGO_SETTINGS_MODULE": "tests.live.settings",
        "LIVE_SETTINGS": json.dumps(overrides),
    }
    code = "import django\ndjango.setup()\n" + TENANTS
    printed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=django_settings.BASE_DIR,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert printed.returncode == 0, printed.stderr
    sessions = json.loads(printed.stdout)
    server = servers.start(kind, url, overrides=overrides)
    token = "a" * 32
    body = {**w.input["run_input"], "forwardedProps": {"n": 3, "delay": 0}}
    for name, status in (("ada", 200), ("bob", 404)):
        cookies = {"Cookie": f"sessionid={sessions[name]}; csrftoken={token}"}
        for headers in ({**cookies, "X-CSRFToken": token}, {"X-Person": name}):
            posted = Reader("POST", server.url("/agui/agents/tokens/"), json=body, headers=headers)
            posted.done()
            assert posted.status == 200, bytes(posted.raw)
            assert posted.last["type"] == "RUN_FINISHED"
            seen = httpx.get(server.url(f"/agui/threads/{posted.thread}/snapshot"), headers=headers)
            assert seen.status_code == status
        with open_socket(server, {"Cookie": cookies["Cookie"]}, "tokens") as socket:
            socket.send(json.dumps({**body, "runId": "by socket"}))
            assert json.loads(drained(socket)[-1])["type"] == "RUN_FINISHED"
            assert socket.close_code == 1000
    said_ = server.said()
    assert "SynchronousOnlyOperation" not in said_
    assert "Traceback" not in said_


TABLES = (Run, RunEvent, Thread, Command)


def table_bytes() -> int:
    """What the app's tables take, with their indexes; on SQLite the whole database."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
            return int(cursor.fetchone()[0])
        names = [model._meta.db_table for model in TABLES]
        cursor.execute(
            "SELECT sum(pg_total_relation_size(t::regclass)) FROM unnest(%s::text[]) t", [names]
        )
        return int(cursor.fetchone()[0])


@case("DBA-13")
def test_a_long_answer_is_written_once(w: World, own_server: Server, user: User) -> None:
    """What is kept of it, and on SQLite all that the process wrote, with the journal twice."""
    ada = Client(own_server, user)
    ada.run("echo", "warm").done()
    process = psutil.Process(own_server.process.pid)
    before, wrote = table_bytes(), written(process)
    reader = ada.play(*script_of(w)).done()
    run = ended(reader.run)
    kept, wrote = table_bytes() - before, written(process) - wrote
    figures = f"{kept / run.bytes:.2f} kept, {wrote / run.bytes:.2f} written, of {run.bytes} bytes"
    print(f"{connection.vendor}: {figures}")  # noqa: T201
    assert run.last_seq == 5004
    assert run.bytes > 500_000
    assert kept <= 3 * run.bytes
    # A busy machine makes more and smaller commits, each of which writes whole pages.
    assert wrote <= 8 * run.bytes


def written(process: psutil.Process) -> int:
    """What the process has written to files so far."""
    fields = Path(f"/proc/{process.pid}/io").read_text().split()
    return int(fields[fields.index("wchar:") + 1])
