"""Every form of agent, what its context can do, and the registry."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
from ag_ui.core import RunAgentInput, TextMessageContentEvent, TextMessageEndEvent
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections

import aguiapp
from aguiapp import RunContext, agents, conf, engine, errors
from aguiapp.models import Run
from tests import scripts
from tests.scripts import drive, events_of, legal, request, run_input, said, text

database = pytest.mark.django_db(transaction=True)
HI = text("m1", "hi")


async def said_by(agent: Any, body: Any = None, **options: Any) -> list[dict[str, Any]]:
    """The events of a run of this agent."""
    with scripts.registered("tested", agent, **options):
        run = await drive(body or run_input(messages=[said("u1", "hello")]), agent="tested")
    events = await events_of(run)
    legal(events)
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


WHOLE = [
    "RUN_STARTED",
    "TEXT_MESSAGE_START",
    "TEXT_MESSAGE_CONTENT",
    "TEXT_MESSAGE_END",
    "RUN_FINISHED",
]


async def async_generator(run: RunContext) -> AsyncIterator[Any]:
    for event in HI:
        yield event


async def coroutine(run: RunContext) -> None:
    async with run.message(message_id="m1") as message:
        await message.write("hi")


async def coroutine_giving_a_generator(run: RunContext) -> AsyncIterator[Any]:
    return async_generator(run)


def generator(run: RunContext) -> Iterator[Any]:
    yield from HI


def function_giving_a_generator(run: RunContext) -> AsyncIterator[Any]:
    return async_generator(run)


def iterator(run: RunContext) -> Iterator[Any]:
    return iter(HI)


class Class:
    """A class with `run()`."""

    async def run(self, input: RunAgentInput) -> AsyncIterator[Any]:
        assert input.thread_id == "t1"
        for event in HI:
            yield event


class Sync:
    """A class with a blocking `run()`."""

    def run(self, input: RunAgentInput) -> Iterator[Any]:
        yield from HI


async def models(run: RunContext) -> AsyncIterator[Any]:
    yield HI[0]
    yield TextMessageContentEvent(message_id="m1", delta="hi")
    yield TextMessageEndEvent(message_id="m1").model_dump_json(by_alias=True)


async def texts(run: RunContext) -> AsyncIterator[Any]:
    for event in HI:
        yield json.dumps(event).encode() if event is HI[0] else json.dumps(event)


async def official(input: RunAgentInput) -> AsyncIterator[Any]:
    assert isinstance(input, RunAgentInput)
    for event in HI:
        yield event


async def unannotated(input):
    assert isinstance(input, RunAgentInput)
    for event in HI:
        yield event


async def chunks(run: RunContext) -> AsyncIterator[Any]:
    yield {"type": "TEXT_MESSAGE_CHUNK", "messageId": "m1", "delta": "hi"}


@database
class TestForms:
    @pytest.mark.parametrize(
        "agent",
        [
            async_generator,
            coroutine,
            coroutine_giving_a_generator,
            generator,
            function_giving_a_generator,
            iterator,
            Class,
            Class(),
            Sync(),
            models,
            texts,
            official,
            unannotated,
            chunks,
            partial(async_generator),
        ],
        ids=lambda agent: getattr(agent, "__name__", type(agent).__name__),
    )
    async def test_it_runs(self, agent: Any) -> None:
        events = await said_by(agent)
        assert kinds(events) == WHOLE
        assert events[2]["delta"] == "hi"

    @pytest.mark.parametrize("odd", [lambda run: 5, lambda run: "text", lambda run: [1, 2]])
    async def test_what_gives_no_events_is_an_error_of_the_agent(self, odd: Any) -> None:
        events = await said_by(odd)
        assert kinds(events) == ["RUN_STARTED", "RUN_ERROR"]
        assert events[-1]["code"] == "agent_failed"

    async def test_an_agent_with_state_of_its_own_is_cloned(self) -> None:
        class Framework:
            def __init__(self) -> None:
                self.used = 0

            def clone(self) -> Framework:
                return Framework()

            async def run(self, input: Any) -> AsyncIterator[Any]:
                self.used += 1
                assert self.used == 1
                for event in HI:
                    yield event

        agent = Framework()
        for number in range(2):
            body = run_input(f"t{number}")
            assert kinds(await said_by(agent, body)) == WHOLE
        assert agent.used == 0

    async def test_odd_text_reaches_an_official_input(self) -> None:
        seen: list[Any] = []

        async def agent(input: RunAgentInput) -> AsyncIterator[Any]:
            seen.append(input.messages[0].content)
            yield HI[0]
            yield HI[2]

        await said_by(agent, run_input(messages=[said("u1", "a\0b\ud800c\U0001f600")]))
        assert seen == ["a\0b\ufffdc\U0001f600"]


@database
class TestPool:
    async def test_a_sync_generator_runs_off_the_loop(self) -> None:
        threads: list[str] = []

        def agent(run: RunContext) -> Iterator[Any]:
            for event in HI:
                threads.append(threading.current_thread().name)
                User.objects.count()
                yield event

        assert kinds(await said_by(agent)) == WHOLE
        assert all(name.startswith("aguiapp-agents") for name in threads)

    async def test_a_sync_generator_is_closed_when_its_run_is_cancelled(self) -> None:
        closed = threading.Event()

        def agent(run: RunContext) -> Iterator[Any]:
            try:
                while True:
                    yield {"type": "CUSTOM", "name": "n", "value": 1}
            finally:
                closed.set()

        with scripts.registered("tested", agent):
            started = await engine.start(request(run_input(), agent="tested"))
            async for payload in scripts.follow(started.thread, 0, started.run):
                if "CUSTOM" in payload:
                    break
            await engine.cancel(started.run, "p1")
            assert started.task is not None
            await asyncio.wait_for(started.task, scripts.SECONDS)
        assert closed.is_set()
        assert (await scripts.only_run()).status == "cancelled"

    async def test_its_exceptions_are_those_of_an_agent(self) -> None:
        def agent(run: RunContext) -> Iterator[Any]:
            yield HI[0]
            raise SystemExit("secret")

        events = await said_by(agent)
        assert kinds(events)[-2:] == ["TEXT_MESSAGE_END", "RUN_ERROR"]
        assert "secret" not in json.dumps(events)

    async def test_calls_are_bounded_and_leave_no_connection(self) -> None:
        lock, now, most = threading.Lock(), 0, 0
        full, used = threading.Event(), set()
        bound = conf.get().AGENT_THREADS

        def work(number: int) -> int:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
                if now == bound:
                    full.set()
            User.objects.count()
            used.add(connections["default"])
            assert full.wait(scripts.SECONDS)
            with lock:
                now -= 1
            return number

        async def agent(run: RunContext) -> None:
            found = await asyncio.gather(*(run.call(work, n) for n in range(3 * bound)))
            assert found == list(range(3 * bound))
            await run.emit({"type": "CUSTOM", "name": "n", "value": 1})

        assert kinds(await said_by(agent)) == ["RUN_STARTED", "CUSTOM", "RUN_FINISHED"]
        assert most == bound
        assert used
        if connection.vendor == "postgresql":
            assert all(found.connection is None for found in used)

    async def test_a_call_hands_on_arguments_results_and_exceptions(self) -> None:
        seen: list[Any] = []

        def work(a: int, *, b: int) -> int:
            if b == 0:
                raise ZeroDivisionError
            return a + b

        async def agent(run: RunContext) -> None:
            seen.append(await run.call(work, 1, b=2))
            try:
                await run.call(work, 1, b=0)
            except ZeroDivisionError:
                seen.append("caught")

        await said_by(agent)
        assert seen == [3, "caught"]


@database
class TestContext:
    async def test_helpers_write_the_right_events(self) -> None:
        async def agent(run: RunContext) -> None:
            async with run.step("look"):
                async with run.reasoning(message_id="g") as thought:
                    await thought.write("hm")
                async with run.tool_call("find", {"n": "ü"}, call_id="c") as call:
                    await call.result({"found": "ü"})
            async with run.message(role="developer", message_id="m") as message:
                await message.write("x")
            await run.set_state({"n": 1})
            await run.patch_state([{"op": "replace", "path": "/n", "value": 2}])
            assert run.state == {"n": 2}
            assert [m["role"] for m in run.messages] == [
                "user",
                "reasoning",
                "assistant",
                "tool",
                "developer",
            ]

        events = await said_by(agent)
        assert kinds(events)[1:-1] == [
            "STEP_STARTED",
            "REASONING_START",
            "REASONING_MESSAGE_START",
            "REASONING_MESSAGE_CONTENT",
            "REASONING_MESSAGE_END",
            "REASONING_END",
            "TOOL_CALL_START",
            "TOOL_CALL_ARGS",
            "TOOL_CALL_END",
            "TOOL_CALL_RESULT",
            "STEP_FINISHED",
            "TEXT_MESSAGE_START",
            "TEXT_MESSAGE_CONTENT",
            "TEXT_MESSAGE_END",
            "STATE_SNAPSHOT",
            "STATE_DELTA",
        ]
        assert json.loads(events[8]["delta"]) == {"n": "ü"}
        assert events[-1]["outcome"] == {"type": "success"}

    async def test_an_exception_inside_a_helper_is_the_agents(self) -> None:
        async def agent(run: RunContext) -> None:
            async with run.step("s"), run.message() as message:
                await message.write("x")
                raise ValueError

        assert kinds(await said_by(agent))[-3:] == [
            "TEXT_MESSAGE_END",
            "STEP_FINISHED",
            "RUN_ERROR",
        ]

    async def test_it_knows_who_and_what(self, user: User) -> None:
        seen: list[Any] = []

        async def agent(run: RunContext) -> None:
            seen.extend((run.user, run.thread.thread_id, run.last_user_text, run.forwarded))

        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        body = run_input(
            messages=[said("u1", "first"), {"id": "u2", "role": "user", "content": parts}],
            forwardedProps={"k": 1},
        )
        with scripts.registered("tested", agent):
            await drive(body, user, "tested")
        assert seen == [user, "t1", "ab", {"k": 1}]

    @pytest.mark.parametrize("props", [None, 5, [], "x"])
    async def test_forwarded_is_always_an_object(self, props: Any) -> None:
        async def agent(run: RunContext) -> None:
            assert run.forwarded == {}
            assert run.last_user_text == ""

        events = await said_by(agent, run_input(forwardedProps=props))
        assert kinds(events) == ["RUN_STARTED", "RUN_FINISHED"]

    async def test_what_it_hands_out_cannot_change_the_log(self) -> None:
        async def agent(run: RunContext) -> None:
            await run.set_state({"n": [1]})
            run.messages.clear()
            run.messages[0]["content"] = "changed"
            async with run.message(message_id="m") as message:
                await message.write("x")
            assert run.messages[0]["content"] == "hello"

        await said_by(agent)


class TestRegistry:
    @pytest.mark.parametrize(
        ("name", "options"), [("", {}), ("a/b", {}), ("ok", {"history": "none"})]
    )
    def test_mistakes_are_found_at_once(self, name: str, options: Any) -> None:
        with pytest.raises(ImproperlyConfigured):
            agents.agent(name, **options)(async_generator)
        assert name not in agents.names()

    def test_two_of_one_name_are_a_mistake(self) -> None:
        with scripts.registered("twin", async_generator):
            agents.agent("twin")(async_generator)
            with pytest.raises(ImproperlyConfigured):
                agents.agent("twin")(generator)

    def test_unknown_names(self) -> None:
        with pytest.raises(errors.NotFound):
            agents.get("nobody")
        agents.unregister("nobody")

    def test_public_names_are_lazy(self) -> None:
        assert aguiapp.agent is agents.agent
        assert aguiapp.RunError is errors.RunError
        assert aguiapp.RunContext is RunContext
        with pytest.raises(AttributeError):
            _ = aguiapp.nothing

    @database
    async def test_client_history_is_an_option(self) -> None:
        seen: list[Any] = []

        async def agent(run: RunContext) -> None:
            seen.append([m["id"] for m in run.input["messages"]])

        forged = {"id": "a1", "role": "assistant", "content": "x"}
        body = run_input(messages=[said("s", "be kind", "system"), said("u1"), forged])
        await said_by(agent, body, history="client")
        assert seen == [["s", "u1", "a1"]]
        assert await Run.objects.acount() == 1


def test_an_agent_needs_a_name() -> None:
    async def nameless(run: RunContext) -> None:
        """Decorated without parentheses."""

    decorator: Any = agents.agent
    with pytest.raises(ImproperlyConfigured, match="needs a name"):
        decorator(nameless)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"busy": "wait"}, "busy"),
        ({"disconnect": "stop"}, "disconnect"),
        ({"disconnect": -1}, "disconnect"),
        ({"limits": {"seconds": 1}}, "seconds"),
        ({"limits": {"run_seconds": "1"}}, "run_seconds"),
        ({"limits": {"idle_seconds": True}}, "idle_seconds"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: Any, names: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=names):
        agents.agent("misled", **options)
