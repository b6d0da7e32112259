"""How a run ends: what is still open is closed as the kind of ending allows, then the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aguiapp import protocol
from aguiapp.models import Run
from aguiapp.protocol import Event, OpenItem


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """The terminal event that is owed: an error with a code, a cancellation, or success."""

    status: str
    thread_id: str
    run_id: str
    run_key: str
    code: str = ""
    message: str = ""

    def event(self) -> Event:
        """The event in wire form."""
        mark = {"aguiapp": {"runKey": self.run_key}}
        if self.status == Run.Status.ERROR:
            return {
                "type": "RUN_ERROR",
                "message": self.message,
                "code": self.code,
                "metadata": mark,
            }
        ids = {"threadId": self.thread_id, "runId": self.run_id}
        return {"type": "RUN_FINISHED", **ids, "outcome": {"type": str(self.status)}}


def closing(
    verifier: protocol.Verifier, terminal: Terminal, new_id: Callable[[], str]
) -> Iterator[Event]:
    """Closers for what is open, then the terminal event.

    Before an error open tool calls stay open: an END would tell clients to execute half an
    argument. Before a cancellation each gets END and a result that says so.
    """
    yield from closers(verifier, terminal.status, new_id)
    event = terminal.event()
    if terminal.status == Run.Status.SUCCESS and (pending := verifier.pending_tool_calls):
        event["outcome"]["pendingToolCallIds"] = pending
    yield event


def closers(verifier: protocol.Verifier, status: str, new_id: Callable[[], str]) -> Iterator[Event]:
    """Events that close what is open, as far as a terminal of that status wants it closed."""
    items = verifier.open_items if verifier.run_open else []
    for kind in ("text", "reasoning", "span", "tool", "step", "subagent"):
        for item in items:
            if item.kind == kind:
                yield from _closers(item, status, new_id)


_SIMPLE = {
    "text": ("TEXT_MESSAGE_END", "messageId"),
    "reasoning": ("REASONING_MESSAGE_END", "messageId"),
    "span": ("REASONING_END", "messageId"),
    "step": ("STEP_FINISHED", "stepName"),
}


def _closers(item: OpenItem, status: str, new_id: Callable[[], str]) -> Iterator[Event]:
    tag = {} if item.subagentRunId is None else {"subagentRunId": item.subagentRunId}
    if simple := _SIMPLE.get(item.kind):
        kind, name = simple
        yield {"type": kind, name: item.id, **tag}
    elif status != Run.Status.CANCELLED:
        return
    elif item.kind == "tool":
        yield {"type": "TOOL_CALL_END", "toolCallId": item.id, **tag}
        yield {
            "type": "TOOL_CALL_RESULT",
            "messageId": new_id(),
            "toolCallId": item.id,
            "content": "Error: the run was cancelled.",
            **tag,
        }
    elif item.kind == "subagent":
        yield {
            "type": "SUBAGENT_ERROR",
            "subagentRunId": item.id,
            "message": "The run was cancelled.",
            "code": "cancelled",
        }


def status_of(terminal: Event) -> str:
    """The run's status by its terminal event."""
    if terminal["type"] == "RUN_ERROR":
        return Run.Status.ERROR
    outcome = terminal.get("outcome") or {}
    known = {Run.Status.INTERRUPT, Run.Status.CANCELLED}
    return next((s for s in known if s == outcome.get("type")), Run.Status.SUCCESS)


def fields_of(terminal: Event) -> dict[str, Any]:
    """What the terminal event puts on the run's row."""
    found: dict[str, Any] = {
        "status": str(status_of(terminal)),
        "result": terminal.get("result"),
        "outcome": terminal.get("outcome"),
        "usage": terminal.get("usage"),
    }
    if terminal["type"] == "RUN_ERROR":
        found["error_code"] = str(terminal.get("code", ""))[:64]
        found["error_message"] = terminal["message"]
    return found
