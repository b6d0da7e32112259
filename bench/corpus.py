"""The events that every server streams: what a model's answer looks like on the wire."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from ag_ui.core import (
    BaseEvent,
    StateDeltaEvent,
    StateSnapshotEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

WORDS = [
    " the",
    " agent",
    " state",
    " run",
    " of",
    " and",
    " tool",
    " calls",
    " a",
    " it",
    " event",
    " delta",
    " is",
    " over",
    " token",
]
MESSAGE, CALL = "msg_6f1d2c3b4a59", "call_9a8b7c6d5e4f"


@cache
def plan(count: int) -> list[tuple[str, Any]]:
    """What each of `count` events is: 93 % text, 5 % tool arguments, 2 % state patches."""
    draw = random.Random(7)
    chosen: list[tuple[str, Any]] = []
    for index in range(count):
        place = index % 100
        if place % 20 == 7:
            chosen.append(("args", draw.choice(('{"q', "uery", '":"pa', 'ris"'))))
        elif place in (33, 66):
            path = f"/items/{index % 10}/v"
            chosen.append(("state", [{"op": "replace", "path": path, "value": index}]))
        else:
            chosen.append(("text", draw.choice(WORDS)))
    return chosen


def opening() -> list[BaseEvent]:
    """Events that open what the stream writes into."""
    return [
        StateSnapshotEvent(snapshot={"items": [{"v": 0} for _ in range(10)]}),
        TextMessageStartEvent(message_id=MESSAGE, role="assistant"),
        ToolCallStartEvent(tool_call_id=CALL, tool_call_name="search"),
    ]


def closing() -> list[BaseEvent]:
    """Events that close it again."""
    return [ToolCallEndEvent(tool_call_id=CALL), TextMessageEndEvent(message_id=MESSAGE)]


def events(count: int) -> Iterator[BaseEvent]:
    """Official models, built one by one as a framework's adapter does."""
    for kind, value in plan(count):
        if kind == "text":
            yield TextMessageContentEvent(message_id=MESSAGE, delta=value)
        elif kind == "args":
            yield ToolCallArgsEvent(tool_call_id=CALL, delta=value)
        else:
            yield StateDeltaEvent(delta=value)
