"""What the in-process tests share: inputs, people who talk to the server, and streams as read."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from django.db import connections
from django.test import AsyncClient

from aguiapp import access, agents, engine, feed, protocol, store
from aguiapp.errors import StreamAborted
from aguiapp.models import Run, RunEvent, Thread

#: The module; the package has a function of that name.
writer = import_module("aguiapp.store.writer")

#: Nothing here takes so long unless it hangs.
SECONDS = 20.0

Event = dict[str, Any]


def run_input(
    thread: str = "t1",
    run: str = "r1",
    *,
    messages: Sequence[Event] = (),
    script: Sequence[Event] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A RunAgentInput; `script` is what the scripted agent plays."""
    given: dict[str, Any] = {
        "threadId": thread,
        "runId": run,
        "state": {},
        "messages": list(messages),
        "tools": [],
        "context": [],
        "forwardedProps": {} if script is None else {"script": list(script)},
    }
    return {**given, **more}


def said(name: str, content: str = "hi", role: str = "user") -> Event:
    """A message."""
    return {"id": name, "role": role, "content": content}


def text(name: str, *deltas: str) -> list[Event]:
    """The events of a whole text message."""
    return [
        {"type": "TEXT_MESSAGE_START", "messageId": name, "role": "assistant"},
        *({"type": "TEXT_MESSAGE_CONTENT", "messageId": name, "delta": d} for d in deltas),
        {"type": "TEXT_MESSAGE_END", "messageId": name},
    ]


@contextmanager
def registered(name: str, target: Any, **options: Any) -> Iterator[None]:
    """An agent for as long as a test lasts."""
    before = agents._registry.get(name)
    agents.unregister(name)
    agents.agent(name, **options)(target)
    try:
        yield
    finally:
        agents.unregister(name)
        if before is not None:
            agents._registry[name] = before


class Frame(NamedTuple):
    """One frame of an event stream."""

    id: str | None
    data: str


def frames(raw: bytes) -> list[Frame]:
    """The frames of an SSE body, without its comments."""
    found = []
    for block in raw.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if "data" in fields:
            found.append(Frame(fields.get("id"), fields["data"]))
    return found


class Reply:
    """An answer that was read to its end."""

    def __init__(self, response: Any, raw: bytes, *, aborted: bool = False) -> None:
        self.status: int = response.status_code
        self.headers = response.headers
        self.raw = raw
        self.aborted = aborted
        self.type: str = response.headers.get("Content-Type", "")

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def code(self) -> str:
        """The code of a refusal, which must have the one shape of all refusals."""
        assert self.type == "application/json", (self.status, self.type, self.raw[:200])
        (name,) = self.json
        error = self.json[name]
        assert name == "error"
        assert set(error) == {"code", "message", "details"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return str(error["code"])

    @property
    def frames(self) -> list[Frame]:
        return frames(self.raw)

    @property
    def events(self) -> list[Event]:
        if self.type.startswith("application/json"):
            return list(self.json["events"])
        return [json.loads(frame.data) for frame in self.frames]

    @property
    def logged(self) -> list[str]:
        """The texts of the events that stand in the log."""
        return [frame.data for frame in self.frames if frame.id]

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]


class Stream:
    """An answer that is read while it comes."""

    def __init__(self, response: Any) -> None:
        self.response = response
        self.source = aiter(response.streaming_content)
        self.raw = b""

    async def until(self, found: Callable[[bytes], bool]) -> bytes:
        """Read on until `found` holds for all that came."""
        async with asyncio.timeout(SECONDS):
            while not found(self.raw):
                self.raw += await anext(self.source)
        return self.raw

    async def rest(self) -> Reply:
        """Everything, to the end."""
        aborted = False
        async with asyncio.timeout(SECONDS):
            try:
                async for chunk in self.source:
                    self.raw += chunk
            except StreamAborted:
                aborted = True
        return Reply(self.response, self.raw, aborted=aborted)


class Person:
    """Somebody with a bearer token, or nobody, who sends requests."""

    def __init__(self, user: Any = None, **headers: str) -> None:
        self.user = user
        self.client = AsyncClient()
        self.headers = dict(headers)
        if user is not None:
            self.headers["authorization"] = f"Bearer {access.make_token(user)}"

    async def open(self, path: str, body: Any = None, **headers: str) -> Any:
        """The response; a POST when there is a body."""
        sent = {**self.headers, **headers}
        if body is None:
            return await self.client.get(path, headers=sent)
        raw = body if isinstance(body, bytes) else wire(body)
        return await self.client.post(path, data=raw, content_type="application/json", headers=sent)

    async def ask(self, path: str, body: Any = None, **headers: str) -> Reply:
        """The whole answer."""
        response = await self.open(path, body, **headers)
        if response.streaming:
            return await Stream(response).rest()
        return Reply(response, response.content)

    async def run(self, body: Any, agent: str = "scripted", query: str = "", **h: str) -> Reply:
        """A whole run."""
        return await self.ask(f"/agui/agents/{agent}/{query}", body, **h)

    async def watch(self, body: Any, agent: str = "scripted", query: str = "") -> Stream:
        """A run, read while it goes on."""
        response = await self.open(f"/agui/agents/{agent}/{query}", body)
        assert response.streaming, response.content
        return Stream(response)


def wire(body: Any) -> bytes:
    """JSON as a client would send it."""
    return json.dumps(body).encode()


def of(events: Sequence[Event], kind: str) -> list[Event]:
    """The events of one type."""
    return [event for event in events if event["type"] == kind]


def legal(events: Sequence[Event]) -> None:
    """A conforming client takes this stream."""
    verdict = protocol.check(events)
    assert verdict.accepts, (verdict.rule, verdict.message, events[verdict.error_index or 0])


async def until(condition: Callable[[], bool]) -> None:
    """Turn the loop until something holds that nobody announces."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def stored(**filters: Any) -> list[str]:
    """The stored texts of the runs that match, in order."""
    rows = RunEvent.objects.filter(**filters).order_by("run_id", "seq")
    return [payload async for payload in rows.values_list("payload", flat=True)]


async def only_run(**filters: Any) -> Run:
    """The one run that matches, once its last finding is written."""
    run: Run = await Run.objects.select_related("thread").aget(**filters)
    driver = engine.current().drivers.get(run.pk)
    if driver is not None:
        await driver.done.wait()
    return await Run.objects.select_related("thread").aget(pk=run.pk)


def request(
    body: dict[str, Any], user: Any = None, agent: str = "scripted", **more: Any
) -> engine.Request:
    """A post as the views hand it to the engine."""
    sent = protocol.dumps(body)
    scope = f"user:{user.pk}" if user is not None else "system"
    return engine.Request(
        agent=agent,
        input=protocol.parse_input(sent),
        text=sent,
        scope=scope,
        actor="p1",
        user=user,
        **more,
    )


async def drive(body: dict[str, Any], user: Any = None, agent: str = "scripted") -> Run:
    """Start a run without HTTP and see it, and its agent, off."""
    async with asyncio.timeout(SECONDS):
        started = await engine.start(request(body, user, agent))
        if started.task is not None:
            await started.task
    return await Run.objects.select_related("thread").aget(pk=started.run.pk)


async def events_of(run: Run) -> list[Event]:
    """The stored events of a run."""
    return [json.loads(payload) for payload in await stored(run_id=run.pk)]


async def follow(thread: Thread, after: int = 0, run: Run | None = None) -> AsyncIterator[str]:
    """The payloads a follower gives."""
    async for batch in feed.Follower(thread, after, run).batches(SECONDS):
        for payload in batch.payloads if batch is not None else ():
            yield payload


def opening(scope: str = "user:1", thread: str = "t1", run: str = "r1", **more: Any) -> Any:
    """What the store opens a run with."""
    body = protocol.dumps(run_input(thread, run))
    given: dict[str, Any] = {
        "scope": scope,
        "thread_id": thread,
        "run_id": run,
        "agent": "scripted",
        "text": body,
        "input_hash": store.digest(body),
    }
    return store.Opening(**{**given, **more})


def row(seq: int, event: Event) -> store.Row:
    """A row of the log."""
    kind = protocol.TYPE_CODES[event["type"]]
    return store.Row(seq, kind, protocol.dumps(event), 1_700_000_000_000)


async def elsewhere(function: Any) -> Any:
    """Call it in a thread of its own, as a command or a WSGI server would."""
    answered: list[Any] = []

    def work() -> None:
        try:
            answered.append(function())
        except Exception as error:
            answered.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return answered[0]
