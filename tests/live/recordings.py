"""Runs of different kinds, as scripts: each item is one event, the last may be an error."""

from __future__ import annotations

from typing import Any

from tests.live import servers

Json = dict[str, Any]


def _said(*deltas: str, message: str = "m1") -> list[Json]:
    return servers.said(*(servers.delta(text, message) for text in deltas), message=message)


PLANS: list[Json] = [{"steps": []}, {"steps": [1]}]
UPDATES: list[Json] = [
    *({"op": "replace", "path": "/count", "value": number} for number in range(4)),
    {"op": "add", "path": "/items/-", "value": {"name": "Tee \U0001f375", "price": 2.5}},
    {"op": "add", "path": "/items/0", "value": None},
    {"op": "remove", "path": "/items/1"},
    {"op": "add", "path": "/a~1b", "value": [1, 2, {"c": "\u2028"}]},
]


def _tool(number: int) -> list[Json]:
    call = f"c{number}"
    return [
        {
            "type": "TOOL_CALL_START",
            "toolCallId": call,
            "toolCallName": "look",
            "parentMessageId": "m1",
        },
        {"type": "TOOL_CALL_ARGS", "toolCallId": call, "delta": '{"order": '},
        {"type": "TOOL_CALL_ARGS", "toolCallId": call, "delta": f"{number}}}"},
        {"type": "TOOL_CALL_END", "toolCallId": call},
        {
            "type": "TOOL_CALL_RESULT",
            "messageId": f"r{number}",
            "toolCallId": call,
            "content": "shipped",
        },
    ]


def _step(name: str, *middle: Json) -> list[Json]:
    return [
        {"type": "STEP_STARTED", "stepName": name},
        *middle,
        {"type": "STEP_FINISHED", "stepName": name},
    ]


def _thought(name: str, *deltas: str) -> list[Json]:
    return [
        {"type": "REASONING_START", "messageId": name},
        {"type": "REASONING_MESSAGE_START", "messageId": name, "role": "reasoning"},
        *({"type": "REASONING_MESSAGE_CONTENT", "messageId": name, "delta": d} for d in deltas),
        {"type": "REASONING_MESSAGE_END", "messageId": name},
        {"type": "REASONING_END", "messageId": name},
    ]


def _subagent(name: str, *middle: Json, error: bool = False) -> list[Json]:
    end: Json = {"type": "SUBAGENT_FINISHED", "subagentRunId": name, "result": {"ok": True}}
    if error:
        end = {"type": "SUBAGENT_ERROR", "subagentRunId": name, "message": "It gave up."}
    return [
        {"type": "SUBAGENT_STARTED", "subagentRunId": name, "name": "helper"},
        *({**event, "subagentRunId": name} for event in middle),
        end,
    ]


SCRIPTS: dict[str, list[Json]] = {
    "text": _said(*(f"Wort {n} \u00e9\u2028\U0001f600\n\n" for n in range(18)), "\x85 end"),
    "tools": [
        *_said("Looking. "),
        *_tool(1),
        *_tool(2),
        *_tool(3)[:4],
        *_said("Do", "ne.", message="m2"),
        _tool(3)[4],
    ],
    "reasoning": [
        *_step("think", *_thought("t1", "One ", "thing ", "first.")),
        *_step("again", *_thought("t2", "Then ", "the other.")),
        *_step("speak", *_said("So: ", "yes.")),
    ],
    "state": [
        {"type": "STATE_SNAPSHOT", "snapshot": {"count": 0, "items": []}},
        *({"type": "STATE_DELTA", "delta": [update]} for update in UPDATES),
        *_said("half way"),
        {"type": "STATE_SNAPSHOT", "snapshot": {"count": 9, "items": ["new"]}},
        {"type": "STATE_DELTA", "delta": UPDATES[:2]},
        {"type": "MESSAGES_SNAPSHOT", "messages": [{"id": "s1", "role": "user", "content": "hi"}]},
        *(
            {"type": "ACTIVITY_SNAPSHOT", "messageId": "a1", "activityType": "plan", "content": c}
            for c in PLANS
        ),
        {
            "type": "ACTIVITY_DELTA",
            "messageId": "a1",
            "activityType": "plan",
            "patch": [{"op": "add", "path": "/steps/-", "value": 2}],
        },
        {"type": "CUSTOM", "name": "shop.done", "value": {"big": 2**60, "none": None}},
    ],
    "subagents": [
        *_subagent("s1", *_said("a ", "b ", message="sm1")),
        *_said("between"),
        *_subagent("s2", *_said("c ", message="sm2"), error=True),
        *_subagent("s3", *_step("inner", *_said("d ", "e ", message="sm3"))),
    ],
    "error": [
        *_tool(1),
        *_step("fail", *_thought("t1", "This ", "will ", "not ")),
        *_thought("t2", "end well")[:3],
        *_said("I am ab", "out to fa")[:-1],
        {"$raise": "ValueError", "message": "not for the public"},
    ],
}
