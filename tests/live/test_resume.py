"""Every cursor, on every way out, from any process: what came before it and what comes after it
are the whole, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from django.contrib.auth.models import User
from django.db import connection, connections

from aguiapp import protocol
from project.management.commands import demo
from tests import services
from tests.live import crowd
from tests.live.recordings import SCRIPTS
from tests.live.servers import KINDS, Person, Servers, delta, new_id, said, stored
from tests.scripts import elsewhere
from tests.services import LONG

OTHER = {"daphne": "uvicorn", "uvicorn": "daphne"}


class Recorded(NamedTuple):
    """A run on its thread; `offset` is the position before its first event, `over` its end."""

    thread: str
    run: str
    epoch: str
    offset: int
    over: bool = False

    def cursor(self, seq: int) -> str:
        return f"{self.epoch}-{self.offset + seq}"

    def path(self, route: str, **parameters: Any) -> str:
        query = httpx.QueryParams({"run": self.run, **parameters})
        return f"/agui/threads/{self.thread}/{route}?{query}"


# -- ways out ----------------------------------------------------------------------

Attached = Callable[[], None]
Way = Callable[[Person, Recorded, str, Attached], Awaitable[bytes]]


async def whole(line: crowd.Line, attached: Attached = lambda: None) -> bytes:
    """The body of a stream that ends in order; nothing when nothing is left."""
    await line.opened.wait()
    attached()
    await line.done()
    assert line.end == "clean"
    if line.status == 204:
        return b""
    assert line.status == 200
    return bytes(line.body)


async def by_stream(person: Person, recorded: Recorded, cursor: str, attached: Attached) -> bytes:
    line = crowd.Line(person, recorded.path("stream"), {"Last-Event-ID": cursor})
    return without_comments(await whole(line, attached))


def without_comments(body: bytes) -> bytes:
    blocks = [block for block in body.split(b"\n\n") if not block.startswith(b":")]
    return b"\n\n".join(blocks)


async def by_binary(person: Person, recorded: Recorded, cursor: str, attached: Attached) -> bytes:
    path = recorded.path("stream", after=cursor)
    line = crowd.Line(person, path, {"Accept": protocol.PROTO})
    body = await whole(line, attached)
    assert line.status == 204 or line.headers["content-type"] == protocol.PROTO
    return body


async def poll(
    accept: str, person: Person, recorded: Recorded, cursor: str, attached: Attached
) -> bytes:
    """Seven events at a time, each as the page has it, one per line."""
    found: list[bytes] = []
    texts: list[bytes] = []
    wait = 0
    while not ends(texts):
        path = recorded.path("events", after=cursor, limit=7, wait=wait)
        line = await crowd.Line(person, path, {"Accept": accept}).done()
        attached()
        if (line.status, line.end) == (204, "clean"):
            break  # nothing is left of the run
        assert (line.status, line.end) == (200, "clean"), line.body
        cursor = line.headers["agui-next"]
        texts = page(accept, bytes(line.body), cursor)
        found += texts
        if recorded.over and not texts:
            break
        wait = 5 - wait
        await asyncio.sleep(0 if recorded.over else 0.2)  # as a client that polls does
    return b"".join(text + b"\n" for text in found)


def ends(texts: list[bytes]) -> bool:
    """Whether the run's terminal is the last of them."""
    return bool(texts) and json.loads(texts[-1])["type"] in protocol.TERMINAL


def page(accept: str, body: bytes, cursor: str) -> list[bytes]:
    """The events of one page as they stand in it."""
    if accept != "application/json":
        return body.split(b"\n")[:-1]
    head, tail = b'{"events":[', f'],"next":"{cursor}"}}'.encode()
    assert body.startswith(head)
    assert body.endswith(tail)
    events = json.loads(body)["events"]
    texts = [json.dumps(e, ensure_ascii=False, separators=(",", ":")) for e in events]
    texts = [t.replace("\u2028", "\\u2028").replace("\x85", "\\u0085") for t in texts]
    inside = body[len(head) : -len(tail)]
    assert inside == ",".join(texts).encode()
    return [text.encode() for text in texts]


WAYS: dict[str, Way] = {
    "stream": by_stream,
    "binary": by_binary,
    "ndjson": functools.partial(poll, "application/x-ndjson"),
    "json": functools.partial(poll, "application/json"),
}
#: A page is a page: while the run goes on, and elsewhere, one form of it is asked for.
DURING = WAYS if LONG else {way: WAYS[way] for way in ("stream", "binary", "ndjson")}


# -- places ------------------------------------------------------------------------


def places(here: str, servers: Servers, database_url: str, user: User) -> list[Person]:
    """Where the run is, then where else it is read: with Redis, and with no layer at all."""
    redis = services.redis_url() if here == "uvicorn" else None
    options: dict[str, Any] = {"overrides": {"CHANNEL_LAYERS": {}}}
    if redis:
        options = {"environment": {"REDIS_URL": redis}}
    kinds = [here, OTHER[here]] if connection.vendor == "postgresql" else [here]
    name = "redis" if redis else "none"
    return [Person(servers.shared(kind, database_url, name, **options), user) for kind in kinds]


# -- every cursor ------------------------------------------------------------------


class Tails:
    """Readers of one run from many cursors, everywhere and in every way."""

    def __init__(self, places: list[Person], recorded: Recorded) -> None:
        self._places = places
        self._recorded = recorded
        self._room = asyncio.Semaphore(24)
        self.asked: dict[tuple[int, str, int], asyncio.Task[bytes]] = {}
        self.waiting = 0

    def ask(self, seq: int) -> None:
        """Start to read behind that event; of a run that is over, a few at a time."""
        for (place, person), way in itertools.product(enumerate(self._places), WAYS):
            if way not in DURING and (place or not self._recorded.over):
                continue
            self.waiting += 1
            reading = self._read(person, way, seq)
            self.asked[place, way, seq] = asyncio.create_task(reading)

    async def _read(self, person: Person, way: str, seq: int) -> bytes:
        once = iter([None])

        def attached() -> None:
            self.waiting -= len(list(once))

        reading = WAYS[way](person, self._recorded, self._recorded.cursor(seq), attached)
        if not self._recorded.over:
            return await reading
        async with self._room:
            return await reading

    async def attached(self) -> None:
        """Wait until everybody has had a first answer."""
        await crowd.until(lambda: not self.waiting, "readers are attached")

    async def check(self, wholes: dict[str, list[bytes]]) -> None:
        """Each got what is behind its cursor, and nothing else."""
        for (place, way, seq), task in self.asked.items():
            assert await task == b"".join(wholes[way][seq:]), (place, way, seq)


async def record(places: list[Person], script: list[Any], gate: Path) -> tuple[Tails, Recorded]:
    """Let a run out event by event, with readers of every cursor; they are asked as it goes on."""
    here = places[0]
    thread = gate.name
    before = await crowd.Line(
        here, "/agui/agents/echo/", given=demo.run_input(thread, "before", {})
    ).done()
    given = demo.run_input(thread, "go", {"script": script, "gate": str(gate)})
    run = crowd.Line(here, "/agui/agents/gated/", given=given)
    epoch, _, offset = crowd.last_id(before.body).rpartition("-")
    await crowd.until(lambda: run.position)
    recorded = Recorded(run.headers["agui-thread"], run.headers["agui-run"], epoch, int(offset))
    tails = Tails(places, recorded)
    tails.ask(0)
    events = sum("type" in item for item in script)
    for seq in range(1, events + 2):
        await crowd.until(lambda: run.position >= recorded.offset + seq, f"event {seq}")  # noqa: B023
        await tails.attached()  # those of the cursor before; the next event meets these here
        tails.ask(seq)
        if seq <= events:
            let_pass(gate)
    await tails.attached()
    assert run.end == "", "they are all there before the end"
    let_pass(gate)
    await run.done()
    assert run.position - recorded.offset >= events + 2
    return tails, recorded


def let_pass(gate: Path) -> None:
    with gate.open("ab") as file:
        file.write(b".")


#: Each kind of run on each server, or in turns.
RUNS = [
    (name, here)
    for number, name in enumerate(SCRIPTS)
    for here in (KINDS if LONG else [KINDS[number % 2]])
]


@pytest.mark.parametrize(("name", "here"), RUNS)
def test_from_every_cursor_head_and_tail_are_the_whole(
    servers: Servers, database_url: str, user: User, tmp_path: Path, name: str, here: str
) -> None:
    persons = places(here, servers, database_url, user)
    gate = tmp_path / f"gate-{name}"
    gate.touch()

    async def everything() -> None:
        tails, recorded = await record(persons, SCRIPTS[name], gate)
        rows = await elsewhere(lambda: rows_of(recorded.run))
        wholes = wholes_of(recorded, rows)
        await tails.check(wholes)
        later = Tails(persons, recorded._replace(over=True))
        for seq in range(len(rows) + 1):
            later.ask(seq)
        await later.check(wholes)
        print(f"{name}, {here}: {len(rows)} events, {len(tails.asked)}+{len(later.asked)} readers")  # noqa: T201

    asyncio.run(everything())


def rows_of(run: str) -> list[str]:
    """What is stored, read in a thread that keeps no connection."""
    try:
        return stored(run)
    finally:
        connections.close_all()


def wholes_of(recorded: Recorded, rows: list[str]) -> dict[str, list[bytes]]:
    """What each event is on each way out."""
    lines = [row.encode() + b"\n" for row in rows]
    return {
        "stream": [
            f"id: {recorded.cursor(seq)}\ndata: {row}\n\n".encode()
            for seq, row in enumerate(rows, 1)
        ],
        "binary": [protocol.encode_proto_frame(json.loads(row)) for row in rows],
        "ndjson": lines,
        "json": lines,
    }


# -- cursors that name nothing here ------------------------------------------------

#: Each takes (route, header or parameter).
ROUTES: dict[str, tuple[str, dict[str, str]]] = {
    "stream": ("stream", {}),
    "binary": ("stream", {"Accept": protocol.PROTO}),
    "ndjson": ("events", {}),
    "json": ("events", {"Accept": "application/json"}),
    "snapshot": ("snapshot", {}),
}


class Asker(NamedTuple):
    """Somebody who asks for threads with cursors."""

    client: httpx.Client

    def ask(
        self, thread: str, way: str, cursor: str, *, headed: bool = False, **more: str
    ) -> tuple[int, str]:
        """Status and code of the answer, which must come at once and be whole."""
        route, headers = ROUTES[way]
        if headed:
            headers = {**headers, "Last-Event-ID": cursor}
        else:
            more["at" if way == "snapshot" else "after"] = cursor
        answer = self.client.get(f"/agui/threads/{thread}/{route}", params=more, headers=headers)
        return answer.status_code, answer.json()["error"]["code"]


@contextlib.contextmanager
def asker(person: Person, headers: dict[str, str] | None = None) -> Iterator[Asker]:
    headers = person.headers if headers is None else headers
    with httpx.Client(base_url=person.server.url(""), headers=headers, timeout=5) as client:
        yield Asker(client)


FOREIGN, MALFORMED = (409, "cursor_foreign"), (400, "cursor_malformed")
#: `{epoch}` is the thread's own, `{other}` that of another thread of the same person.
CURSORS = [
    ("{other}-1", FOREIGN),
    ("{other}-3", FOREIGN),
    ("aaaaaa-2", FOREIGN),
    ("{epoch}-4", FOREIGN),
    ("{epoch}-1000000000", FOREIGN),
    ("{epoch}-999999999999999999", FOREIGN),
    ("{epoch}-9999999999999999999", MALFORMED),
    ("{epoch}", MALFORMED),
    ("{epoch}-", MALFORMED),
    ("-2", MALFORMED),
    ("{epoch}--2", FOREIGN),
    ("{epoch}-+2", MALFORMED),
    ("{epoch}-2.0", MALFORMED),
    ("{epoch}-0x2", MALFORMED),
    ("{epoch}-\u0662", MALFORMED),
    ("r1:50", MALFORMED),
    ("null", MALFORMED),
    ("';drop", MALFORMED),
    ("x" * 4000, MALFORMED),
]


@pytest.mark.parametrize("over", [True, False], ids=["over", "running"])
def test_a_cursor_that_names_nothing_here_is_answered_everywhere(ada: Person, over: bool) -> None:
    other = ada.run("echo", "hi").done()
    end = [] if over else [{"$hang": True}]
    mine = ada.play({"type": "CUSTOM", "name": "a", "value": 1}, *end)
    if over:
        mine.done()
    else:
        mine.events(2)
    known = {"epoch": mine.ids[0].partition("-")[0], "other": other.ids[0].partition("-")[0]}
    assert len(set(known.values())) == 2
    with asker(ada) as me:
        for (text, wanted), way in itertools.product(CURSORS, ROUTES):
            cursor = text.format(**known)
            assert me.ask(mine.thread, way, cursor) == wanted, (cursor, way)
            if way in ("stream", "binary") and cursor.isascii():
                assert me.ask(mine.thread, way, cursor, headed=True) == wanted, cursor
                found = me.ask(mine.thread, way, cursor, headed=True, run=mine.run)
                assert found == wanted, cursor
            elif way != "snapshot":
                found = me.ask(mine.thread, way, cursor, run=mine.run, wait="20")
                assert found == wanted, (cursor, way)
    if not over:
        ada.cancel(mine)
        mine.done()


def test_a_good_cursor_of_somebody_else_opens_nothing(ada: Person, other: User) -> None:
    mine = ada.run("echo", "hi").done()
    bob = Person(ada.server, other)
    theirs = bob.run("echo", "hi").done()
    with asker(bob) as him, asker(bob, {}) as nobody:
        for way, cursor in itertools.product(ROUTES, (mine.ids[0], "aaaaaa-1", "r1:50")):
            missing = him.ask(new_id(), way, cursor)
            assert him.ask(mine.thread, way, cursor) == missing == (404, "not_found")
            assert him.ask(mine.thread, way, cursor, run=mine.run) == missing
            assert nobody.ask(mine.thread, way, cursor) == (401, "unauthenticated")
        for way in ROUTES:
            assert him.ask(theirs.thread, way, mine.ids[0]) == FOREIGN
            if way != "snapshot":
                found = him.ask(theirs.thread, way, theirs.ids[0], run=mine.run)
                assert found == (404, "not_found")


# -- readers who come in the middle of a flood -------------------------------------

VIEWERS = 50
FLOOD = 2000


TURNS = list(itertools.product(KINDS, range(20))) if LONG else list(zip(KINDS, (0, 1), strict=True))


class Viewer(NamedTuple):
    """Somebody who came when `came` events were there, and reads behind `after`."""

    came: int
    after: int
    line: crowd.Line


async def crowded(persons: list[Person], script: list[Any], count: int, pause: float) -> Any:
    """One run, viewers who come at random moments of it, and one who reads slowly from its start."""
    post = crowd.Line(
        persons[0], "/agui/agents/scripted/", given=demo.run_input(new_id(), "", {"script": script})
    )
    await post.opened.wait()
    path = f"/agui/threads/{post.headers['agui-thread']}/stream?run={post.headers['agui-run']}"

    async def viewer(number: int) -> Viewer:
        moment = random.randint(1, count)
        await crowd.until(lambda: post.position >= moment)
        came = post.position
        after = random.choice([0, random.randint(1, came)])
        cursor = {"Last-Event-ID": f"{epoch}-{after}"} if after else {}
        line = crowd.Line(persons[number % len(persons)], path, cursor)
        await line.done(60)
        return Viewer(came, after, line)

    await crowd.until(lambda: post.position)
    epoch = crowd.last_id(post.body).partition("-")[0]
    slow = crowd.Line(persons[-1], path, pause=pause, piece=4096)
    viewers = await asyncio.gather(*(viewer(number) for number in range(VIEWERS)))
    await post.done(60)
    await slow.done(60)
    return post, [*viewers, Viewer(1, 0, slow)]


@pytest.mark.parametrize(("here", "turn"), TURNS)
def test_viewers_who_come_in_the_middle_of_a_flood_miss_nothing(
    servers: Servers, database_url: str, user: User, here: str, turn: int
) -> None:
    """In every other turn the slow one gets more than kernel and memory keep for it."""
    persons = places(here, servers, database_url, user)
    script = said({"$repeat": FLOOD, "event": delta("$i," + "x" * 3000 * (turn % 2))})
    post, viewers = asyncio.run(crowded(persons, script, FLOOD, 0.001))
    rows = stored(post.headers["agui-run"])
    assert len(rows) == FLOOD + 4
    epoch = crowd.last_id(post.body).partition("-")[0]
    expected = [f"id: {epoch}-{seq}\ndata: {row}\n\n".encode() for seq, row in enumerate(rows, 1)]
    assert crowd.frames(post.body) == expected
    for viewer in viewers:
        assert (viewer.line.status, viewer.line.end) == (200, "clean")
        assert crowd.frames(viewer.line.body) == expected[viewer.after :], viewer[:2]
    during = sum(viewer.came < len(rows) for viewer in viewers)
    slowest = viewers[-1].line.times
    print(  # noqa: T201
        f"{here}, turn {turn}: {during} of {len(viewers)} came during the run;"
        f" the slow one read for {slowest[-1] - slowest[0]:.1f} s"
    )
    assert during > 5
