"""What a POST may say, and how it is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from asgiref.testing import ApplicationCommunicator
from django.conf import settings

from aguiapp import access, conf, store
from aguiapp.models import Run
from project import asgi
from tests import scripts
from tests.bugs.world import World, case, nested, nothing_stored
from tests.scripts import Person, only_run, run_input, said


@case("INP-01")
async def test_a_body_is_judged_as_the_official_client_does(w: World) -> None:
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
async def test_all_mistakes_of_a_body_are_named(w: World) -> None:
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
async def test_the_limit_of_a_body_is_our_own(w: World) -> None:
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
async def test_unknown_material_is_taken_out_of_events(w: World) -> None:
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
async def test_every_refusal_has_a_documented_code(w: World) -> None:
    """Every refusal that can be asked for has a documented code; see also the errors' own test."""
    documented = (settings.BASE_DIR / "docs/reference/errors.md").read_text()
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
async def test_a_silent_run_keeps_its_reader(w: World) -> None:
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
