"""Public bug reports as cases: what went wrong elsewhere must go right here.

`data/bugs.jsonl` holds the reports. Where a report's wish and a decision of this project clash,
the decision is tested.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ag_ui.core import RunFinishedEvent, RunStartedEvent, StateSnapshotEvent
from asgiref.testing import ApplicationCommunicator
from django.contrib.auth.models import User
from django.urls import reverse

from aguiapp import access, conf, errors, store
from aguiapp.feed import hints
from aguiapp.models import Command, InputMessage, Participant, Run, RunEvent, Thread
from project import asgi, scripted
from tests import scripts
from tests.scripts import Person, Reply, legal, only_run, run_input, said

KINDS = ("terminal-discipline", "text-and-numbers", "input-contract", "authz-and-leaks")
DATA = Path(__file__).with_name("data")


def load() -> dict[str, dict[str, Any]]:
    """The cases by id; lone surrogates in them are meant."""
    lines = (DATA / "bugs.jsonl").read_text(encoding="ascii").splitlines()
    cases = [json.loads(line) for line in lines]
    return {case["id"]: case for case in cases if case["kind"] in KINDS}


CASES = load()


@dataclass
class World:
    """What a case may use."""

    case: dict[str, Any]
    ada: Person
    bob: Person
    settings: Any
    monkeypatch: pytest.MonkeyPatch

    @property
    def input(self) -> Any:
        return self.case["input"]

    def play(self, **more: Any) -> dict[str, Any]:
        """The input that plays the case's events."""
        return run_input(script=self.input["agent_events"], **more)

    async def run(self, body: Any = None, agent: str = "scripted") -> Reply:
        """The case's run as ada reads it; what is streamed must be legal and be what is stored."""
        reply = await self.ada.run(self.play() if body is None else body, agent)
        assert reply.status == 200, reply.raw
        legal(reply.events)
        run = await only_run(key=reply.headers["AGUI-Run"])
        assert reply.logged == await scripts.stored(run_id=run.pk)
        return reply

    async def snapshot(self, reply: Reply, query: str = "") -> Any:
        """The thread as the API folds it."""
        path = f"/agui/threads/{reply.headers['AGUI-Thread']}/snapshot{query}"
        found = await self.ada.ask(path)
        assert found.status == 200, found.raw
        return found.json

    async def replay(self, reply: Reply) -> list[str]:
        """The thread's events by polling."""
        path = f"/agui/threads/{reply.headers['AGUI-Thread']}/events"
        found = await self.ada.ask(path, accept="application/x-ndjson")
        assert found.status == 200
        return found.raw.decode().splitlines()


Case = Callable[[World], Awaitable[None]]
TESTS: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Take a function for the test of that case."""

    def keep(function: Case) -> Case:
        TESTS[name] = function
        return function

    return keep


@pytest.fixture(autouse=True)
def scripted_agent() -> Iterator[None]:
    """The agent that plays what a request says."""
    with scripts.registered("scripted", scripted.play):
        yield


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", sorted(CASES))
async def test_case(
    name: str, user: User, other: User, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in TESTS, f"{name} has no test"
    world = World(CASES[name], Person(user), Person(other), settings, monkeypatch)
    await TESTS[name](world)


def test_every_case_is_one_of_the_list() -> None:
    assert set(TESTS) == set(CASES)
    assert len(CASES) == 31


async def nothing_stored() -> None:
    """No request of this test left a row."""
    for table in (Thread, Run, RunEvent, InputMessage, Command):
        assert not await table._default_manager.aexists(), table


# -- terminal-discipline ---------------------------------------------------------


@case("TRM-03")
async def _(w: World) -> None:
    reply = await w.run()
    assert reply.types[-3:] == ["TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "incomplete"
    run = await only_run()
    assert (run.status, run.error_code) == ("error", "incomplete")
    assert (await w.snapshot(reply))["messages"][-1]["content"] == "Transferring 50,0"


@case("TRM-04")
async def _(w: World) -> None:
    reply = await w.run()
    assert not reply.aborted
    assert reply.types[-3:] == ["TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "agent_failed"
    assert b"upstream 500" not in reply.raw
    assert (await only_run()).status == "error"


@case("TRM-05")
async def _(w: World) -> None:
    for number, name in enumerate([*w.input["raise_each"], "KeyboardInterrupt"]):
        script = [{**e, "$raise": name} if "$raise" in e else e for e in w.input["agent_events"]]
        script[0] = {**script[0], "threadId": f"t{number}"}
        reply = await w.run(run_input(f"t{number}", script=script))
        assert not reply.aborted, name
        assert reply.types[-2:] == ["TEXT_MESSAGE_END", "RUN_ERROR"], name
        assert reply.events[-1]["code"] == "agent_failed", name
        assert "boom" not in reply.raw.decode(), name
        assert (await only_run(key=reply.headers["AGUI-Run"])).status == "error", name
    again = await w.run(run_input("after", script=scripts.text("m", "alive")))
    assert again.types[-1] == "RUN_FINISHED"


@case("TRM-06")
async def _(w: World) -> None:
    reply = await w.run()
    assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "MODEL_DISABLED"
    assert reply.events[-1]["message"] == "model disabled"
    run = await only_run()
    assert (run.status, run.error_code) == ("error", "MODEL_DISABLED")
    assert run.error_message == "model disabled"
    assert "RUN_FINISHED" not in "".join(await w.replay(reply))


@case("TRM-08")
async def _(w: World) -> None:
    reply = None
    for number, run in enumerate(w.input["runs"], 1):
        reply = await w.run(run_input(run=f"r{number}", script=run["agent_events"]))
    assert reply is not None
    whole = await w.replay(reply)
    events = [json.loads(line) for line in whole]
    expected = [e["type"] for run in w.input["runs"] for e in run["agent_events"]]
    assert [e["type"] for e in events] == expected
    assert len(events) == 12
    legal(events)
    snapshot = await w.snapshot(reply)
    assert [m["id"] for m in snapshot["messages"]] == ["m1", "m3"]
    stream = scripts.Stream(
        await w.ada.open(f"/agui/threads/{reply.headers['AGUI-Thread']}/stream")
    )
    raw = await stream.until(lambda raw: len(scripts.frames(raw)) >= 12)
    assert [frame.data for frame in scripts.frames(raw)] == whole


@case("TRM-09")
async def _(w: World) -> None:
    replies = [
        await w.run(run_input(run=f"r{number}", script=run["agent_events"]))
        for number, run in enumerate(w.input["runs"], 1)
    ]
    for number, (reply, n) in enumerate(zip(replies, (1, 2), strict=True), 1):
        run = await only_run(run_id=f"r{number}")
        assert f'"messageId":"m{number}"' in "".join(await scripts.stored(run_id=run.pk))
        end = (run.offset or 0) + run.last_seq
        snapshot = await w.snapshot(reply, f"?at={end}")
        assert snapshot["state"] == {"n": n}
        assert [m["id"] for m in snapshot["messages"]] == ["m1", "m2"][:number]


@case("TRM-10")
async def _(w: World) -> None:
    body = {**w.input["run_input"], "forwardedProps": {"script": w.input["agent_events"]}}
    stream = await w.ada.watch(body)
    await stream.until(lambda raw: b"TEXT_MESSAGE_CONTENT" in raw)
    headers = stream.response.headers
    path = f"/agui/threads/{headers['AGUI-Thread']}/runs/{headers['AGUI-Run']}/cancel"
    answers = [await w.ada.ask(path, {}) for _ in range(2)]
    assert [(a.status, a.json["status"]) for a in answers] == [(200, "cancelled")] * 2
    reply = await stream.rest()
    legal(reply.events)
    assert reply.types[-2:] == ["TEXT_MESSAGE_END", "RUN_FINISHED"]
    assert reply.events[-1]["outcome"] == {"type": "cancelled"}
    assert "RUN_ERROR" not in reply.types
    run = await only_run()
    assert (run.status, run.error_code) == ("cancelled", "")


# -- text-and-numbers ------------------------------------------------------------


@case("TXT-01")
async def _(w: World) -> None:
    """NUL and lone halves stay, as escapes; the same text on every database."""
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    deltas = [e["delta"] for e in scripts.of(reply.events, "TEXT_MESSAGE_CONTENT")]
    content = "before\0aftercut \ud83dok \U0001f600"
    assert "".join(deltas) == content
    assert all(line.isprintable() for line in reply.logged)
    assert "\\ud83d" in "".join(reply.logged)
    assert await w.replay(reply) == reply.logged
    snapshot = await w.snapshot(reply)
    assert [m["content"] for m in snapshot["messages"]] == [content, "tool\0out"]
    assert snapshot["state"] == {"k\0ey": "v\0"}


@case("TXT-02")
async def _(w: World) -> None:
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    deltas = [e["delta"] for e in reply.events if "delta" in e]
    assert deltas == ["path C:\\u0000dir", '{"s":"a\\u0000b"}']
    assert await w.replay(reply) == reply.logged
    called = (await w.snapshot(reply))["messages"][-1]["toolCalls"][0]
    assert called["function"]["arguments"] == '{"s":"a\\u0000b"}'


async def poison(reply: Reply, payload: str) -> int:
    """Put a text into the row of the run's third event; the number of the row."""
    rows = RunEvent.objects.filter(run__key=reply.headers["AGUI-Run"], seq=3)
    assert await rows.aupdate(payload=payload) == 1
    return 3


@case("TXT-03")
async def _(w: World) -> None:
    """The API's part: threads, snapshot, replay, and a new run on the same thread."""
    for number, odd in enumerate(("\\u0000", "\\ud800")):
        thread = f"t{number}"
        reply = await w.run(run_input(thread, script=scripts.text("m1", "good")))
        bad = f'{{"type":"TEXT_MESSAGE_CONTENT","messageId":"m1","delta":"a {odd} b"}}'
        await poison(reply, bad)
        assert (await w.replay(reply))[2] == bad
        snapshot = await w.snapshot(reply)
        assert snapshot["messages"][0]["content"] == json.loads(f'"a {odd} b"')
        listed = await w.ada.ask("/agui/threads/")
        assert len(listed.json["threads"]) == number + 1
        again = await w.run(run_input(thread, "r2", script=scripts.text("m2", "next")))
        assert again.types[-1] == "RUN_FINISHED"


@case("TXT-06")
async def _(w: World) -> None:
    """The API's part: reads are total."""
    reply = await w.run(run_input(script=scripts.text("m1", "good")))
    row = json.dumps(w.input["legacy_row"])
    await poison(reply, row)
    assert (await w.snapshot(reply))["messages"][0]["content"] == "a \udb8d b"
    assert (await w.replay(reply))[2] == row
    path = f"/agui/threads/{reply.headers['AGUI-Thread']}/stream?run={reply.headers['AGUI-Run']}"
    assert (await w.ada.ask(path)).logged[2] == row


@case("TXT-07")
async def _(w: World) -> None:
    reply = await w.run()
    delta = w.input["agent_events"][2]["delta"]
    assert reply.events[2]["delta"] == delta
    body = reply.raw.decode()
    assert body.splitlines() == body.split("\n")[:-1]
    for escape in ("\\u2028", "\\u2029", "\\u0085"):
        assert escape in reply.logged[2]
    assert (await w.snapshot(reply))["messages"][0]["content"] == delta


@case("TXT-09")
async def _(w: World) -> None:
    """Refused before it is stored, from the agent and from the body."""

    async def agent(run: Any) -> AsyncIterator[Any]:
        yield RunStartedEvent(thread_id="t1", run_id="r1")
        yield StateSnapshotEvent(snapshot={"a": float("nan"), "b": float("inf")})
        yield RunFinishedEvent(thread_id="t1", run_id="r1")

    refused = await w.ada.run(w.input["raw_body"].encode())
    assert refused.status in (400, 422)
    assert "NaN" in refused.raw.decode()
    assert refused.code
    infinite = await w.ada.run(w.input["raw_body"].replace("NaN", "1").encode())
    assert infinite.status in (400, 422)
    assert infinite.code == refused.code
    await nothing_stored()
    for value in ("nan", "inf"):

        async def plain(run: Any, value: str = value) -> AsyncIterator[Any]:
            yield {"type": "STATE_SNAPSHOT", "snapshot": {"a": float(value)}}

        with scripts.registered("numbers", plain):
            reply = await w.run(run_input(value), agent="numbers")
        assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
    with scripts.registered("numbers", agent):
        reply = await w.run(run_input(), agent="numbers")
    assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "protocol_violation"
    assert (await w.snapshot(reply))["state"] == {}


class RecordingLayer:
    """A channel layer that several processes might share, and what was sent through it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    async def new_channel(self, prefix: str = "") -> str:
        return "channel"

    async def group_add(self, group: str, channel: str) -> None: ...

    async def group_discard(self, group: str, channel: str) -> None: ...

    async def group_send(self, group: str, message: dict[str, Any]) -> None:
        self.sent.append((group, message))

    async def receive(self, channel: str) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@case("TXT-11")
async def _(w: World) -> None:
    layer = RecordingLayer()
    w.monkeypatch.setattr(hints, "_shared_layer", lambda: layer)
    reply = await w.run()
    snapshot = w.input["agent_events"][1]["snapshot"]
    assert snapshot == {"u": 2**64, "g": 10**30}
    assert reply.events[1]["snapshot"] == snapshot
    assert (await w.snapshot(reply))["state"] == snapshot
    assert await w.replay(reply) == reply.logged
    assert layer.sent
    for group, message in layer.sent:
        assert set(message) <= {"type", "thread", "run", "seq"}
        assert all(isinstance(value, int | str) for value in message.values())
        assert group.replace(".", "").replace("-", "").isalnum()
        assert len(group) < 100


@case("TXT-12")
async def _(w: World) -> None:
    reply = await w.run()
    value = reply.events[1]["value"]
    assert list(value.items()) == list(w.input["agent_events"][1]["value"].items())
    assert str(value["z"]) == "-0.0"
    assert isinstance(value["n"], float)
    assert await w.replay(reply) == reply.logged
    path = f"/agui/threads/{reply.headers['AGUI-Thread']}/stream?run={reply.headers['AGUI-Run']}"
    assert (await w.ada.ask(path)).frames == reply.frames


def nested(w: World, depth: int) -> bytes:
    """A body whose state is so many arrays deep."""
    made: dict[str, str] = (
        w.case["input"].get("raw_body_gen") or CASES["TXT-13"]["input"]["raw_body_gen"]
    )
    arrays = made["open"] * depth + made["close"] * depth
    return (made["prefix"] + arrays + made["suffix"]).encode()


@case("TXT-13")
async def _(w: World) -> None:
    for depth in w.input["raw_body_gen"]["depth"]:
        refused = await w.ada.run(nested(w, depth))
        assert (refused.status, refused.code) == (422, "too_deep")
    await nothing_stored()
    assert (await w.run(run_input())).types[-1] == "RUN_ERROR"


@case("TXT-15")
async def _(w: World) -> None:
    """This interpreter's part; the measure is a walk, so all of them give the same verdict."""
    for depth in w.input["depths"]:
        reply = await w.ada.run(nested(w, depth).replace(b'"r1"', b'"r%d"' % depth), "echo")
        if depth < conf.get().JSON_DEPTH:
            assert reply.status == 200
            assert reply.types[-1] == "RUN_FINISHED"
        else:
            assert (reply.status, reply.code) == (422, "too_deep")
    assert await Run.objects.acount() == 1


@case("TXT-16")
async def _(w: World) -> None:
    """The stored value; how it is shown is the admin's part."""
    reply = await w.run()
    arguments = "".join(e["delta"] for e in scripts.of(reply.events, "TOOL_CALL_ARGS"))
    assert len(arguments) >= 100_000
    snapshot = await w.snapshot(reply)
    assert snapshot["messages"][-1]["toolCalls"][0]["function"]["arguments"] == arguments
    assert snapshot["pendingToolCallIds"] == ["c1"]
    assert await w.replay(reply) == reply.logged


@case("TXT-18")
async def _(w: World) -> None:
    """The log's part: an event that a stock client cannot take is refused, at a setting."""
    assert conf.get().EVENT_BYTES < 10 * conf.MIB
    assert conf.get().STATE_BYTES <= 8 * conf.MIB
    reply = await w.run()
    assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "event_too_large"
    assert (await only_run()).error_code == "event_too_large"


@case("TXT-19")
async def _(w: World) -> None:
    async def typed(run: Any) -> AsyncIterator[Any]:
        yield RunStartedEvent(thread_id="typed", run_id="r1")
        yield StateSnapshotEvent(snapshot={1: "a", None: "b"})
        yield RunFinishedEvent(thread_id="typed", run_id="r1")

    async def plain(run: Any) -> AsyncIterator[Any]:
        yield {"type": "STATE_SNAPSHOT", "snapshot": {1: "a", None: "b"}}

    for name, agent in (("typed", typed), ("plain", plain)):
        with scripts.registered("keys", agent):
            reply = await w.run(run_input(name), agent="keys")
        state = (await w.snapshot(reply))["state"]
        if reply.types[-1] == "RUN_ERROR":
            assert reply.events[-1]["code"] == "protocol_violation"
            assert state == {}
        else:
            assert reply.events[1]["snapshot"] == state
            assert state["1"] == "a"
        assert await w.replay(reply) == reply.logged


# -- input-contract --------------------------------------------------------------


@case("INP-01")
async def _(w: World) -> None:
    """A null content is refused, as the official client does."""
    first, second, third, fourth = [await w.ada.run(body) for body in w.input["run_inputs"]]
    for refused in (first, third, fourth):
        assert (refused.status, refused.code) == (422, "invalid_input")
    paths = [[problem["path"] for problem in r.json["error"]["details"]] for r in (first, third)]
    assert "messages.0.id" in paths[0]
    assert paths[1] == ["messages.0.content"]
    assert {p["path"] for p in fourth.json["error"]["details"]} == {"threadId", "runId"}
    assert (second.status, second.types) == (200, ["RUN_STARTED", "RUN_ERROR"])
    assert await Run.objects.acount() == 1
    extra = run_input("extra", messages=[said("a")], unknown={"x": 1})
    accepted = await w.run(extra, "echo")
    assert accepted.types[-1] == "RUN_FINISHED"
    run = await only_run(key=accepted.headers["AGUI-Run"])
    rebuilt = await store.call(store.rebuild_input, run)
    assert rebuilt.encode() == scripts.wire(extra)


@case("INP-02")
async def _(w: World) -> None:
    (body,) = w.input["run_inputs"]
    refused = await w.ada.run(body)
    assert (refused.status, refused.code) == (422, "invalid_input")
    paths = {problem["path"] for problem in refused.json["error"]["details"]}
    assert {"threadId", "runId", "tools"} <= paths
    assert any(path.startswith("messages.0") for path in paths)
    assert any(path.startswith("resume.0") for path in paths)
    many = run_input(messages=[{"role": "user"}] * 100)
    assert len((await w.ada.run(many)).json["error"]["details"]) <= 20
    await nothing_stored()


class Connection:
    """A request to the mounted application, body piece by piece."""

    def __init__(self, w: World, *headers: tuple[bytes, bytes]) -> None:
        token = access.make_token(w.ada.user).encode()
        path = "/agui/agents/scripted/"
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"testserver"),
                (b"content-type", b"application/json"),
                (b"authorization", b"Bearer " + token),
                *headers,
            ],
            "server": ("testserver", 80),
            "client": ("127.0.0.1", 1),
        }
        communicator: Any = ApplicationCommunicator
        self.server = communicator(asgi.application, scope)

    async def send(self, body: bytes, *, more: bool = True) -> None:
        message = {"type": "http.request", "body": body, "more_body": more}
        await self.server.send_input(message)

    async def reply(self) -> tuple[int, Any]:
        """Status and JSON of the answer; the reader then leaves."""
        start = await self.server.receive_output(scripts.SECONDS)
        body = await self.server.receive_output(scripts.SECONDS)
        await self.server.send_input({"type": "http.disconnect"})
        await self.server.wait(scripts.SECONDS)
        headers = {name.lower(): value for name, value in start["headers"]}
        assert headers[b"content-type"] == b"application/json"
        return start["status"], json.loads(body["body"])


@case("INP-03")
async def _(w: World) -> None:
    """A limit of our own, whatever Django's is; refused by the announced length, or once read."""
    image = w.input["run_input"]["messages"][0]["content"][1]["source"]
    image["value"] = "A" * 3 * conf.MIB
    accepted = await w.run({**w.input["run_input"], "forwardedProps": {"script": []}})
    assert accepted.status == 200
    image["value"] = "A" * 20 * conf.MIB
    refused = await w.ada.run(w.input["run_input"])
    assert (refused.status, refused.code) == (413, "too_large")
    announced = Connection(w, (b"content-length", b"%d" % (200 * conf.MIB)))
    await announced.send(b"{")
    status, answer = await announced.reply()
    assert (status, answer["error"]["code"]) == (413, "too_large")
    chunked = Connection(w)
    for _ in range(9):
        await chunked.send(b" " * conf.MIB)
    status, answer = await chunked.reply()
    assert (status, answer["error"]["code"]) == (413, "too_large")
    assert await Run.objects.acount() == 1


@case("INP-04")
async def _(w: World) -> None:
    """An own agent's unknown type and unknown keys are taken out, with a finding."""
    reply = await w.run()
    assert reply.types == ["RUN_STARTED", "CUSTOM", "RUN_ERROR"]
    assert {key: reply.events[1][key] for key in ("name", "value")} == {"name": "n", "value": 1}
    assert "vendor" not in reply.events[1]
    assert reply.events[-1]["code"] == "protocol_violation"
    run = await only_run()
    found = " ".join(str(finding) for finding in run.findings)
    assert "FUTURE_EVENT" in found
    assert "removed" in found
    assert "toolCallName" in run.error_detail


@case("INP-05")
async def _(w: World) -> None:
    """Every refusal that can be asked for has a documented code; see also the errors' own test."""
    documented = (Path(__file__).parents[1] / "docs/reference/errors.md").read_text()
    done = await w.run(run_input(script=[]))
    thread = done.headers["AGUI-Thread"]
    missing = f"/agui/threads/{thread[:-4]}0000"
    stream = f"/agui/threads/{thread}/stream"
    ada = w.ada
    refusals = [
        await Person().run(run_input()),
        await ada.run(b"{"),
        await ada.run(b"\xff"),
        await ada.run(run_input(""), "scripted"),
        await ada.run(nested(w, 300)),
        await ada.run(run_input(), "nobody"),
        await ada.run(run_input(script=[{"$hang": True}])),
        await ada.run(run_input("t2", parentRunId="none")),
        await ada.run(run_input(forwardedProps={"aguiapp": {"base": 1}}, run="r3")),
        await ada.run(run_input(forwardedProps={"aguiapp": {"base": "x-1"}}, run="r3")),
        await ada.ask(f"{missing}/snapshot"),
        await ada.ask(stream, {}),
        await ada.ask(f"{stream}?after=x"),
        await ada.ask(f"{stream}?after=aaaaaa-1"),
        await ada.ask(f"{stream}?run=x"),
        await ada.ask(f"/agui/threads/{thread}/events?limit=x"),
        await ada.run(run_input(), query="?thread=1"),
    ]
    codes = {refused.code for refused in refusals}
    assert all(400 <= refused.status < 500 for refused in refusals)
    assert len(codes) >= 12
    undocumented = {code for code in codes if f"`{code}`" not in documented}
    assert not undocumented


def beats(count: int) -> Callable[[bytes], bool]:
    """Whether a stream had so many heartbeats."""
    return lambda raw: raw.count(b": keep-alive\n\n") >= count


@case("INP-06")
async def _(w: World) -> None:
    """A silent run: as many heartbeats as six minutes have, and the reader is still served."""
    w.settings.AGUIAPP = {"HEARTBEAT_SECONDS": 0.01}
    go = asyncio.Event()

    async def sparse(run: Any) -> AsyncIterator[Any]:
        for event in scripts.text("m1", "tick", "tock"):
            await go.wait()
            go.clear()
            yield event

    with scripts.registered("sparse", sparse):
        stream = await w.ada.watch(run_input(), "sparse")
        for count in range(1, 5):
            await stream.until(beats(6 * count))
            go.set()
        reply = await stream.rest()
    assert reply.types[-1] == "RUN_FINISHED"
    assert not reply.aborted


# -- authz-and-leaks -------------------------------------------------------------


@case("AUT-01")
async def _(w: World) -> None:
    """Every route that is mounted; those that come later are found by their names."""
    from aguiapp import urls

    mine = await w.run(run_input("threads-of-A", script=[]))
    key, run = mine.headers["AGUI-Thread"], mine.headers["AGUI-Run"]
    before = [await table._default_manager.acount() for table in (Thread, Run, RunEvent, Command)]
    unknown = key[:-4] + "0000"
    nobody = Person()
    checked = []
    for pattern in urls.urlpatterns:
        names = set(pattern.pattern.converters)
        given = {"agent": "scripted", "key": key, "run": run}
        path = reverse(f"aguiapp:{pattern.name}", kwargs={n: given[n] for n in names})
        for body in (None, run_input()):
            if (await nobody.ask(path, body)).status == 405:
                continue
            refused = await nobody.ask(path, body)
            assert (refused.status, refused.code) == (401, "unauthenticated"), path
            assert refused.headers["WWW-Authenticate"]
            if "key" in names:
                answers = [
                    await w.bob.ask(path, body),
                    await w.bob.ask(path.replace(key, unknown), body),
                ]
                assert {answer.status for answer in answers} == {404}, path
                assert answers[0].raw == answers[1].raw
                checked.append(pattern.name)
    assert {"stream", "events", "snapshot", "cancel"} <= set(checked)
    for query in ("", "&stream=0"):
        refused = await w.bob.run(w.input["run_input"], query=f"?thread={key}{query}")
        assert (refused.status, refused.code) == (404, "not_found")
    listed = await w.bob.ask("/agui/threads/?thread_id=threads-of-A")
    assert listed.json["threads"] == []
    after = [await table._default_manager.acount() for table in (Thread, Run, RunEvent, Command)]
    assert after == before


@case("AUT-03")
async def _(w: World) -> None:
    w.settings.AGUIAPP = {"ANONYMOUS": True}
    body = {**w.input["run_input"], "forwardedProps": {"script": scripts.text("m1", "x")}}
    visitor = Person()
    replies = [await person.run(body) for person in (w.ada, w.bob, visitor)]
    assert [reply.types[-1] for reply in replies] == ["RUN_FINISHED"] * 3
    keys = [reply.headers["AGUI-Thread"] for reply in replies]
    assert len(set(keys)) == 3
    assert await Thread.objects.filter(thread_id="main").acount() == 3
    assert len({reply.headers["AGUI-Cursor"].split("-")[0] for reply in replies}) == 3
    for person, own in zip((w.ada, w.bob, visitor), keys, strict=True):
        listed = (await person.ask("/agui/threads/")).json["threads"]
        assert [thread["key"] for thread in listed] == [own]
        for key in keys:
            status = (await person.ask(f"/agui/threads/{key}/snapshot")).status
            assert status == (200 if key == own else 404)


async def everything_public(w: World, thread: str) -> str:
    """All that the API says about a thread to its owner."""
    paths = ("snapshot", "events", "events?after=", "stream?run=")
    said_ = [(await w.ada.ask("/agui/threads/")).raw]
    run = await Run.objects.filter(thread__key=thread).alatest("pk")
    for path in paths:
        path = path.replace("run=", f"run={run.key}")
        said_.append((await w.ada.ask(f"/agui/threads/{thread}/{path}")).raw)
    cancelled = await w.ada.ask(f"/agui/threads/{thread}/runs/{run.key}/cancel", {})
    return b"".join([*said_, cancelled.raw]).decode() + "".join(await scripts.stored())


@case("AUT-05")
async def _(w: World) -> None:
    secrets = w.input["agent_events"][1]["message"].split()
    for debug in (False, True):
        w.settings.DEBUG = debug
        thread = f"t{debug}"
        reply = await w.run(
            run_input(thread, script=[{"$raise": "RuntimeError", "message": " ".join(secrets)}])
        )
        last = reply.events[-1]
        assert (last["type"], last["code"]) == ("RUN_ERROR", "agent_failed")
        assert last["metadata"]["aguiapp"]["runKey"] == reply.headers["AGUI-Run"]
        assert last["message"]
        public = reply.raw.decode() + await everything_public(w, reply.headers["AGUI-Thread"])
        for secret in [*secrets, "Traceback", "scripted.py"]:
            assert secret not in public
        run = await only_run(key=reply.headers["AGUI-Run"])
        assert all(secret in run.error_detail for secret in secrets)
        assert "Traceback" in run.error_detail
        assert secrets[0] not in run.error_message


class SecretMapping(dict[str, Any]):
    """An event that cannot be read."""

    def items(self) -> Any:
        raise RuntimeError("token=abc123")

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("token=abc123")


class SecretPolicy(access.Policy):
    """A host's permission hook with a bug."""

    def visible(self, identity: access.Identity) -> Any:
        raise RuntimeError("token=abc123")


@case("AUT-06")
async def _(w: World) -> None:
    w.settings.DEBUG = True
    secret = w.input["message"]
    seen: list[str] = []

    def factory(run: Any) -> Any:
        raise RuntimeError(secret)

    async def encode(run: Any) -> AsyncIterator[Any]:
        yield SecretMapping(type="CUSTOM", name="n", value=1)

    async def slow(run: Any) -> AsyncIterator[Any]:
        yield {"type": "CUSTOM", "name": "n", "value": 1}
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError(secret) from None

    async def plain(run: Any) -> AsyncIterator[Any]:
        yield {"type": "CUSTOM", "name": "n", "value": 1}

    def ready() -> bool:
        raise RuntimeError(secret)

    for name, agent in (("factory", factory), ("encode", encode)):
        with scripts.registered("leaky", agent):
            reply = await w.run(run_input(name), agent="leaky")
        assert reply.events[-1]["code"] == "agent_failed"
        public = await everything_public(w, reply.headers["AGUI-Thread"])
        seen += [reply.raw.decode(), public]
        run = await only_run(key=reply.headers["AGUI-Run"])
        assert secret in run.error_detail
    with scripts.registered("leaky", plain, ready=ready):
        refused = await w.ada.run(run_input("ready"), "leaky")
    assert (refused.status, refused.code) == (500, "internal")
    seen.append(refused.raw.decode())
    with scripts.registered("leaky", slow):
        stream = await w.ada.watch(run_input("cancel"), "leaky")
        await stream.until(lambda raw: b"CUSTOM" in raw)
        headers = stream.response.headers
        path = f"/agui/threads/{headers['AGUI-Thread']}/runs/{headers['AGUI-Run']}/cancel"
        cancelled = await w.ada.ask(path, {})
        reply = await stream.rest()
    assert reply.events[-1]["outcome"] == {"type": "cancelled"}
    seen += [cancelled.raw.decode(), reply.raw.decode()]
    seen.append(await everything_public(w, headers["AGUI-Thread"]))
    with scripts.registered("leaky", plain), w.monkeypatch.context() as patch:
        patch.setattr(scripts.writer, "commit", lambda jobs: [RuntimeError(secret) for _ in jobs])
        stream = await w.ada.watch(run_input("append"), "leaky")
        reply = await stream.rest()
    assert reply.events[-1]["code"] == "store_failed"
    seen += [reply.raw.decode(), await everything_public(w, reply.headers["AGUI-Thread"])]
    w.settings.AGUIAPP = {"POLICY": f"{__name__}.SecretPolicy"}
    for path in ("/agui/threads/", f"/agui/threads/{reply.headers['AGUI-Thread']}/snapshot"):
        refused = await w.ada.ask(path)
        assert (refused.status, refused.code) == (500, "internal")
        seen.append(refused.raw.decode())
    assert "abc123" not in "".join(seen)


@case("AUT-07")
async def _(w: World) -> None:
    interrupts = [{"id": "interrupt-of-B", "reason": "approval"}]
    end = {
        "type": "RUN_FINISHED",
        "threadId": "theirs",
        "runId": "run-of-B",
        "outcome": {"type": "interrupt", "interrupts": interrupts},
    }
    theirs = await w.bob.run(run_input("theirs", "run-of-B", script=[end]))
    assert (await only_run(key=theirs.headers["AGUI-Run"])).status == "interrupt"
    refused = await w.ada.run(w.input["run_input"])
    assert (refused.status, refused.code) == (422, "invalid_input")
    assert {p["path"] for p in refused.json["error"]["details"]} == {"resume", "parentRunId"}
    assert await Thread.objects.acount() == 1
    # Not even somebody who is in on that thread can take its ids to another one.
    thread = await Thread.objects.aget()
    await Participant.objects.acreate(thread=thread, user=w.ada.user, role="member")
    assert (await w.ada.run(w.input["run_input"])).code == "invalid_input"
    assert issubclass(errors.InvalidInput, errors.AguiError)
