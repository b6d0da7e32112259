"""What has happened in the current run: its phase, what is open, who owns what, which calls wait.

The verifier judges by it and the fold carries it along, so that a stream can be entered anywhere.
"""

from collections.abc import Callable
from typing import Any, Final

from aguiapp.protocol.events import Event
from aguiapp.protocol.opened import Opened
from aguiapp.protocol.owners import Owners

IDLE: Final = "idle"
RUNNING: Final = "running"
FINISHED: Final = "finished"
FAILED: Final = "failed"
# Phases are compared by identity on the hot path, also those that come out of JSON.
_PHASES: Final = {name: name for name in (IDLE, RUNNING, FINISHED, FAILED)}


class RunTrace:
    """Follows legal events; those that only add text leave no trace and need not be fed."""

    __slots__ = ("answered", "opened", "owners", "phase", "started", "subagents")

    def __init__(self) -> None:
        self.phase: str = IDLE
        self.opened = Opened()
        self.owners = Owners()
        # Every invocation of this run, ended or not: name -> the event that started it.
        self.subagents: dict[str, Event] = {}
        self.started: dict[str, None] = {}
        self.answered: set[str] = set()

    @property
    def pending(self) -> list[str]:
        """Calls this run started and did not answer, in the order they were made."""
        return [call for call in self.started if call not in self.answered]

    def follow(self, event: Event) -> None:
        """Take note of a legal event."""
        step = _STEPS.get(event["type"])
        if step is not None:
            step(self, event)

    def dump(self) -> dict[str, Any]:
        """Return it as a JSON value."""
        return {
            "phase": self.phase,
            "open": self.opened.dump(),
            "owners": self.owners.dump(),
            "subagents": list(self.subagents.values()),
            "started": list(self.started),
            "answered": sorted(self.answered),
        }

    def load(self, dumped: dict[str, Any]) -> None:
        """Become the trace that was dumped."""
        self.phase = _PHASES[dumped["phase"]]
        self.opened.load(dumped["open"])
        self.owners.load(dumped["owners"])
        self.subagents = {event["subagentRunId"]: event for event in dumped["subagents"]}
        self.started = dict.fromkeys(dumped["started"])
        self.answered = set(dumped["answered"])

    def _run_started(self, event: Event) -> None:
        self.phase = RUNNING
        self.opened.clear()
        self.owners.follow(event)
        self.subagents.clear()
        self.started.clear()
        self.answered.clear()

    def _run_finished(self, event: Event) -> None:
        self.phase = FINISHED
        self.opened.clear()

    def _run_error(self, event: Event) -> None:
        self.phase = FAILED
        self.opened.clear()

    def _open(self, event: Event) -> None:
        self.opened.track(event)
        self.owners.follow(event)

    def _track(self, event: Event) -> None:
        self.opened.track(event)

    def _call(self, event: Event) -> None:
        self._open(event)
        self.started.setdefault(event["toolCallId"])

    def _result(self, event: Event) -> None:
        self.owners.follow(event)
        self.answered.add(event["toolCallId"])

    def _own(self, event: Event) -> None:
        self.owners.follow(event)

    def _invoke(self, event: Event) -> None:
        self.opened.track(event)
        self.subagents[event["subagentRunId"]] = event


_STEPS: Final[dict[str, Callable[[RunTrace, Event], None]]] = {
    "RUN_STARTED": RunTrace._run_started,
    "RUN_FINISHED": RunTrace._run_finished,
    "RUN_ERROR": RunTrace._run_error,
    "TEXT_MESSAGE_START": RunTrace._open,
    "TEXT_MESSAGE_END": RunTrace._track,
    "TOOL_CALL_START": RunTrace._call,
    "TOOL_CALL_END": RunTrace._track,
    "TOOL_CALL_RESULT": RunTrace._result,
    "REASONING_START": RunTrace._open,
    "REASONING_END": RunTrace._track,
    "REASONING_MESSAGE_START": RunTrace._open,
    "REASONING_MESSAGE_END": RunTrace._track,
    "STEP_STARTED": RunTrace._track,
    "STEP_FINISHED": RunTrace._track,
    "ACTIVITY_SNAPSHOT": RunTrace._own,
    "MESSAGES_SNAPSHOT": RunTrace._own,
    "SUBAGENT_STARTED": RunTrace._invoke,
    "SUBAGENT_FINISHED": RunTrace._track,
    "SUBAGENT_ERROR": RunTrace._track,
}
