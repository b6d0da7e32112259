"""The order rules: which event may follow which, and what must be closed when.

VERIFY-01..39 are what the official client enforces and always raise. VERIFY-41..45 are
duties the specification puts on producers only: `strict` raises for them too (our own
agents), otherwise they become findings (a remote's stream). VERIFY-40, a stream that just
stops, is the caller's to judge by `run_open`. A refused event leaves the verifier as it was,
so whoever drives the run can still close what is open.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from aguiapp.protocol.events import PROTOCOL_VERSION, Event, Finding, ProtocolError, text_of
from aguiapp.protocol.opened import KINDS, OpenItem
from aguiapp.protocol.owners import owner_name
from aguiapp.protocol.subagents import subagent_name
from aguiapp.protocol.trace import FAILED, FINISHED, RUNNING, RunTrace

_VERSION: Final = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")
_UNCLOSED: Final = {
    "step": ("VERIFY-32", "steps"),
    "text": ("VERIFY-33", "text messages"),
    "reasoning": ("VERIFY-34", "reasoning messages"),
    "span": ("VERIFY-35", "reasoning spans"),
    "tool": ("VERIFY-36", "tool calls"),
    "subagent": ("VERIFY-37", "subagents"),
}


class Verifier:
    """Judges a stream of enforced, chunk-free events, one by one."""

    def __init__(
        self, *, strict: bool = False, thread_id: str | None = None, run_id: str | None = None
    ) -> None:
        self._strict = strict
        self._thread_id = thread_id
        self._expected_run = run_id
        self._trace = RunTrace()
        self._owners = self._trace.owners
        self._opened = self._trace.opened
        self._run_id: str | None = None
        self._seen_runs: set[str] = set()
        self._texts: set[str] = set()
        self._calls: set[str] = set()
        self._findings: list[Finding] = []
        self._handlers = self._table()

    @property
    def phase(self) -> str:
        """Where the current run stands: idle, running, finished or failed."""
        return self._trace.phase

    @property
    def run_open(self) -> bool:
        """Whether a run was started and has no terminal event yet."""
        return self._trace.phase is RUNNING

    @property
    def open_items(self) -> list[OpenItem]:
        """Everything open, in the order it was opened."""
        return self._opened.items()

    @property
    def pending_tool_calls(self) -> list[str]:
        """Calls this run started and did not answer, in the order they were made."""
        return self._trace.pending

    @property
    def warnings(self) -> list[Finding]:
        """Findings since the last drain()."""
        return self._findings

    def drain(self) -> list[Finding]:
        """Hand over the findings and forget them."""
        found, self._findings = self._findings, []
        return found

    def feed(self, event: Event) -> None:
        """Accept the event or raise ProtocolError naming the rule."""
        kind = event["type"]
        if self._trace.phase is not RUNNING:
            self._gate(kind)
        if event.get("subagentRunId") is None and "subagentRunId" in event:
            raise ProtocolError("VERIFY-07", f"{kind} with subagentRunId null: leave it out")
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(event)

    def snapshot(self) -> dict[str, Any]:
        """Return everything needed to go on later, as a JSON value."""
        return {
            "runId": self._run_id,
            "threadId": self._thread_id,
            "seen": sorted(self._seen_runs),
            "trace": self._trace.dump(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Become the verifier that made the snapshot; strictness stays as constructed."""
        self._run_id = saved["runId"]
        self._thread_id = saved["threadId"]
        self._seen_runs = set(saved["seen"])
        self._trace.load(saved["trace"])
        self._texts = {item.id for item in self._opened.of("text")}
        self._calls = {item.id for item in self._opened.of("tool")}

    def _table(self) -> dict[str, Callable[[Event], None]]:
        return {
            "RUN_STARTED": self._run_started,
            "RUN_FINISHED": self._run_finished,
            "RUN_ERROR": self._follow,
            "TEXT_MESSAGE_START": self._text_start,
            "TEXT_MESSAGE_CONTENT": self._text_content,
            "TEXT_MESSAGE_END": self._text_end,
            "TOOL_CALL_START": self._tool_start,
            "TOOL_CALL_ARGS": self._tool_args,
            "TOOL_CALL_END": self._tool_end,
            "TOOL_CALL_RESULT": self._trace.follow,
            "STEP_STARTED": self._step_started,
            "STEP_FINISHED": self._step_finished,
            "REASONING_START": self._span_start,
            "REASONING_END": self._span_end,
            "REASONING_MESSAGE_START": self._reasoning_start,
            "REASONING_MESSAGE_CONTENT": self._reasoning_content,
            "REASONING_MESSAGE_END": self._reasoning_end,
            "REASONING_ENCRYPTED_VALUE": self._encrypted,
            "ACTIVITY_SNAPSHOT": self._trace.follow,
            "ACTIVITY_DELTA": self._activity_delta,
            "MESSAGES_SNAPSHOT": self._messages_snapshot,
            "SUBAGENT_STARTED": self._subagent_started,
            "SUBAGENT_FINISHED": self._subagent_ended,
            "SUBAGENT_ERROR": self._subagent_ended,
        }

    # -- the gate ---------------------------------------------------------------------------

    def _gate(self, kind: str) -> None:
        if kind == "RUN_STARTED":
            return
        if self._trace.phase is FAILED:
            raise ProtocolError("VERIFY-01", f"{kind} after RUN_ERROR")
        if kind == "RUN_ERROR":
            return
        if self._trace.phase is FINISHED:
            raise ProtocolError("VERIFY-02", f"{kind} after RUN_FINISHED")
        raise ProtocolError("VERIFY-03", f"the first event must be RUN_STARTED, not {kind}")

    # -- runs -------------------------------------------------------------------------------

    def _run_started(self, event: Event) -> None:
        if self._trace.phase is RUNNING:
            raise ProtocolError("VERIFY-04", "RUN_STARTED while a run is active")
        carried = event.get("input")
        messages = carried.get("messages", ()) if isinstance(carried, dict) else ()
        _no_null_tags(messages)
        self._producer_start(event["threadId"], event["runId"])
        if _newer(event.get("protocolVersion")):
            declared = text_of(event["protocolVersion"])
            said = f"the run declares protocol {declared}, this side speaks {PROTOCOL_VERSION}"
            self._findings.append(Finding("protocol_version", said))
        self._follow(event)
        self._thread_id = self._thread_id or event["threadId"]
        self._run_id = event["runId"]
        self._seen_runs.add(event["runId"])

    def _producer_start(self, thread_id: str, run_id: str) -> None:
        if self._thread_id is not None and thread_id != self._thread_id:
            self._duty("VERIFY-42", "RUN_STARTED names another thread than this stream's")
        if self._expected_run is not None and run_id != self._expected_run:
            self._duty("VERIFY-41", "RUN_STARTED names another run than the requested one")
        if run_id in self._seen_runs:
            self._duty("VERIFY-43", f"run id {text_of(run_id)} is used again")

    def _follow(self, event: Event) -> None:
        """A run begins or ends: nothing stays open."""
        self._trace.follow(event)
        self._texts.clear()
        self._calls.clear()

    def _run_finished(self, event: Event) -> None:
        outcome = event.get("outcome")
        outcome = outcome if isinstance(outcome, dict) else {}
        interrupts = outcome.get("interrupts", ()) if outcome.get("type") == "interrupt" else ()
        _no_null_tags(interrupts)
        if self._opened:
            left = next(items for kind in KINDS if (items := self._opened.of(kind)))
            rule, what = _UNCLOSED[left[0].kind]
            names = ", ".join(item.id for item in left[:5])
            raise ProtocolError(rule, f"RUN_FINISHED while {what} are open: {names}")
        self._producer_finish(event, outcome, interrupts)
        self._trace.follow(event)

    def _producer_finish(self, event: Event, outcome: Any, interrupts: Iterable[Any]) -> None:
        if event["runId"] != self._run_id:
            self._duty("VERIFY-41", "RUN_FINISHED names another run than the open one")
        if event["threadId"] != self._thread_id:
            self._duty("VERIFY-42", "RUN_FINISHED names another thread than this stream's")
        ids = [interrupt["id"] for interrupt in interrupts]
        if len(set(ids)) != len(ids):
            self._duty("VERIFY-44", "two interrupts of one outcome share an id")
        named = outcome.get("pendingToolCallIds")
        if named and named != self.pending_tool_calls:
            self._duty("VERIFY-45", "pendingToolCallIds is not what this run left unanswered")

    def _duty(self, rule: str, message: str) -> None:
        if self._strict:
            raise ProtocolError(rule, message)
        self._findings.append(Finding(rule, message))

    def _messages_snapshot(self, event: Event) -> None:
        _no_null_tags(event["messages"])
        self._trace.follow(event)

    # -- text messages ----------------------------------------------------------------------

    def _text_start(self, event: Event) -> None:
        name = event["messageId"]
        if name in self._texts:
            raise ProtocolError("VERIFY-09", f"text message {text_of(name)} is already open")
        self._owners.require("VERIFY-09", "message", name, event)
        self._trace.follow(event)
        self._texts.add(name)

    def _text_content(self, event: Event) -> None:
        name = event.get("messageId")
        if name not in self._texts:
            raise ProtocolError(
                "VERIFY-10", f"{event['type']} for text message {text_of(name)}, which is not open"
            )
        if "subagentRunId" in event:
            self._owners.require("VERIFY-10", "message", name, event)

    def _text_end(self, event: Event) -> None:
        self._text_content(event)
        self._texts.discard(event["messageId"])
        self._trace.follow(event)

    # -- tool calls -------------------------------------------------------------------------

    def _tool_start(self, event: Event) -> None:
        name = event["toolCallId"]
        if name in self._calls:
            raise ProtocolError("VERIFY-11", f"tool call {text_of(name)} is already open")
        parent = event.get("parentMessageId")
        self._owners.require("VERIFY-12", "message", parent, event)
        self._owners.require("VERIFY-13", "call", name, event)
        tag = event.get("subagentRunId")
        messages, calls = self._owners.of("message"), self._owners.of("call")
        reopened = tag is None and name in calls and parent in messages
        if reopened and calls[name] != self._owners.inherited(event):
            raise ProtocolError(
                "VERIFY-13", f"tool call {text_of(name)} is reopened under another owner"
            )
        self._trace.follow(event)
        self._calls.add(name)

    def _tool_args(self, event: Event) -> None:
        name = event.get("toolCallId")
        if name not in self._calls:
            raise ProtocolError(
                "VERIFY-15", f"{event['type']} for tool call {text_of(name)}, which is not open"
            )
        if "subagentRunId" in event:
            self._owners.require("VERIFY-15", "call", name, event)

    def _tool_end(self, event: Event) -> None:
        self._tool_args(event)
        self._calls.discard(event["toolCallId"])
        self._trace.follow(event)

    # -- steps ------------------------------------------------------------------------------

    def _step_started(self, event: Event) -> None:
        name, owner = event["stepName"], event.get("subagentRunId")
        if self._opened.has("step", name, owner):
            raise ProtocolError("VERIFY-17", f"step {text_of(name)} is already open")
        self._trace.follow(event)

    def _step_finished(self, event: Event) -> None:
        name, owner = event.get("stepName"), event.get("subagentRunId")
        if isinstance(name, str) and self._opened.has("step", name, owner):
            self._trace.follow(event)
            return
        others = [item for item in self._opened.of("step") if item.id == name]
        if others:
            raise ProtocolError(
                "VERIFY-18",
                f"step {text_of(name)} is open under {owner_name(others[0].subagentRunId)}, "
                f"not under {owner_name(owner)}",
            )
        raise ProtocolError("VERIFY-18", f"step {text_of(name)} was not started")

    # -- reasoning --------------------------------------------------------------------------

    def _span_start(self, event: Event) -> None:
        self._open_reasoning("span", "VERIFY-19", event)

    def _span_end(self, event: Event) -> None:
        self._need_reasoning("span", "VERIFY-19", event)
        self._trace.follow(event)

    def _reasoning_start(self, event: Event) -> None:
        self._open_reasoning("reasoning", "VERIFY-20", event)

    def _reasoning_content(self, event: Event) -> None:
        self._need_reasoning("reasoning", "VERIFY-20", event)

    def _reasoning_end(self, event: Event) -> None:
        self._need_reasoning("reasoning", "VERIFY-20", event)
        self._trace.follow(event)

    def _open_reasoning(self, kind: str, rule: str, event: Event) -> None:
        name = event["messageId"]
        if self._opened.has(kind, name):
            raise ProtocolError(rule, f"{kind} {text_of(name)} is already open")
        self._owners.require("VERIFY-21", "reasoning", name, event)
        self._trace.follow(event)

    def _need_reasoning(self, kind: str, rule: str, event: Event) -> None:
        name: Any = event.get("messageId")
        if not self._opened.has(kind, name):
            raise ProtocolError(rule, f"{event['type']} for {text_of(name)}, which is not open")
        self._owners.require("VERIFY-21", "reasoning", name, event)

    def _encrypted(self, event: Event) -> None:
        name = event.get("entityId")
        if event.get("subtype") == "tool-call":
            bucket = "call"
        else:
            bucket = "message" if name in self._owners.of("message") else "reasoning"
        self._owners.require("VERIFY-23", bucket, name, event)

    # -- activities -------------------------------------------------------------------------

    def _activity_delta(self, event: Event) -> None:
        self._owners.require("VERIFY-25", "activity", event.get("messageId"), event)

    # -- subagents --------------------------------------------------------------------------

    def _subagent_started(self, event: Event) -> None:
        name = subagent_name(event)
        if self._opened.has("subagent", name):
            raise ProtocolError("VERIFY-28", f"subagent {text_of(name)} is already active")
        if name in self._trace.subagents:
            raise ProtocolError("VERIFY-28", f"subagent {text_of(name)} has ended in this run")
        parent = event.get("parentSubagentRunId")
        if parent is not None and parent not in self._trace.subagents:
            raise ProtocolError("VERIFY-28", f"parent subagent {text_of(parent)} is unknown")
        self._trace.follow(event)

    def _subagent_ended(self, event: Event) -> None:
        name = subagent_name(event)
        if not self._opened.has("subagent", name):
            raise ProtocolError("VERIFY-29", f"subagent {text_of(name)} is not active")
        self._trace.follow(event)


def _newer(version: Any) -> bool:
    """Whether a declared version is newer than ours, or cannot be read; absent is older."""
    if version is None:
        return False
    if not _VERSION.fullmatch(str(version)):
        return True
    return _numbers(version) > _numbers(PROTOCOL_VERSION)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _no_null_tags(holders: Iterable[Any]) -> None:
    for holder in holders:
        if holder.get("subagentRunId", "") is None:
            raise ProtocolError("VERIFY-07", "subagentRunId null inside the event: leave it out")
