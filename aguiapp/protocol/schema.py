"""The field tables of AG-UI 1.0: every event, message, part and the run input."""

from typing import Final

from aguiapp.protocol.events import SUBAGENT, UNATTRIBUTED
from aguiapp.protocol.shapes import (
    ANY,
    BOOLEAN,
    COUNT,
    INTEGER,
    JSON,
    OBJECT,
    POINTER,
    TEXT,
    ListOf,
    Optional11,
    Shape,
    Struct,
    Tagged,
    TextOr,
    choice,
)

_TYPED: Final[dict[str, Shape]] = {"type": TEXT}
_TEXTS: Final = ListOf(TEXT)

SOURCE = Tagged(
    "type",
    {
        "data": Struct({**_TYPED, "value": TEXT, "mimeType": TEXT}),
        "url": Struct({**_TYPED, "value": TEXT}, {"mimeType": TEXT}),
        "file": Struct({**_TYPED, "value": TEXT}, {"provider": TEXT, "mimeType": TEXT}),
    },
)
_PART_EXTRA: Final[dict[str, Shape]] = {"id": TEXT, "metadata": ANY}
_MEDIA = Struct({**_TYPED, "source": SOURCE}, _PART_EXTRA)
MEDIA_KINDS = ("image", "audio", "video", "document")
PART = Tagged(
    "type",
    {"text": Struct({**_TYPED, "text": TEXT}, _PART_EXTRA), **dict.fromkeys(MEDIA_KINDS, _MEDIA)},
)
CONTENT = TextOr(ListOf(PART))

# encryptedValueType is protocol 1.1; a 1.0 store must hand it back unharmed.
_ENCRYPTED: Final[dict[str, Shape]] = {"encryptedValue": TEXT, "encryptedValueType": Optional11()}
_OWNED: Final[dict[str, Shape]] = {"metadata": OBJECT, "subagentRunId": TEXT}

TOOL_CALL = Struct(
    {
        "id": TEXT,
        "type": choice("function"),
        "function": Struct({"name": TEXT, "arguments": TEXT}),
    },
    {"metadata": OBJECT, **_ENCRYPTED},
)


def _message(required: dict[str, Shape], optional: dict[str, Shape] | None = None) -> Struct:
    return Struct({"id": TEXT, "role": TEXT, **required}, {**_OWNED, **(optional or {})})


MESSAGE = Tagged(
    "role",
    {
        "developer": _message({"content": TEXT}, {"name": TEXT, **_ENCRYPTED}),
        "system": _message({"content": TEXT}, {"name": TEXT, **_ENCRYPTED}),
        "user": _message({"content": CONTENT}, {"name": TEXT, **_ENCRYPTED}),
        "assistant": _message(
            {}, {"content": TEXT, "toolCalls": ListOf(TOOL_CALL), "name": TEXT, **_ENCRYPTED}
        ),
        "tool": _message({"toolCallId": TEXT, "content": CONTENT}, {"error": TEXT, **_ENCRYPTED}),
        "activity": _message({"activityType": TEXT, "content": OBJECT}),
        "reasoning": _message({"content": TEXT}, _ENCRYPTED),
    },
)
MESSAGES = ListOf(MESSAGE)

TOOL = Struct({"name": TEXT, "description": TEXT}, {"parameters": ANY, "metadata": OBJECT})
CONTEXT = Struct({"description": TEXT, "value": TEXT})
RESUME = Struct(
    {"interruptId": TEXT, "status": choice("resolved", "cancelled")},
    {"payload": ANY, "metadata": OBJECT},
)
RUN_INPUT = Struct(
    {"threadId": TEXT, "runId": TEXT, "messages": MESSAGES},
    {
        "protocolVersion": TEXT,
        "parentRunId": TEXT,
        "state": JSON,
        "tools": ListOf(TOOL),
        "context": ListOf(CONTEXT),
        "forwardedProps": ANY,
        "resume": ListOf(RESUME),
    },
)

_OPERATION: Final[dict[str, Shape]] = {"op": TEXT, "path": POINTER}
_VALUED = Struct({**_OPERATION, "value": JSON}, is_open=True)
_MOVED = Struct({**_OPERATION, "from": POINTER}, is_open=True)
PATCH = ListOf(
    Tagged(
        "op",
        {
            "add": _VALUED,
            "replace": _VALUED,
            "test": _VALUED,
            "remove": Struct(_OPERATION, is_open=True),
            "move": _MOVED,
            "copy": _MOVED,
        },
    )
)

INTERRUPT = Struct(
    {"id": TEXT, "reason": TEXT},
    {
        "message": TEXT,
        "toolCallId": TEXT,
        "responseSchema": OBJECT,
        "expiresAt": TEXT,
        **_OWNED,
    },
)
RUN_OUTCOME = Tagged(
    "type",
    {
        "success": Struct(_TYPED, {"pendingToolCallIds": _TEXTS}),
        "interrupt": Struct({**_TYPED, "interrupts": ListOf(INTERRUPT, least=1)}),
        "cancelled": Struct(_TYPED),
    },
)
SUBAGENT_OUTCOME = Tagged(
    "type",
    {"success": Struct(_TYPED), "suspended": Struct(_TYPED, {"interruptIds": _TEXTS})},
)
_USAGE = ListOf(
    Struct(
        {},
        {
            "provider": TEXT,
            "model": TEXT,
            **dict.fromkeys(
                (
                    "inputTokens",
                    "outputTokens",
                    "totalTokens",
                    "reasoningTokens",
                    "cachedInputTokens",
                    "cacheWriteInputTokens",
                ),
                COUNT,
            ),
        },
    )
)
_SPEAKER = choice("developer", "system", "assistant", "user")
_REASONING = choice("reasoning")

Fields = dict[str, Shape]
_ID: Final[Fields] = {"messageId": TEXT}
_CALL: Final[Fields] = {"toolCallId": TEXT}
_DELTA: Final[Fields] = {"delta": TEXT}
_SUBAGENT: Final[Fields] = {"subagentRunId": TEXT}

_TABLE: Final[dict[str, tuple[Fields, Fields]]] = {
    "RUN_STARTED": (
        {"threadId": TEXT, "runId": TEXT},
        {"protocolVersion": TEXT, "parentRunId": TEXT, "input": RUN_INPUT},
    ),
    "RUN_FINISHED": (
        {"threadId": TEXT, "runId": TEXT},
        {"result": ANY, "outcome": RUN_OUTCOME, "usage": _USAGE},
    ),
    "RUN_ERROR": ({"message": TEXT}, {"code": TEXT, "usage": _USAGE}),
    "STEP_STARTED": ({"stepName": TEXT}, {}),
    "STEP_FINISHED": ({"stepName": TEXT}, {}),
    "TEXT_MESSAGE_START": (_ID, {"role": _SPEAKER, "name": TEXT}),
    "TEXT_MESSAGE_CONTENT": ({**_ID, **_DELTA}, {}),
    "TEXT_MESSAGE_END": (_ID, {}),
    "TEXT_MESSAGE_CHUNK": ({}, {**_ID, "role": _SPEAKER, **_DELTA, "name": TEXT}),
    "TOOL_CALL_START": ({**_CALL, "toolCallName": TEXT}, {"parentMessageId": TEXT}),
    "TOOL_CALL_ARGS": ({**_CALL, **_DELTA}, {}),
    "TOOL_CALL_END": (_CALL, {}),
    "TOOL_CALL_CHUNK": ({}, {**_CALL, "toolCallName": TEXT, "parentMessageId": TEXT, **_DELTA}),
    "TOOL_CALL_RESULT": ({**_ID, **_CALL, "content": CONTENT}, {"role": choice("tool")}),
    "STATE_SNAPSHOT": ({"snapshot": JSON}, {}),
    "STATE_DELTA": ({"delta": PATCH}, {}),
    "MESSAGES_SNAPSHOT": ({"messages": MESSAGES}, {}),
    "ACTIVITY_SNAPSHOT": ({**_ID, "activityType": TEXT, "content": OBJECT}, {"replace": BOOLEAN}),
    "ACTIVITY_DELTA": ({**_ID, "activityType": TEXT, "patch": PATCH}, {}),
    "RAW": ({"event": JSON}, {"source": TEXT}),
    "CUSTOM": ({"name": TEXT, "value": JSON}, {}),
    "REASONING_START": (_ID, {}),
    "REASONING_MESSAGE_START": ({**_ID, "role": _REASONING}, {}),
    "REASONING_MESSAGE_CONTENT": ({**_ID, **_DELTA}, {}),
    "REASONING_MESSAGE_END": (_ID, {}),
    "REASONING_MESSAGE_CHUNK": ({}, {**_ID, **_DELTA}),
    "REASONING_END": (_ID, {}),
    "REASONING_ENCRYPTED_VALUE": (
        {"subtype": choice("message", "tool-call"), "entityId": TEXT, "encryptedValue": TEXT},
        {"encryptedValueType": Optional11()},
    ),
    "SUBAGENT_STARTED": (
        {**_SUBAGENT, "name": TEXT},
        {
            "description": TEXT,
            "parentSubagentRunId": TEXT,
            "parentToolCallId": TEXT,
            "parentMessageId": TEXT,
        },
    ),
    "SUBAGENT_FINISHED": (_SUBAGENT, {"result": ANY, "outcome": SUBAGENT_OUTCOME}),
    "SUBAGENT_ERROR": ({**_SUBAGENT, "message": TEXT}, {"code": TEXT}),
}
_COMMON: Final[Fields] = {"timestamp": INTEGER, "rawEvent": ANY, "metadata": OBJECT}


def _event(name: str, required: Fields, optional: Fields) -> Struct:
    tag: Fields = {} if name in UNATTRIBUTED or name in SUBAGENT else _SUBAGENT
    return Struct({**_TYPED, **required}, {**_COMMON, **tag, **optional})


EVENTS: Final[dict[str, Struct]] = {
    name: _event(name, required, optional) for name, (required, optional) in _TABLE.items()
}
