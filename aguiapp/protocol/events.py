"""The 31 event types of AG-UI 1.0, their families, and the words shared by every stage."""

from dataclasses import dataclass, replace
from typing import Any

Event = dict[str, Any]

PROTOCOL_VERSION = "1.0"

# Stored in every event row: append only, never renumber.
TYPE_CODES: dict[str, int] = {
    "RUN_STARTED": 1,
    "RUN_FINISHED": 2,
    "RUN_ERROR": 3,
    "STEP_STARTED": 4,
    "STEP_FINISHED": 5,
    "TEXT_MESSAGE_START": 6,
    "TEXT_MESSAGE_CONTENT": 7,
    "TEXT_MESSAGE_END": 8,
    "TEXT_MESSAGE_CHUNK": 9,
    "TOOL_CALL_START": 10,
    "TOOL_CALL_ARGS": 11,
    "TOOL_CALL_END": 12,
    "TOOL_CALL_CHUNK": 13,
    "TOOL_CALL_RESULT": 14,
    "STATE_SNAPSHOT": 15,
    "STATE_DELTA": 16,
    "MESSAGES_SNAPSHOT": 17,
    "ACTIVITY_SNAPSHOT": 18,
    "ACTIVITY_DELTA": 19,
    "RAW": 20,
    "CUSTOM": 21,
    "REASONING_START": 22,
    "REASONING_MESSAGE_START": 23,
    "REASONING_MESSAGE_CONTENT": 24,
    "REASONING_MESSAGE_END": 25,
    "REASONING_MESSAGE_CHUNK": 26,
    "REASONING_END": 27,
    "REASONING_ENCRYPTED_VALUE": 28,
    "SUBAGENT_STARTED": 29,
    "SUBAGENT_FINISHED": 30,
    "SUBAGENT_ERROR": 31,
}
TYPE_NAMES: dict[int, str] = {code: name for name, code in TYPE_CODES.items()}
TYPES = frozenset(TYPE_CODES)

TERMINAL = frozenset({"RUN_FINISHED", "RUN_ERROR"})
LIFECYCLE = frozenset({"RUN_STARTED", "RUN_FINISHED", "RUN_ERROR"})
CHUNKS = frozenset({"TEXT_MESSAGE_CHUNK", "TOOL_CALL_CHUNK", "REASONING_MESSAGE_CHUNK"})
SUBAGENT = frozenset({"SUBAGENT_STARTED", "SUBAGENT_FINISHED", "SUBAGENT_ERROR"})
STATE = frozenset({"STATE_SNAPSHOT", "STATE_DELTA"})
# On these the tag is an unknown field; on the SUBAGENT types it is the identity, not a tag.
UNATTRIBUTED = frozenset({*LIFECYCLE, "MESSAGES_SNAPSHOT"})


class ProtocolError(Exception):
    """A rule of the protocol was broken: which one, by which event, in one sentence."""

    code = "protocol_violation"

    def __init__(self, rule: str, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.message = message
        self.index = index

    def __str__(self) -> str:
        where = "" if self.index is None else f" (event {self.index})"
        return f"{self.rule}: {self.message}{where}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong that was noted and survived, never hidden."""

    kind: str
    message: str
    path: str = ""
    index: int | None = None

    def at(self, index: int) -> "Finding":
        """Return the same finding, placed at an event of the stream."""
        return replace(self, index=index)


def text_of(value: object) -> str:
    """Name a value in an error, whatever it is, without echoing a long or hostile one."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "an array"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}..."
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 64):
        return repr(value)
    return "a big integer" if isinstance(value, int) else type(value).__name__
