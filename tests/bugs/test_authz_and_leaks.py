"""Who sees what, and what nobody sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from django.urls import reverse

from aguiapp import access, errors
from aguiapp.models import Command, Participant, Run, RunEvent, Thread
from tests import scripts
from tests.bugs.world import World, case
from tests.scripts import Person, only_run, run_input


@case("AUT-01")
async def test_no_route_tells_a_stranger_anything(w: World) -> None:
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
async def test_one_thread_id_of_three_people_is_three_threads(w: World) -> None:
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
async def test_an_exception_is_for_staff_only(w: World) -> None:
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
async def test_no_hook_and_no_failure_leaks(w: World) -> None:
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
async def test_ids_of_another_thread_are_worth_nothing(w: World) -> None:
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
