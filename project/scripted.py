"""An agent that plays `forwardedProps.script`: AG-UI events, and directives between them.

It lets a test say exactly what an agent does, good or bad. It evaluates nothing, but it can block
the server on demand: `settings.SCRIPTED_AGENT` switches it on, never in production.

Directives (`$i` inside strings is the counter of the `$repeat` around them):

    {"$sleep": seconds}                     {"$repeat": n, "event": {…}} or "events": […]
    {"$block_s": seconds}  blocks the loop  {"$forever": […]}
    {"$hang": true}                         {"$return": true}
    {"$raise": class, "message": text}      RunError takes "code" as well
    {"$on_cancel": […]}    what is played when the run is cancelled; as the last item: waits for it
    {"$blob_kb": size}     a CUSTOM event of that size; inside an event: a value of that size
    {"$gen": "MESSAGES_SNAPSHOT", "total_mb": size}
    {"type": "STATE_DELTA", "$gen": {"ops": n, "template": {…}}}
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aguiapp import RunError

if TYPE_CHECKING:
    from aguiapp import RunContext

Item = dict[str, Any]

EXCEPTIONS: dict[str, type[BaseException]] = {
    "CancelledError": asyncio.CancelledError,
    "asyncio.CancelledError": asyncio.CancelledError,
    **{
        cls.__name__: cls
        for cls in (
            ConnectionError,
            GeneratorExit,
            KeyError,
            KeyboardInterrupt,
            MemoryError,
            OSError,
            RecursionError,
            RuntimeError,
            StopAsyncIteration,
            SystemExit,
            TimeoutError,
            TypeError,
            ValueError,
        )
    },
}
MAX_SECONDS = 3600.0
MAX_BLOCK_SECONDS = 60.0
MIB = 1024 * 1024
MAX_BYTES = 64 * MIB
MAX_REPEAT = 10_000_000
MAX_OPERATIONS = 1_000_000


class Ended(Exception):
    """The script said `$return`."""


class Script:
    """One script while it plays."""

    def __init__(self) -> None:
        self.on_cancel: list[Item] = []

    async def play(self, items: Any, counter: int | None = None) -> AsyncIterator[Item]:
        """The events of `items`, in order, with their directives done."""
        for item in _list(items):
            key = next((key for key in item if key.startswith("$")), "")
            if "type" not in item and key in ACTIONS:
                await ACTIONS[key](self, item)
            elif "type" not in item and key in SOURCES:
                async for event in SOURCES[key](self, item):
                    yield event
            else:
                yield _event(item, counter)

    async def sleep(self, item: Item) -> None:
        await asyncio.sleep(_number(item, "$sleep", MAX_SECONDS))

    async def block(self, item: Item) -> None:
        time.sleep(_number(item, "$block_s", MAX_BLOCK_SECONDS))  # noqa: ASYNC251 - on purpose

    async def hang(self, item: Item) -> None:
        await asyncio.Event().wait()

    async def end(self, item: Item) -> None:
        raise Ended

    async def fail(self, item: Item) -> None:
        message, name = str(item.get("message", "")), str(item["$raise"])
        if name.removeprefix("aguiapp.") == "RunError":
            raise RunError(message, code=str(item.get("code", "agent_error")))
        if name not in EXCEPTIONS:
            raise _bad(f"$raise does not know {name}")
        raise EXCEPTIONS[name](message)

    async def when_cancelled(self, item: Item) -> None:
        self.on_cancel = _list(item["$on_cancel"])

    async def repeat(self, item: Item) -> AsyncIterator[Item]:
        items = item.get("events", [item.get("event")])
        for counter in range(int(_number(item, "$repeat", MAX_REPEAT))):
            async for event in self.play(items, counter):
                yield event

    async def forever(self, item: Item) -> AsyncIterator[Item]:
        for counter in itertools.count():
            async for event in self.play(item["$forever"], counter):
                yield event
            await asyncio.sleep(0)

    async def blob(self, item: Item) -> AsyncIterator[Item]:
        yield {"type": "CUSTOM", "name": "blob", "value": _blob(item)}

    async def generate(self, item: Item) -> AsyncIterator[Item]:
        if item["$gen"] != "MESSAGES_SNAPSHOT":
            raise _bad("$gen without a type makes a MESSAGES_SNAPSHOT only")
        size = int(_number(item, "total_mb", MAX_BYTES // MIB) * MIB)
        yield {
            "type": "MESSAGES_SNAPSHOT",
            "messages": [
                {
                    "id": f"generated-{start}",
                    "role": "user",
                    "content": "x" * min(MIB, size - start),
                }
                for start in range(0, size, MIB)
            ],
        }


#: What a directive does, and what it yields.
ACTIONS: dict[str, Callable[[Script, Item], Awaitable[None]]] = {
    "$sleep": Script.sleep,
    "$block_s": Script.block,
    "$hang": Script.hang,
    "$return": Script.end,
    "$raise": Script.fail,
    "$on_cancel": Script.when_cancelled,
}
SOURCES: dict[str, Callable[[Script, Item], AsyncIterator[Item]]] = {
    "$repeat": Script.repeat,
    "$forever": Script.forever,
    "$blob_kb": Script.blob,
    "$gen": Script.generate,
}


async def play(run: RunContext) -> AsyncIterator[Item]:
    """Play the script that the request brought."""
    script, items = Script(), _list(run.forwarded.get("script"))
    try:
        async for event in script.play(items):
            yield event
        if items and "$on_cancel" in items[-1]:
            await asyncio.Event().wait()
    except Ended:
        return
    except asyncio.CancelledError:
        if not script.on_cancel:
            raise
        async for event in script.play(script.on_cancel):
            yield event


def _event(item: Item, counter: int | None) -> Item:
    """The event of a script's item, with its generated parts filled in."""
    event = {key: _filled(value, counter) for key, value in item.items() if key != "$gen"}
    unknown = next((key for key in event if key.startswith("$")), None)
    if unknown is not None:
        raise _bad(f"unknown directive {unknown}")
    if "$gen" in item:
        event["delta"] = _operations(item["$gen"])
    return event


def _operations(wanted: Any) -> list[Any]:
    if not isinstance(wanted, dict) or "template" not in wanted:
        raise _bad("$gen inside an event needs ops and template")
    return [wanted["template"]] * int(_number(wanted, "ops", MAX_OPERATIONS))


def _filled(value: Any, counter: int | None) -> Any:
    match value:
        case {"$blob_kb": _}:
            return _blob(value)
        case dict():
            return {_filled(key, counter): _filled(item, counter) for key, item in value.items()}
        case list():
            return [_filled(item, counter) for item in value]
        case str() if counter is not None:
            return value.replace("$i", str(counter))
        case _:
            return value


def _blob(item: Item) -> Item:
    return {"blob": "x" * int(_number(item, "$blob_kb", MAX_BYTES // 1024) * 1024)}


def _number(item: Item, name: str, highest: float) -> float:
    value = item.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= highest:
        raise _bad(f"{name} must be a number from 0 to {highest:g}")
    return value


def _list(items: Any) -> list[Item]:
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _bad("a script is a list of objects")
    return items


def _bad(reason: str) -> RunError:
    return RunError(f"The script cannot be played: {reason}.", code="bad_script")
