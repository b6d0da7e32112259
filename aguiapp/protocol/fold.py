"""The fold: messages, state and open items at any position of a stream.

It equals the official client's, message for message. Deltas are collected and joined when
somebody looks, so a long message costs its length once. Whatever an event or a caller hands
in is never changed: messages are copied when they enter, containers below them are replaced
rather than written to, and a snapshot copies the messages once more.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from aguiapp.protocol.events import Event, Finding, text_of
from aguiapp.protocol.opened import OpenItem
from aguiapp.protocol.patch import PatchError, PatchLimit, patch
from aguiapp.protocol.trace import RunTrace
from aguiapp.protocol.transcript import Message, Transcript, own

_ABSENT: Final[Any] = object()


class Snapshot(NamedTuple):
    """The fold at one position; later feeds do not change it.

    `trace` is a JSON value: what a fold needs to go on, and a joiner to come in, in mid-run.
    """

    messages: list[Message]
    state: Any
    open_items: list[OpenItem]
    pending_tool_calls: list[str]
    interrupts: list[dict[str, Any]]
    trace: dict[str, Any]


def fold(
    events: Iterable[Event], *, messages: Sequence[Message] = (), state: Any = _ABSENT
) -> Snapshot:
    """Fold explicit, enforced events from a starting point."""
    folded = Fold(messages=messages, state=state)
    for event in events:
        folded.feed(event)
    return folded.snapshot()


class Fold:
    """Applies explicit, enforced events in order; what does not fit becomes a finding."""

    def __init__(self, *, messages: Sequence[Message] = (), state: Any = _ABSENT) -> None:
        self._script = Transcript(messages)
        self._state: Any = {} if state is _ABSENT else state
        self._trace = RunTrace()
        self._named_pending: list[str] | None = None
        self._interrupts: list[dict[str, Any]] = []
        self._findings: list[Finding] = []
        self._handlers = self._table()

    @classmethod
    def from_snapshot(cls, saved: Snapshot) -> "Fold":
        """Go on from a snapshot, also from one that went through JSON."""
        restored = cls(messages=saved.messages, state=saved.state)
        restored._trace.load(saved.trace)
        if saved.pending_tool_calls != restored._trace.pending:
            restored._named_pending = list(saved.pending_tool_calls)
        restored._interrupts = list(saved.interrupts)
        return restored

    @property
    def state(self) -> Any:
        """The current state, not a copy: treat it as immutable, as the fold does."""
        return self._state

    @property
    def warnings(self) -> list[Finding]:
        """Findings since the last drain()."""
        return self._findings

    def drain(self) -> list[Finding]:
        """Hand over the findings and forget them."""
        found, self._findings = self._findings, []
        return found

    def has_message(self, name: str) -> bool:
        """Whether a message of this id is held."""
        return name in self._script.by_id

    def has_tool_call(self, name: str) -> bool:
        """Whether some message holds a tool call of this id."""
        return name in self._script.calls

    def activity(self, name: str) -> Message | None:
        """The activity of this id, not a copy: treat it as immutable."""
        held = self._script.by_id.get(name)
        return held if held is not None and held.get("role") == "activity" else None

    def feed(self, event: Event) -> None:
        """Apply one explicit event."""
        handler = self._handlers.get(event["type"])
        if handler is not None:
            handler(event)

    def snapshot(self) -> Snapshot:
        """Return the fold so far, safe from later feeds."""
        return Snapshot(
            self._script.copy(),
            self._state,
            self._trace.opened.items(),
            self._trace.pending if self._named_pending is None else list(self._named_pending),
            list(self._interrupts),
            self._trace.dump(),
        )

    def _note(self, kind: str, message: str) -> None:
        self._findings.append(Finding(kind, message))

    def _table(self) -> dict[str, Callable[[Event], None]]:
        follow = self._trace.follow
        return {
            "RUN_STARTED": self._run_started,
            "RUN_FINISHED": self._run_finished,
            "RUN_ERROR": follow,
            "TEXT_MESSAGE_START": self._text_start,
            "TEXT_MESSAGE_CONTENT": self._text_content,
            "TEXT_MESSAGE_END": self._text_end,
            "REASONING_MESSAGE_START": self._text_start,
            "REASONING_MESSAGE_CONTENT": self._text_content,
            "REASONING_MESSAGE_END": self._text_end,
            "TOOL_CALL_START": self._tool_start,
            "TOOL_CALL_ARGS": self._tool_args,
            "TOOL_CALL_END": self._tool_end,
            "TOOL_CALL_RESULT": self._tool_result,
            "STATE_SNAPSHOT": self._state_snapshot,
            "STATE_DELTA": self._state_delta,
            "MESSAGES_SNAPSHOT": self._messages_snapshot,
            "ACTIVITY_SNAPSHOT": self._activity_snapshot,
            "ACTIVITY_DELTA": self._activity_delta,
            "REASONING_ENCRYPTED_VALUE": self._encrypted,
            "REASONING_START": follow,
            "REASONING_END": follow,
            "STEP_STARTED": follow,
            "STEP_FINISHED": follow,
            "SUBAGENT_STARTED": follow,
            "SUBAGENT_FINISHED": follow,
            "SUBAGENT_ERROR": follow,
        }

    # -- runs -------------------------------------------------------------------------------

    def _run_started(self, event: Event) -> None:
        self._trace.follow(event)
        self._named_pending = None
        carried = event.get("input")
        for message in carried.get("messages", ()) if isinstance(carried, dict) else ():
            if message["id"] not in self._script.by_id:
                self._script.append(own(message))

    def _run_finished(self, event: Event) -> None:
        self._trace.follow(event)
        outcome = event.get("outcome") or {}
        interrupted = outcome.get("type") == "interrupt"
        self._interrupts = list(outcome["interrupts"]) if interrupted else []
        self._named_pending = list(outcome.get("pendingToolCallIds") or ()) or None

    # -- text and reasoning messages --------------------------------------------------------

    def _text_start(self, event: Event) -> None:
        self._trace.follow(event)
        name = event["messageId"]
        held = self._script.by_id.get(name)
        if held is not None:
            if held.get("role") == "activity":
                self._note("id_is_activity", f"message {text_of(name)} is an activity")
            else:
                _merge_metadata(held, event)
            return
        reasoning = event["type"] == "REASONING_MESSAGE_START"
        role = "reasoning" if reasoning else event.get("role", "assistant")
        message: Message = {"id": name, "role": role, "content": ""}
        if "name" in event:
            message["name"] = event["name"]
        self._script.append(_marked(message, event))

    def _text_content(self, event: Event) -> None:
        name = event["messageId"]
        parts = self._script.texts.get(name)
        if parts is None:
            parts = self._script.text_parts(name)
            if parts is None:
                self._no_message(name)
                return
        parts.append(event["delta"])
        if "metadata" in event:
            _merge_metadata(self._script.by_id[name], event)

    def _text_end(self, event: Event) -> None:
        self._trace.follow(event)
        name = event["messageId"]
        self._script.settle_text(name)
        held = self._script.by_id.get(name)
        if held is None:
            self._no_message(name)
        elif held.get("role") != "activity":
            _merge_metadata(held, event)

    def _no_message(self, name: str) -> None:
        # An activity of that id was named when the message was opened.
        if name not in self._script.by_id:
            self._note("target_not_found", f"no message {text_of(name)}")

    # -- tool calls -------------------------------------------------------------------------

    def _tool_start(self, event: Event) -> None:
        self._trace.follow(event)
        name = event["toolCallId"]
        if name in self._script.calls:
            self._reopen_call(self._script.calls[name][1], event)
            return
        call: dict[str, Any] = {
            "id": name,
            "type": "function",
            "function": {"name": event["toolCallName"], "arguments": ""},
        }
        _merge_metadata(call, event)
        self._script.add_call(self._host(event), call)

    def _reopen_call(self, call: dict[str, Any], event: Event) -> None:
        if call["function"]["name"] != event["toolCallName"]:
            self._note("tool_renamed", f"tool call {text_of(call['id'])} changed its name")
            call["function"]["name"] = event["toolCallName"]
        _merge_metadata(call, event)

    def _host(self, event: Event) -> Message:
        """The assistant message a new call belongs to, made when there is none."""
        parent = event.get("parentMessageId")
        held = None if parent is None else self._script.by_id.get(parent)
        if held is not None and held.get("role") == "assistant":
            return held
        if held is not None:
            self._note("parent_not_assistant", f"message {text_of(parent)} cannot hold a call")
        fresh = parent if parent is not None and held is None else event["toolCallId"]
        message: Message = {"id": fresh, "role": "assistant", "toolCalls": []}
        if fresh not in self._script.by_id:  # the client looks for a message before it tags one
            _tag(message, event)
        self._script.append(message)
        return message

    def _tool_args(self, event: Event) -> None:
        name = event["toolCallId"]
        parts = self._script.arguments.get(name)
        if parts is None:
            parts = self._script.argument_parts(name)
            if parts is None:
                self._note("target_not_found", f"no tool call {text_of(name)}")
                return
        parts.append(event["delta"])
        if "metadata" in event:
            _merge_metadata(self._script.calls[name][1], event)

    def _tool_end(self, event: Event) -> None:
        self._trace.follow(event)
        name = event["toolCallId"]
        self._script.settle_arguments(name)
        if name in self._script.calls:
            _merge_metadata(self._script.calls[name][1], event)
        else:
            self._note("target_not_found", f"no tool call {text_of(name)}")

    def _tool_result(self, event: Event) -> None:
        self._trace.follow(event)
        message: Message = {
            "id": event["messageId"],
            "toolCallId": event["toolCallId"],
            "role": "tool",
            "content": event["content"],
        }
        self._script.insert_result(_marked(message, event))

    # -- state ------------------------------------------------------------------------------

    def _state_snapshot(self, event: Event) -> None:
        self._state = event["snapshot"]

    def _state_delta(self, event: Event) -> None:
        patched = self._patched(self._state, event["delta"], "state_patch_failed")
        if patched is not _ABSENT:
            self._state = patched

    def _patched(self, document: Any, operations: Any, kind: str) -> Any:
        try:
            return patch(document, operations, official=True)
        except PatchLimit as problem:
            self._note("patch_limit", str(problem))
        except PatchError as problem:
            self._note(kind, str(problem))
        return _ABSENT

    # -- activities -------------------------------------------------------------------------

    def _activity_snapshot(self, event: Event) -> None:
        self._trace.follow(event)
        held = self._script.by_id.get(event["messageId"])
        replaced = event.get("replace") is not False
        if held is None:
            self._script.append(_activity(event))
        elif held.get("role") != "activity":
            if replaced:
                self._script.swap(held, _activity(event))
        else:
            if replaced:
                held["content"] = event["content"]
                held["activityType"] = event["activityType"]
                held.pop("subagentRunId", None)
                _tag(held, event)
            _merge_metadata(held, event)

    def _activity_delta(self, event: Event) -> None:
        name = event["messageId"]
        held = self._script.by_id.get(name)
        if held is None:
            self._note("target_not_found", f"no activity {text_of(name)}")
            return
        if held.get("role") != "activity":
            self._note("id_is_not_activity", f"message {text_of(name)} is no activity")
            return
        # The client merges metadata even when the patch then fails.
        _merge_metadata(held, event)
        content = {} if held.get("content") is None else held["content"]
        patched = self._patched(content, event["patch"], "activity_patch_failed")
        if patched is _ABSENT:
            return
        if not isinstance(patched, dict):
            self._note("activity_not_object", f"activity {text_of(name)} is no object any more")
        held["content"] = patched
        held["activityType"] = event["activityType"]

    # -- snapshots and encrypted values -----------------------------------------------------

    def _messages_snapshot(self, event: Event) -> None:
        self._trace.follow(event)
        self._script.reconcile(event)

    def _encrypted(self, event: Event) -> None:
        name = event["entityId"]
        target: dict[str, Any] | None = None
        if event["subtype"] == "tool-call":
            if name in self._script.calls:
                target = self._script.calls[name][1]
        else:
            target = self._script.by_id.get(name)
            if target is not None and target.get("role") == "activity":
                target = None
        if target is None:
            self._note("target_not_found", f"nothing to hold the value of {text_of(name)}")
            return
        target["encryptedValue"] = event["encryptedValue"]
        target.pop("encryptedValueType", None)
        if "encryptedValueType" in event:
            target["encryptedValueType"] = event["encryptedValueType"]


def _activity(event: Event) -> Message:
    message: Message = {
        "id": event["messageId"],
        "role": "activity",
        "activityType": event["activityType"],
        "content": event["content"],
    }
    return _marked(message, event)


def _marked(message: Message, event: Event) -> Message:
    """Give a new message the owner and metadata of the event that made it."""
    _tag(message, event)
    _merge_metadata(message, event)
    return message


def _tag(message: Message, event: Event) -> None:
    if event.get("subagentRunId") is not None:
        message["subagentRunId"] = event["subagentRunId"]


def _merge_metadata(target: dict[str, Any], event: Event) -> None:
    if "metadata" in event:
        target["metadata"] = {**(target.get("metadata") or {}), **event["metadata"]}
