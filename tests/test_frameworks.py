"""Real frameworks plug in with two lines each: stored, streamed, replayed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from ag_ui.core import RunAgentInput
from ag_ui_langgraph import LangGraphAgent
from django.contrib.auth.models import User
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.ui.ag_ui import AGUIAdapter

from aguiapp import agent, agents, engine, protocol, store
from aguiapp.models import Run
from project.management.commands import demo

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What a test registers goes away with it."""
    before = set(agents.names())
    yield
    for name in set(agents.names()) - before:
        agents.unregister(name)


def run(name: str, text: str, user: User, **more: Any) -> Run:
    """One turn on the thread of the test."""
    return engine.run_now(name, {**demo.run_input("thread", text, {}), **more}, user=user)


def events(done: Run) -> list[dict[str, Any]]:
    """A run as it was stored: successful, gapless and legal."""
    rows = store.read(done.pk)
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    found = [json.loads(row.payload) for row in rows]
    assert done.status == Run.Status.SUCCESS, (done.error_code, done.error_detail)
    assert protocol.check(found).accepts
    assert done.findings == []
    return found


def replayed(done: Run) -> list[dict[str, Any]]:
    """The conversation folded from what is stored."""
    return store.snapshot(done.thread).fold.messages


def counting(messages: list[ModelMessage]) -> int:
    return sum(message.kind == "request" for message in messages)


class TestPydanticAi:
    def test_a_test_model_streams_its_answer(self, user: User) -> None:
        model = Agent(TestModel(custom_output_text="Hello from the model"))

        @agent("pydantic")
        async def pydantic(input: RunAgentInput) -> Any:
            return AGUIAdapter(agent=model, run_input=input).run_stream()

        first = run("pydantic", "Hi", user)
        text = "".join(e["delta"] for e in events(first) if e["type"] == "TEXT_MESSAGE_CONTENT")
        assert text == "Hello from the model"
        second = run("pydantic", "Hi again", user)
        events(second)
        assert [(m["role"], m["content"]) for m in replayed(second)] == [
            ("user", "Hi"),
            ("assistant", "Hello from the model"),
            ("user", "Hi again"),
            ("assistant", "Hello from the model"),
        ]

    def test_an_async_generator_does_as_well(self, user: User) -> None:
        model = Agent(TestModel(custom_output_text="Same"))

        @agent("pydantic")
        async def pydantic(input: RunAgentInput) -> AsyncIterator[Any]:
            async for event in AGUIAdapter(agent=model, run_input=input).run_stream():
                yield event

        done = run("pydantic", "Hi", user)
        events(done)
        assert replayed(done)[-1]["content"] == "Same"

    def test_tools_and_the_history_reach_the_model(self, user: User) -> None:
        seen: list[int] = []

        async def respond(
            messages: list[ModelMessage], info: AgentInfo
        ) -> AsyncIterator[str | DeltaToolCalls]:
            seen.append(counting(messages))
            if messages[-1].parts[-1].part_kind == "tool-return":
                yield "It is "
                yield "sunny."
            else:
                yield {
                    0: DeltaToolCall(
                        name="weather", json_args='{"city":', tool_call_id=f"c{len(seen)}"
                    )
                }
                yield {0: DeltaToolCall(json_args='"Ulm"}', tool_call_id=f"c{len(seen)}")}

        model = Agent(FunctionModel(stream_function=respond))

        @model.tool_plain
        def weather(city: str) -> str:
            return f"sun in {city}"

        @agent("pydantic")
        async def pydantic(input: RunAgentInput) -> Any:
            return AGUIAdapter(agent=model, run_input=input).run_stream()

        first = events(run("pydantic", "Weather?", user))
        arguments = "".join(e["delta"] for e in first if e["type"] == "TOOL_CALL_ARGS")
        assert json.loads(arguments) == {"city": "Ulm"}
        assert [e["content"] for e in first if e["type"] == "TOOL_CALL_RESULT"] == ["sun in Ulm"]
        second = run("pydantic", "And now?", user)
        events(second)
        roles = [message["role"] for message in replayed(second)]
        assert roles == ["user", "assistant", "tool", "assistant"] * 2
        assert seen[2] > seen[1]

    def test_a_model_that_fails_is_an_error_without_its_words(self, user: User) -> None:
        async def respond(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
            yield "So "
            raise RuntimeError("secret")

        model = Agent(FunctionModel(stream_function=respond))

        @agent("pydantic")
        async def pydantic(input: RunAgentInput) -> Any:
            return AGUIAdapter(agent=model, run_input=input).run_stream()

        done = run("pydantic", "Hi", user)
        assert done.status == Run.Status.ERROR
        found = [json.loads(row.payload) for row in store.read(done.pk)]
        assert found[-1]["type"] == "RUN_ERROR"
        assert protocol.check(found).accepts


def graph(*answers: str) -> Any:
    """A graph with one node that asks a fake model."""
    model = GenericFakeChatModel(messages=iter([AIMessage(content=a) for a in answers]))

    async def chat(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("chat", chat)
    builder.add_edge(START, "chat")
    builder.add_edge("chat", END)
    return builder.compile(checkpointer=InMemorySaver())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the framework about itself
class TestLangGraph:
    def test_a_graph_streams_its_answer(self, user: User) -> None:
        agent("graph")(
            LangGraphAgent(name="graph", graph=graph("Hello from the graph", "Once more"))
        )
        first = run("graph", "Hi", user)
        types = {event["type"] for event in events(first)}
        assert {"STEP_STARTED", "TEXT_MESSAGE_CONTENT", "STATE_SNAPSHOT"} <= types
        assert [(m["role"], m["content"]) for m in replayed(first)] == [
            ("user", "Hi"),
            ("assistant", "Hello from the graph"),
        ]
        second = run("graph", "And again", user)
        events(second)
        assert [(m["role"], m["content"]) for m in replayed(second)] == [
            ("user", "Hi"),
            ("assistant", "Hello from the graph"),
            ("user", "And again"),
            ("assistant", "Once more"),
        ]
        assert second.offset == first.last_seq

    def test_each_run_gets_a_fresh_adapter(self, user: User) -> None:
        adapter = LangGraphAgent(name="graph", graph=graph("one", "two"))
        agent("graph")(adapter)
        for text in ("a", "b"):
            events(run("graph", text, user))
        assert adapter.active_run is None
