"""Public bug reports as cases: what went wrong elsewhere must go right here.

`tests/data/bugs.jsonl` holds the reports. A test plays a case's own input; siblings are inputs of
the same kind. Where a report's wish and a decision of this project clash, the decision is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.contrib.auth.models import User

from aguiapp import protocol
from aguiapp.engine import recorder
from aguiapp.models import Command, InputMessage, Run, RunEvent, Thread
from project import scripted
from tests import scripts
from tests.scripts import Event, Person, Reply, legal, only_run, run_input

#: How many cases there are of each kind whose surface is built, in whole or in part.
KINDS = {
    "authz-and-leaks": 5,
    "cancel-race": 3,
    "channel-layer": 8,
    "concurrency-and-idempotency": 4,
    "database-async": 5,
    "disconnect-durability": 6,
    "event-ordering": 1,
    "fencing": 3,
    "input-contract": 6,
    "json-patch": 14,
    "liveness": 2,
    "message-identity": 10,
    "pairing-and-order": 6,
    "resume-and-join": 10,
    "shutdown": 1,
    "sse-transport": 5,
    "state-fold": 8,
    "terminal-discipline": 7,
    "text-and-numbers": 13,
    "websocket": 8,
}


class Later(NamedTuple):
    """Why a case, or a part of it, has no test yet: the route it needs, and what is left."""

    route: str
    left: str


#: Cases that wait for a route; the day it is mounted, `test_completeness` asks for their tests.
LATER = {
    "DIS-03": Later(
        "tool-result", "a frontend tool that is waited for, its late and second answer"
    ),
    "WSK-01": Later("thread-socket", "commands on the socket that carries the run"),
    "WSK-05": Later("thread-socket", "the rights of each command"),
    "WSK-08": Later("thread-socket", "a bad frame that is answered with its ref, and no close"),
}
DATA = Path(__file__).parents[1] / "data"


def load() -> dict[str, dict[str, Any]]:
    """The cases by id; lone surrogates in them are meant."""
    lines = (DATA / "bugs.jsonl").read_text(encoding="ascii").splitlines()
    cases = [json.loads(line) for line in lines]
    return {case["id"]: case for case in cases if case["kind"] in KINDS}


CASES = load()
#: The cases that have their test.
TESTED: set[str] = set()


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
        """The input that plays the case's events: the case's own body, or a plain one."""
        props = {"forwardedProps": {"script": self.input["agent_events"]}}
        return {**run_input(), **self.input.get("run_input", {}), **props, **more}

    async def run(self, body: Any = None, agent: str = "scripted") -> Reply:
        """The case's run as ada reads it; what is streamed must be legal and be what is stored."""
        reply = await self.ada.run(self.play() if body is None else body, agent)
        assert reply.status == 200, reply.raw
        legal(reply.events)
        run = await only_run(key=reply.headers["AGUI-Run"])
        assert reply.logged == await scripts.stored(run_id=run.pk)
        return reply

    async def turns(self, *plays: Sequence[Event], thread: str = "t1") -> list[Reply]:
        """Runs r1, r2 … of one thread, each with its script."""
        return [
            await self.run(run_input(thread, f"r{number}", script=script))
            for number, script in enumerate(plays, 1)
        ]

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

    async def findings(self, reply: Reply) -> list[str]:
        """The kinds of what was noted on the run."""
        run = await only_run(key=reply.headers["AGUI-Run"])
        return [finding["kind"] for finding in run.findings]

    async def played(self, script: Sequence[Event], **more: Any) -> tuple[Reply, Any]:
        """A run of that script on a thread of its own, and the thread's snapshot after it."""
        reply = await self.run(run_input(script=script, **more))
        return reply, await self.snapshot(reply)


Test = Callable[..., Any]


def case(name: str) -> Callable[[Test], Test]:
    """Mark the test of a case."""
    assert name not in TESTED, f"{name} has two tests"
    TESTED.add(name)
    return sibling(name)


def sibling(name: str) -> Callable[[Test], Test]:
    """Mark a test of inputs like a case's; its world holds that case."""
    world = pytest.mark.parametrize("w", [name], indirect=True)
    database = pytest.mark.django_db(transaction=True)
    return lambda test: database(world(test))


def open_world(name: str, user: User, other: User, settings: Any, patch: Any) -> Iterator[World]:
    """A world with the agent that plays what a request says."""
    with scripts.registered("scripted", scripted.play):
        yield World(CASES[name], Person(user), Person(other), settings, patch)


async def nothing_stored() -> None:
    """No request of this test left a row."""
    for table in (Thread, Run, RunEvent, InputMessage, Command):
        assert not await table._default_manager.aexists(), table


def nested(w: World, depth: int) -> bytes:
    """A body whose state is so many arrays deep."""
    made: dict[str, str] = (
        w.case["input"].get("raw_body_gen") or CASES["TXT-13"]["input"]["raw_body_gen"]
    )
    arrays = made["open"] * depth + made["close"] * depth
    return (made["prefix"] + arrays + made["suffix"]).encode()


def delta(*operations: dict[str, Any]) -> Event:
    """A STATE_DELTA."""
    return {"type": "STATE_DELTA", "delta": list(operations)}


def state(value: Any) -> Event:
    """A STATE_SNAPSHOT."""
    return {"type": "STATE_SNAPSHOT", "snapshot": value}


def messages(*given: Event) -> Event:
    """A MESSAGES_SNAPSHOT."""
    return {"type": "MESSAGES_SNAPSHOT", "messages": list(given)}


def activity(content: Any, name: str = "a1") -> Event:
    """An ACTIVITY_SNAPSHOT."""
    return {
        "type": "ACTIVITY_SNAPSHOT",
        "messageId": name,
        "activityType": "plan",
        "content": content,
    }


def activity_delta(*operations: dict[str, Any], name: str = "a1") -> Event:
    """An ACTIVITY_DELTA."""
    return {
        "type": "ACTIVITY_DELTA",
        "messageId": name,
        "activityType": "plan",
        "patch": list(operations),
    }


def call(name: str, arguments: str = "{}", **start: Any) -> list[Event]:
    """The events of a whole tool call."""
    return [
        {"type": "TOOL_CALL_START", "toolCallId": name, "toolCallName": "lookup", **start},
        {"type": "TOOL_CALL_ARGS", "toolCallId": name, "delta": arguments},
        {"type": "TOOL_CALL_END", "toolCallId": name},
    ]


def result(call_id: str, name: str, content: str = "ok") -> Event:
    """A TOOL_CALL_RESULT."""
    return {
        "type": "TOOL_CALL_RESULT",
        "toolCallId": call_id,
        "messageId": name,
        "content": content,
    }


def caller(name: str, *calls: tuple[str, str]) -> Event:
    """An assistant message with tool calls of (id, arguments)."""
    made = [
        {"id": c, "type": "function", "function": {"name": "lookup", "arguments": arguments}}
        for c, arguments in calls
    ]
    return {"id": name, "role": "assistant", "content": "", "toolCalls": made}


def interrupt(name: str, **more: Any) -> Event:
    """A RUN_FINISHED of run r1 that waits for somebody."""
    interrupts = [{"id": name, "reason": "input_required", **more}]
    return {
        "type": "RUN_FINISHED",
        "threadId": "t1",
        "runId": "r1",
        "outcome": {"type": "interrupt", "interrupts": interrupts},
    }


def recording() -> recorder.Recorder:
    """The pure half of run r1 on thread t1, begun."""
    made = recorder.Recorder(
        thread_id="t1", run_id="r1", run_key="key", folder=protocol.Fold(), now=lambda: 7
    )
    made.write({"type": "RUN_STARTED", "threadId": "t1", "runId": "r1"}, free=True)
    return made
