"""The channel layer only wakes readers: whatever it loses, refuses or forgets costs no event."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

import psutil
import pytest
from django.contrib.auth.models import User

from aguiapp import feed
from aguiapp.feed import hints
from aguiapp.models import Run
from tests.bugs.crowd import (
    MIB,
    all_of,
    attaching,
    client_of,
    dice,
    given,
    nothing_left,
    open_socket,
    positions,
    rounds,
    rss,
    said,
    script_of,
    send_and_abort,
    viewer,
)
from tests.bugs.world import World, case, sibling
from tests.live.servers import (
    Person as Client,
    Servers,
    delta,
    ended,
    gapless,
    new_id,
    said as around,
    stored as rows_of,
    trickle,
    until,
)
from tests.live.test_sockets import drained, run_of
from tests.scripts import run_input, stored, text
from tests.services import LONG


@pytest.fixture
def pair(servers: Servers, database_url: str, user: User, redis_url: str) -> tuple[Client, Client]:
    """A person at two processes that share a layer in Redis."""
    shared = {"environment": {"REDIS_URL": redis_url}}
    here = Client(servers.shared("daphne", database_url, "redis", **shared), user)
    return here, here.at(servers.shared("uvicorn", database_url, "redis", **shared))


@case("CHL-01")
@pytest.mark.parametrize("layer", ["memory", "redis"])
def test_a_busy_viewer_gets_what_was_sent_while_it_was_busy(
    w: World, servers: Servers, database_url: str, user: User, redis_url: str, layer: str
) -> None:
    environment = {"REDIS_URL": redis_url} if layer == "redis" else {}
    name = "redis" if layer == "redis" else ""
    options: dict[str, Any] = {"environment": environment} if environment else {}
    here = Client(servers.shared("daphne", database_url, name, **options), user)
    there = here.at(servers.shared("uvicorn", database_url, name, **options))
    body = given("busy", [{"$sleep": 0.5}, *script_of(w)], "r1")
    reader = here.post("scripted", body).events(1)
    with open_socket(there.server, there.headers) as socket:
        socket.send(json.dumps(body))
        assert json.loads(socket.recv(timeout=20))["type"] == "RUN_STARTED"
        reader.done()
        time.sleep(w.input["ws_viewer_busy_s"] / 2)  # it does not read meanwhile
        frames = drained(socket)
        assert socket.close_code == 1000
    rows = rows_of(reader.run)
    assert len(rows) == 1004
    assert frames == rows[1:]
    assert reader.logged == rows


@case("CHL-02")
def test_flapping_viewers_cost_steady_ones_nothing(w: World, pair: tuple[Client, Client]) -> None:
    here, there = pair
    count = rounds(1500, w.input["events"])
    pulse = {
        "$repeat": count // 50,
        "events": [{"$repeat": 50, "event": delta()}, {"$sleep": 0.04}],
    }
    reader = here.play(*around(pulse)).events(3)
    raw = attaching(there.server, there, reader.thread, f"?run={reader.run}")
    chance = dice(w)

    async def everybody() -> list[Any]:
        url = there.server.url(f"/agui/threads/{reader.thread}/stream?run={reader.run}")

        async def flap() -> None:
            while not reader.end:
                await send_and_abort(there.server, raw, chance.uniform(0, 0.05))

        async with client_of(there) as client:
            steady = [viewer(client, url) for _ in range(w.input["viewers"])]
            flapping = [flap() for _ in range(w.input["flappers"])]
            return (await asyncio.gather(*steady, *flapping))[: len(steady)]

    with nothing_left(there.server):
        found = asyncio.run(everybody())
    reader.done()
    rows = rows_of(reader.run)
    assert len(rows) == count // 50 * 50 + 4
    for seqs, payloads in found:
        assert seqs == list(range(1, len(rows) + 1))
        assert payloads == rows
    assert "Traceback" not in there.server.said()


@case("CHL-03")
def test_a_viewer_who_never_reads_is_let_go_without_a_flood(
    w: World, servers: Servers, database_url: str, user: User, redis_url: str
) -> None:
    server = servers.shared(
        "uvicorn",
        database_url,
        "redis impatient",
        environment={"REDIS_URL": redis_url},
        overrides={"AGUIAPP": {"STALL_SECONDS": 1}},
    )
    ada = Client(server, user)
    ada.run("echo", "warm").done()
    said_before = len(server.said().splitlines())
    piece = {"type": "CUSTOM", "name": "blob", "value": {"$blob_kb": 4}}
    script = [{"$sleep": 0.3}, {"$repeat": w.input["events"], "event": piece}]
    reader = ada.play(*script).events(1)
    import socket

    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect(server.address)
    stuck.sendall(attaching(server, ada, reader.thread, f"?run={reader.run}"))
    mine = stuck.getsockname()[1]
    process = psutil.Process(server.process.pid)

    def held() -> bool:
        return any(c.raddr[1:] == (mine,) for c in process.net_connections())

    until(held)
    reader.done(40)
    until(lambda: not held(), 10, "the stuck viewer is let go")
    stuck.close()
    gapless(reader)
    assert len(reader.logged) == w.input["events"] + 2
    lines = server.said().splitlines()[said_before:]
    assert len(lines) < 12, lines


class Layer:
    """A channel layer that several processes might share; `trouble` is what happens to a hint."""

    def __init__(self, trouble: Any = None) -> None:
        self.trouble = trouble
        self.sent: list[dict[str, Any]] = []
        self.sending = 0
        self.most = 0

    async def new_channel(self, prefix: str = "") -> str:
        return "channel"

    async def group_add(self, group: str, channel: str) -> None:
        await self._trouble()

    async def group_discard(self, group: str, channel: str) -> None:
        await self._trouble()

    async def group_send(self, group: str, message: dict[str, Any]) -> None:
        self.sending += 1
        self.most = max(self.most, self.sending)
        try:
            await self._trouble()
            self.sent.append(message)
        finally:
            self.sending -= 1

    async def _trouble(self) -> None:
        if isinstance(self.trouble, Exception):
            raise self.trouble
        if self.trouble is not None:
            await asyncio.sleep(self.trouble)

    async def receive(self, channel: str) -> dict[str, Any]:
        if isinstance(self.trouble, Exception):
            raise self.trouble
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@sibling("CHL-03")
async def test_wake_ups_of_a_slow_layer_are_put_together(w: World) -> None:
    layer = Layer(0.05)
    w.monkeypatch.setattr(hints, "_shared_layer", lambda: layer)
    deltas = [f"{number} " for number in range(500)]
    script = [item for event in text("m", *deltas) for item in (event, {"$sleep": 0})]
    reply = await w.run(run_input(script=script))
    assert len(reply.logged) == 504
    assert layer.most == 1
    assert len(layer.sent) < 50


@case("CHL-04")
async def test_any_id_of_a_thread_works_or_is_refused_by_one_rule(w: World) -> None:
    """1 to 255 characters, none of them a control character."""
    layer = Layer()
    w.monkeypatch.setattr(hints, "_shared_layer", lambda: layer)
    groups = set()
    for body in w.input["run_inputs"]:
        name = body["threadId"]
        reply = await w.ada.run({**body, "forwardedProps": {"script": text("m", "x")}})
        if len(name) > 255:
            assert (reply.status, reply.code) == (422, "invalid_input")
            continue
        assert (reply.status, reply.types[-1]) == (200, "RUN_FINISHED"), name
        assert reply.events[0]["threadId"] == name
        thread = await Run.objects.values_list("thread_id", flat=True).aget(
            key=reply.headers["AGUI-Run"]
        )
        groups.add(feed.group(thread))
        assert all(part not in feed.group(thread) for part in (name, "tenant"))
        key = reply.headers["AGUI-Thread"]
        assert (await w.ada.ask(f"/agui/threads/{key}/snapshot")).json["threadId"] == name
        client = w.ada.client
        listed = await client.get("/agui/threads/", {"thread_id": name}, headers=w.ada.headers)
        assert [t["key"] for t in listed.json()["threads"]] == [key]
    assert len(groups) == 6
    for group in groups:
        assert len(group) < 100
        assert group.replace(".", "").isalnum()
        assert group.isascii()


@sibling("CHL-04")
def test_odd_ids_work_across_processes(w: World, pair: tuple[Client, Client]) -> None:
    here, there = pair
    for body in w.input["run_inputs"]:
        if len(body["threadId"]) > 255:
            continue
        script = [{"$sleep": 0.2}, *said("x")]
        posted = {**body, "forwardedProps": {"script": script}}
        reader = here.post("scripted", posted).events(1)
        with open_socket(there.server, there.headers) as socket:
            socket.send(json.dumps(posted))
            frames = drained(socket)
            assert socket.close_code == 1000
        reader.done()
        assert frames == reader.logged == rows_of(reader.run)


@case("CHL-05")
def test_a_group_that_expired_costs_a_poll_at_most(
    w: World, servers: Servers, database_url: str, user: User, redis_url: str
) -> None:
    backend = "channels_redis.core.RedisChannelLayer"
    layer = {"BACKEND": backend, "CONFIG": {"hosts": [redis_url], "group_expiry": 1}}
    overrides = {"CHANNEL_LAYERS": {"default": layer}}
    there = Client(servers.start("uvicorn", database_url, overrides=overrides), user)
    here = there.at(
        servers.shared("daphne", database_url, "redis", environment={"REDIS_URL": redis_url})
    )
    quiet = here.run("echo", "one", "expired").done()
    watcher = there.watch(quiet.thread, quiet.ids[-1]).wait(lambda r: r.comments)
    time.sleep(rounds(2, 8))  # the membership runs out
    said_ = here.run("echo", "two", "expired").done()
    over = time.monotonic()
    watcher.wait(lambda r: said_.ids[-1] in r.ids, 5)
    assert time.monotonic() - over < 2.5
    assert watcher.logged == said_.logged
    watcher.drop()


@case("CHL-06")
def test_a_socket_that_its_server_times_out_is_read_on_by_cursor(
    w: World, servers: Servers, database_url: str, user: User
) -> None:
    """The plain socket counts: its frames so far are the cursor behind the run's offset."""
    seconds = str(rounds(1, int(w.input["daphne_args"][1])))
    arguments = ("--websocket_timeout", seconds)
    server = servers.start("daphne", database_url, arguments=arguments)
    ada = Client(server, user)
    pulses = script_of(w)
    pulses[1] = {**pulses[1], "events": [pulses[1]["events"][0], {"$sleep": 0.15}]}
    script = w.input["agent_events"][1:-1] if LONG else pulses
    with open_socket(server, ada.headers) as socket:
        socket.send(json.dumps(given("timed out", script, "r1")))
        frames = drained(socket)
    run = run_of("timed out")
    assert not run.ended, "the socket was to end before the run"
    assert 1 < len(frames) < 24
    epoch = str(ada.snapshot(str(run.thread.key))["cursor"]).rpartition("-")[0]
    resumed = ada.watch(str(run.thread.key), f"{epoch}-{len(frames)}", run=str(run.key)).done(40)
    rows = rows_of(str(run.key))
    assert frames + resumed.logged == rows
    assert positions(resumed.ids)[0] == len(frames) + 1
    assert ended(str(run.key)).status == "success"


def members(redis_url: str, threads: list[int]) -> int:
    """How many channels are in the groups of these threads."""
    import redis

    with redis.Redis.from_url(redis_url) as client:
        return sum(int(client.zcard(f"asgi:group:{feed.group(thread)}")) for thread in threads)


@case("CHL-07")
def test_coming_and_going_leaves_nothing_in_the_layer_or_in_memory(
    w: World, pair: tuple[Client, Client], redis_url: str
) -> None:
    here, there = pair
    chance, server = dice(w), there.server
    readers = [here.run("echo", "quiet", new_id()).done() for _ in range(5)]
    talk = around(trickle(10_000_000, 0.01))
    flowing = here.play(*talk).events(3)
    threads = [reader.thread for reader in (*readers, flowing)]
    ids = list(Run.objects.values_list("thread_id", flat=True))

    def cycles(count: int) -> None:
        raws = [attaching(server, there, thread) for thread in threads]
        jobs = [
            partial(send_and_abort, server, chance.choice(raws), chance.uniform(0, 0.02))
            for _ in range(count)
        ]
        asyncio.run(all_of(jobs, 20))

    cycles(rounds(100, 1000))
    # The one who started the run that goes on is a member of its group.
    until(lambda: members(redis_url, ids) <= 1, 20, "no member of a group is left")
    with nothing_left(server, 30):
        before = rss(server)
        cycles(rounds(200, w.input["loop"]))
    # The one who started the run that goes on is a member of its group.
    until(lambda: members(redis_url, ids) <= 1, 20, "no member of a group is left")
    growth = (rss(server) - before) / MIB
    print(f"attach and abort: {growth:+.1f} MiB, {server.inside()['tasks']}")  # noqa: T201
    assert growth < 12
    here.cancel(flowing)
    flowing.done()
    log = server.said()
    assert "Traceback" not in log


@case("CHL-09")
async def test_a_hint_carries_no_event_and_comes_behind_the_commit(w: World) -> None:
    class Looking(Layer):
        """Looks at the table when a hint is sent."""

        async def group_send(self, group: str, message: dict[str, Any]) -> None:
            self.seen.append(len(await stored()))
            await super().group_send(group, message)

        seen: list[int] = []

    layer = Looking()
    w.monkeypatch.setattr(hints, "_shared_layer", lambda: layer)
    reply = await w.run()
    assert max(map(len, reply.logged)) > 20_000
    assert layer.sent
    assert all(len(json.dumps(message)) < 200 for message in layer.sent)
    assert sorted(layer.seen) == layer.seen
    assert layer.seen[-1] == len(reply.logged)


TROUBLES: dict[str, Any] = {
    "refuses": ConnectionError("the layer is away"),
    "breaks": RuntimeError("whatever a layer raises"),
    "hangs": 3600,
}


@sibling("CHL-09")
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_trouble_of_the_layer_never_reaches_a_run(
    w: World, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer = Layer(TROUBLES[trouble])
    w.monkeypatch.setattr(hints, "_shared_layer", lambda: layer)
    began = time.monotonic()
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    assert time.monotonic() - began < 5
    assert (await Run.objects.aget()).findings == []
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.fixture
def layerless(servers: Servers, database_url: str, user: User) -> tuple[Client, Client]:
    """Two processes whose Redis is not there."""
    gone = {"environment": {"REDIS_URL": "redis://127.0.0.1:1/0"}}
    launched = [servers.launch(kind, database_url, **gone) for kind in ("daphne", "uvicorn")]
    here, there = (Client(server.ready(), user) for server in launched)
    return here, there


@sibling("CHL-09")
def test_without_its_redis_everything_works_by_polling(
    w: World, layerless: tuple[Client, Client]
) -> None:
    here, there = layerless
    reader = here.play(*script_of(w), {"$sleep": 1.0}, *said(*"abcdef", name="m2"))
    watcher = there.watch(reader.opened().thread, run=reader.run)
    reader.done()
    watcher.done()
    assert watcher.logged == reader.logged == rows_of(reader.run)
    assert there.cancel(reader).json()["status"] == "success"
    second = here.play({"$hang": True}).events(1)
    assert there.cancel(second).json()["status"] == "cancelled"
    assert second.done().end == "clean"
    for server in (here.server, there.server):
        assert "Traceback" not in server.said()
        assert len(server.said().splitlines()) < 60
