"""*_CHUNK events become explicit START, CONTENT and END.

Each lane (one per subagent, plus the parent agent's) holds at most one chunked item. A chunk
continues the item of its lane, or closes it and opens its own; other events close the lane
they belong to. Nothing is emitted at the end of a stream: what is open then was cut off.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from aguiapp.protocol.events import CHUNKS, LIFECYCLE, Event, ProtocolError, text_of


class _Form(NamedTuple):
    """How one kind of chunk is written out."""

    kind: str
    id: str
    start: str
    content: str
    end: str
    needs: tuple[str, ...]
    agreed: tuple[str, ...]


FORMS: Final[dict[str, _Form]] = {
    "TEXT_MESSAGE_CHUNK": _Form(
        "text message",
        "messageId",
        "TEXT_MESSAGE_START",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
        ("messageId",),
        ("role", "name"),
    ),
    "TOOL_CALL_CHUNK": _Form(
        "tool call",
        "toolCallId",
        "TOOL_CALL_START",
        "TOOL_CALL_ARGS",
        "TOOL_CALL_END",
        ("toolCallId", "toolCallName"),
        ("toolCallName", "parentMessageId"),
    ),
    "REASONING_MESSAGE_CHUNK": _Form(
        "reasoning message",
        "messageId",
        "REASONING_MESSAGE_START",
        "REASONING_MESSAGE_CONTENT",
        "REASONING_MESSAGE_END",
        ("messageId",),
        (),
    ),
}
# These close nothing; every other known type closes the lane of its own tag.
_ASIDE: Final = frozenset(
    {
        "RAW",
        "ACTIVITY_SNAPSHOT",
        "ACTIVITY_DELTA",
        "REASONING_ENCRYPTED_VALUE",
        "SUBAGENT_STARTED",
    }
)
_CLOSE_OWN: Final = frozenset(
    {
        "TEXT_MESSAGE_START",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
        "TOOL_CALL_START",
        "TOOL_CALL_ARGS",
        "TOOL_CALL_END",
        "TOOL_CALL_RESULT",
        "STATE_SNAPSHOT",
        "STATE_DELTA",
        "CUSTOM",
        "STEP_STARTED",
        "STEP_FINISHED",
        "REASONING_START",
        "REASONING_END",
        "REASONING_MESSAGE_START",
        "REASONING_MESSAGE_CONTENT",
        "REASONING_MESSAGE_END",
    }
)
_CLOSE_ALL: Final = LIFECYCLE | {"MESSAGES_SNAPSHOT"}
_CLOSE_NAMED: Final = frozenset({"SUBAGENT_FINISHED", "SUBAGENT_ERROR"})


@dataclass(slots=True)
class _Stream:
    """The chunked item a lane holds, with what its opener established."""

    type: str
    id: str
    owner: str | None
    agreed: dict[str, str | None]


class Expander:
    """Turns chunks into explicit events; everything else passes through untouched."""

    def __init__(self) -> None:
        self._lanes: dict[str | None, _Stream] = {}

    def feed(self, event: Event) -> list[Event]:
        """Return the events this one stands for; raise ProtocolError and stay as before."""
        kind = event["type"]
        if kind in CHUNKS:
            return self._chunk(event, FORMS[kind])
        if not self._lanes or kind in _ASIDE:
            return [event]
        if kind in _CLOSE_ALL:
            closed = [_end(stream) for stream in self._lanes.values()]
            self._lanes.clear()
            return [*closed, event]
        if kind in _CLOSE_OWN:
            return [*self._close(event.get("subagentRunId")), event]
        if kind in _CLOSE_NAMED and event.get("subagentRunId") is not None:
            return [*self._close(event["subagentRunId"]), event]
        return [event]

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the open lanes as a JSON value."""
        return [asdict(stream) for stream in self._lanes.values()]

    def restore(self, saved: list[dict[str, Any]]) -> None:
        """Become the expander that made the snapshot."""
        self._lanes = {lane["owner"]: _Stream(**lane) for lane in saved}

    def _close(self, owner: str | None) -> list[Event]:
        stream = self._lanes.pop(owner, None)
        return [] if stream is None else [_end(stream)]

    def _chunk(self, chunk: Event, form: _Form) -> list[Event]:
        lane = self._lane(chunk, form)
        stream = self._lanes.get(lane)
        name = chunk.get(form.id)
        if stream is not None and stream.type == chunk["type"] and name in (None, stream.id):
            _agree(stream, chunk, form)
            content = _content(stream, chunk, form)
            return [] if content is None else [content]
        for field in form.needs:
            if chunk.get(field) is None:
                raise ProtocolError("CHUNK-01", f"the first {chunk['type']} needs {field}")
        events = self._close(lane)
        opened = _open(chunk, form)
        self._lanes[lane] = opened
        events.append(_start(chunk, form))
        if "delta" in chunk or "rawEvent" in chunk:
            events.append(_written(opened, chunk, form))
        return events

    def _lane(self, chunk: Event, form: _Form) -> str | None:
        tag: str | None = chunk.get("subagentRunId")
        name = chunk.get(form.id)
        same = [stream for stream in self._lanes.values() if stream.type == chunk["type"]]
        if name is not None:
            for stream in same:
                if stream.id == name:
                    if tag is not None and tag != stream.owner:
                        raise ProtocolError(
                            "CHUNK-03", f"chunk of {form.kind} {text_of(name)} has another owner"
                        )
                    return stream.owner
            return tag
        if tag is not None:
            return tag
        owners = [stream.owner for stream in same]
        if None in owners or not owners:
            return None
        if len(owners) > 1:
            raise ProtocolError(
                "CHUNK-02", f"ambiguous {chunk['type']}: neither id nor owner, several are open"
            )
        return owners[0]


def _open(chunk: Event, form: _Form) -> _Stream:
    agreed = {field: chunk.get(field) for field in form.agreed}
    if agreed.get("role", "") is None:
        agreed["role"] = "assistant"
    return _Stream(chunk["type"], chunk[form.id], chunk.get("subagentRunId"), agreed)


def _agree(stream: _Stream, chunk: Event, form: _Form) -> None:
    for field, value in stream.agreed.items():
        if chunk.get(field) is not None and chunk[field] != value:
            raise ProtocolError(
                "CHUNK-04",
                f"chunk of {form.kind} {text_of(stream.id)} changes {field} to "
                f"{text_of(chunk[field])}",
            )


def _start(chunk: Event, form: _Form) -> Event:
    event: Event = {"type": form.start, form.id: chunk[form.id]}
    if chunk["type"] == "TEXT_MESSAGE_CHUNK":
        event["role"] = chunk.get("role", "assistant")
    elif chunk["type"] == "REASONING_MESSAGE_CHUNK":
        event["role"] = "reasoning"
    for field in ("name", "toolCallName", "parentMessageId"):
        if field in form.agreed and field in chunk:
            event[field] = chunk[field]
    for field in ("subagentRunId", "metadata"):
        if field in chunk:
            event[field] = chunk[field]
    return event


def _content(stream: _Stream, chunk: Event, form: _Form) -> Event | None:
    """A continuation says something by its delta, its metadata or its raw event."""
    if "delta" in chunk or "rawEvent" in chunk or "metadata" in chunk:
        return _written(stream, chunk, form)
    return None


def _written(stream: _Stream, chunk: Event, form: _Form) -> Event:
    event: Event = {"type": form.content, form.id: stream.id, "delta": chunk.get("delta", "")}
    owner = chunk.get("subagentRunId", stream.owner)
    if owner is not None:
        event["subagentRunId"] = owner
    for field in ("metadata", "rawEvent"):
        if field in chunk:
            event[field] = chunk[field]
    return event


def _end(stream: _Stream) -> Event:
    form = FORMS[stream.type]
    event: Event = {"type": form.end, form.id: stream.id}
    if stream.owner is not None:
        event["subagentRunId"] = stream.owner
    return event
