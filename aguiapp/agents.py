"""What an agent is, the registry of agents, and the context a run hands to its agent."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import jsonpatch
from ag_ui.core import RunAgentInput
from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from aguiapp import conf, store
from aguiapp.errors import AgentNotReady, NotFound
from aguiapp.models import Thread

P = ParamSpec("P")
T = TypeVar("T")


class Emitter(Protocol):
    """What the engine lends to a context: a way into the log, and the run as folded so far."""

    async def emit(self, event: Any) -> None: ...

    @property
    def state(self) -> Any: ...

    @property
    def messages(self) -> list[dict[str, Any]]: ...


class RunContext:
    """One run as its agent sees it.

    `input` is the merged RunAgentInput in wire form, `user` the Django user or None, `thread` the
    row of the conversation. Every writing method waits while too much is uncommitted.
    """

    def __init__(
        self, *, input: dict[str, Any], user: Any, thread: Thread, emitter: Emitter
    ) -> None:
        self.input = input
        self.user = user
        self.thread = thread
        self._emitter = emitter

    @property
    def state(self) -> Any:
        """The folded state; change it with `set_state` or `patch_state`."""
        return self._emitter.state

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The folded conversation in wire form."""
        return self._emitter.messages

    @property
    def forwarded(self) -> dict[str, Any]:
        """`forwardedProps` where that is an object, else {}."""
        props = self.input.get("forwardedProps")
        return props if isinstance(props, dict) else {}

    @property
    def last_user_text(self) -> str:
        """The text of the newest user message; "" when there is none."""
        for message in reversed(self.input["messages"]):
            if message["role"] == "user":
                return text_of(message["content"])
        return ""

    async def emit(self, event: Any) -> None:
        """Write one event: a dict in wire form, JSON text, or an `ag_ui.core` model."""
        await self._emitter.emit(event)

    async def set_state(self, value: Any) -> None:
        """Replace the state (STATE_SNAPSHOT)."""
        await self.emit({"type": "STATE_SNAPSHOT", "snapshot": value})

    async def patch_state(self, operations: list[dict[str, Any]]) -> None:
        """Amend the state by JSON Patch, RFC 6902 (STATE_DELTA)."""
        await self.emit({"type": "STATE_DELTA", "delta": operations})

    async def update_state(self, value: Any) -> None:
        """Bring the state to `value` by the JSON Patch between the two; nothing when they agree."""
        operations = jsonpatch.make_patch(self.state, value).patch
        if operations:
            await self.patch_state(operations)

    @asynccontextmanager
    async def message(
        self, *, role: str = "assistant", message_id: str | None = None
    ) -> AsyncIterator[TextWriter]:
        """A text message: START at entry, END at exit, a CONTENT per `write`."""
        name = message_id or new_id()
        await self.emit({"type": "TEXT_MESSAGE_START", "messageId": name, "role": role})
        yield TextWriter(self, name, "TEXT_MESSAGE_CONTENT")
        await self.emit({"type": "TEXT_MESSAGE_END", "messageId": name})

    @asynccontextmanager
    async def reasoning(self, *, message_id: str | None = None) -> AsyncIterator[TextWriter]:
        """A span of reasoning with one message in it."""
        name = message_id or new_id()
        await self.emit({"type": "REASONING_START", "messageId": name})
        await self.emit({"type": "REASONING_MESSAGE_START", "messageId": name, "role": "reasoning"})
        yield TextWriter(self, name, "REASONING_MESSAGE_CONTENT")
        await self.emit({"type": "REASONING_MESSAGE_END", "messageId": name})
        await self.emit({"type": "REASONING_END", "messageId": name})

    @asynccontextmanager
    async def step(self, name: str) -> AsyncIterator[None]:
        """A named phase of the run."""
        await self.emit({"type": "STEP_STARTED", "stepName": name})
        yield
        await self.emit({"type": "STEP_FINISHED", "stepName": name})

    @asynccontextmanager
    async def tool_call(
        self, name: str, arguments: Any, *, call_id: str | None = None
    ) -> AsyncIterator[ToolCall]:
        """A call of a tool of the agent's own: START, ARGS and END; `result` answers it."""
        call = ToolCall(self, call_id or new_id())
        await self.emit({"type": "TOOL_CALL_START", "toolCallId": call.id, "toolCallName": name})
        delta = json.dumps(arguments, ensure_ascii=False)
        await self.emit({"type": "TOOL_CALL_ARGS", "toolCallId": call.id, "delta": delta})
        await self.emit({"type": "TOOL_CALL_END", "toolCallId": call.id})
        yield call

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work (the ORM, say) in the bounded pool; its connection goes back after."""
        settings = conf.get()
        if settings.WRITER == "inline":
            return await sync_to_async(function, thread_sensitive=True)(*args, **kwargs)
        pool = store.executor("agents", settings.AGENT_THREADS)
        work = partial(_returning_connections, function, *args, **kwargs)
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(pool, context.run, work)


#: Calls that are in the pool's threads now.
_in_pool: set[object] = set()


def pool_is_busy() -> bool:
    """Whether a thread of the pool is at work: Python would wait for it before it exits."""
    return bool(_in_pool)


def _returning_connections(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    mark = object()
    _in_pool.add(mark)
    try:
        return function(*args, **kwargs)
    finally:
        connections.close_all()
        _in_pool.discard(mark)


@dataclass(frozen=True)
class TextWriter:
    """Writes the deltas of one open message."""

    run: RunContext
    id: str
    type: str

    async def write(self, delta: str) -> None:
        """Append text to the message."""
        await self.run.emit({"type": self.type, "messageId": self.id, "delta": delta})


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool by the agent."""

    run: RunContext
    id: str

    async def result(self, content: Any) -> None:
        """Answer the call; anything but text is sent as JSON."""
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        await self.run.emit(
            {
                "type": "TOOL_CALL_RESULT",
                "messageId": new_id(),
                "toolCallId": self.id,
                "content": text,
            }
        )


def new_id() -> str:
    """A fresh id for a message or a tool call."""
    return str(uuid.uuid4())


def text_of(content: Any) -> str:
    """The text of a message's content: the string, or its text parts joined."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part.get("text", "") for part in parts if part.get("type") == "text")


Ready = Callable[[], bool | Awaitable[bool]]
HISTORIES = ("server", "client")
#: Limits that an agent may set for itself, by the settings they stand for.
LIMITS = {name.lower(): name for name in ("RUN_SECONDS", "IDLE_SECONDS", "RUN_EVENTS", "RUN_BYTES")}


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A registered agent: its name, what runs it, and how its threads behave."""

    name: str
    target: Any
    history: str = "server"
    busy: str | None = None
    disconnect: str | float | None = None
    limits: dict[str, float] = field(default_factory=dict)
    ready: Ready | None = None
    capabilities: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> conf.Settings:
        """The settings in force for a run of this agent."""
        own: dict[str, Any] = {LIMITS[name]: value for name, value in self.limits.items()}
        if self.busy is not None:
            own["BUSY"] = self.busy
        if self.disconnect is not None:
            own["DISCONNECT"] = self.disconnect
        return replace(conf.get(), **own) if own else conf.get()

    async def check_ready(self) -> None:
        """Raise AgentNotReady when `ready` says so."""
        if self.ready is None:
            return
        if iscoroutinefunction(self.ready):
            answer = await self.ready()
        else:
            answer = await sync_to_async(self.ready, thread_sensitive=True)()
        if not answer:
            raise AgentNotReady

    async def open(self, run: RunContext) -> AsyncIterator[Any] | None:
        """Start the agent: the iterator of its events, or None when it is already done."""
        source = self._call(run)
        if inspect.isawaitable(source):
            source = await source
        if source is None:
            return None
        if isinstance(source, Iterator):
            return _pulled(source, run)
        if not hasattr(source, "__aiter__"):
            raise TypeError(f"agent {self.name!r} returned {type(source).__name__}, not events")
        iterator: AsyncIterator[Any] = source.__aiter__()
        return iterator

    def _call(self, run: RunContext) -> Any:
        function = self.target
        if inspect.isclass(function):
            function = function()
        if not inspect.isroutine(function) and hasattr(function, "run"):
            return _fresh(function).run(as_model(run.input))
        return function(as_model(run.input) if _wants_input(function) else run)


def _fresh(target: Any) -> Any:
    """A copy for this run where the framework's agent keeps state of a run in itself."""
    clone = getattr(target, "clone", None)
    return clone() if callable(clone) else target


def _wants_input(function: Any) -> bool:
    """Whether the agent takes the official RunAgentInput rather than a RunContext."""
    parameter = next(iter(inspect.signature(function).parameters.values()), None)
    if parameter is None:
        raise TypeError("an agent takes one argument: the run, or its input")
    annotation = parameter.annotation
    if annotation is RunAgentInput or str(annotation).endswith("RunAgentInput"):
        return True
    return annotation is inspect.Parameter.empty and parameter.name in ("input", "input_data")


async def _pulled(source: Iterator[Any], run: RunContext) -> AsyncIterator[Any]:
    """A blocking generator, advanced in the bounded pool."""
    end = object()
    try:
        while (event := await run.call(next, source, end)) is not end:
            yield event
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            await run.call(close)


def as_model(wire: dict[str, Any]) -> RunAgentInput:
    """The input as the official model, for frameworks; lone halves become U+FFFD."""
    text = json.dumps(wire, ensure_ascii=True)
    try:
        return RunAgentInput.model_validate_json(text)
    except ValueError:
        clean = json.dumps(wire, ensure_ascii=False).encode("utf-16", "surrogatepass")
        return RunAgentInput.model_validate_json(clean.decode("utf-16", "replace"))


_registry: dict[str, Agent] = {}


def agent(
    name: str,
    *,
    history: str = "server",
    busy: str | None = None,
    disconnect: str | float | None = None,
    limits: dict[str, float] | None = None,
    ready: Ready | None = None,
    capabilities: dict[str, Any] | None = None,
) -> Callable[[T], T]:
    """Register an agent: an (async) generator, a coroutine, or an object or class with `run()`.

    `history="client"` makes the input's messages the truth of each run. `busy` says what becomes
    of a post while its thread has a run: "reject", "enqueue" or "interrupt"; `disconnect` what
    becomes of a run whose readers left: "continue", "cancel", or the seconds it waits for one.
    `limits` sets run_seconds, idle_seconds, run_events and run_bytes (0 seconds: no limit).
    `ready` is asked before anything is stored and answers False to refuse (503); `capabilities`
    is declared as given. What is left out follows the settings.
    """
    if not isinstance(name, str):  # a bare @agent
        raise ImproperlyConfigured('an agent needs a name: @agent("support")')
    if not name or "/" in name:
        raise ImproperlyConfigured(f"{name!r} is no name for an agent: it stands in the URL")
    if history not in HISTORIES:
        raise ImproperlyConfigured(f"history is one of {HISTORIES}, not {history!r}")
    _check_options(busy, disconnect, limits or {})

    def register(target: T) -> T:
        known = _registry.get(name)
        if known is not None and known.target is not target and _where(known) != _where(target):
            raise ImproperlyConfigured(f"two agents are called {name!r}")
        _registry[name] = Agent(
            name=name,
            target=target,
            history=history,
            busy=busy,
            disconnect=disconnect,
            limits=limits or {},
            ready=ready,
            capabilities=capabilities or {},
        )
        return target

    return register


def _check_options(
    busy: str | None, disconnect: str | float | None, limits: dict[str, float]
) -> None:
    if busy is not None and busy not in conf.CHOICES["BUSY"]:
        raise ImproperlyConfigured(f"busy is one of {conf.CHOICES['BUSY']}, not {busy!r}")
    if disconnect is not None and not conf.is_disconnect(disconnect):
        kinds = conf.DISCONNECTS
        raise ImproperlyConfigured(f"disconnect is one of {kinds}, or seconds, not {disconnect!r}")
    for name, value in limits.items():
        if name not in LIMITS:
            raise ImproperlyConfigured(f"limits are {sorted(LIMITS)}; there is no {name!r}")
        if not conf.is_amount(value):
            raise ImproperlyConfigured(f"the limit {name} is a number, not {value!r}")


def _where(target: Any) -> tuple[Any, Any]:
    target = getattr(target, "target", target)
    return getattr(target, "__module__", None), getattr(target, "__qualname__", id(target))


def get(name: str) -> Agent:
    """The agent of that name; raises NotFound."""
    found = _registry.get(name)
    if found is None:
        raise NotFound("There is no agent of that name.")
    return found


def heed_readers() -> bool:
    """Whether any agent's runs depend on who reads them."""
    default = conf.get().DISCONNECT
    policies = (default if a.disconnect is None else a.disconnect for a in _registry.values())
    return any(policy != "continue" for policy in policies)


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_registry)


def unregister(name: str) -> None:
    """Forget an agent (for tests)."""
    _registry.pop(name, None)
