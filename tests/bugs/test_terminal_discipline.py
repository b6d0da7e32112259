"""How runs end: exactly one terminal, and the right one."""

from __future__ import annotations

import json

from tests import scripts
from tests.bugs.world import World, case
from tests.scripts import legal, only_run, run_input


@case("TRM-03")
async def test_a_stream_that_just_stops_is_an_error(w: World) -> None:
    reply = await w.run()
    assert reply.types[-3:] == ["TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "incomplete"
    run = await only_run()
    assert (run.status, run.error_code) == ("error", "incomplete")
    assert (await w.snapshot(reply))["messages"][-1]["content"] == "Transferring 50,0"


@case("TRM-04")
async def test_an_exception_ends_the_run_and_the_stream(w: World) -> None:
    reply = await w.run()
    assert not reply.aborted
    assert reply.types[-3:] == ["TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "agent_failed"
    assert b"upstream 500" not in reply.raw
    assert (await only_run()).status == "error"


@case("TRM-05")
async def test_no_exception_escapes_whatever_its_class(w: World) -> None:
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
async def test_an_error_event_is_the_status_of_the_run(w: World) -> None:
    reply = await w.run()
    assert reply.types == ["RUN_STARTED", "RUN_ERROR"]
    assert reply.events[-1]["code"] == "MODEL_DISABLED"
    assert reply.events[-1]["message"] == "model disabled"
    run = await only_run()
    assert (run.status, run.error_code) == ("error", "MODEL_DISABLED")
    assert run.error_message == "model disabled"
    assert "RUN_FINISHED" not in "".join(await w.replay(reply))


@case("TRM-08")
async def test_several_runs_replay_in_order_past_an_error(w: World) -> None:
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
async def test_each_run_keeps_its_own_events_and_state(w: World) -> None:
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
async def test_a_cancelled_run_is_not_an_error(w: World) -> None:
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
