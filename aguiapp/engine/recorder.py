"""The pure half of a run: what an agent hands over becomes JSON text fit for the log.

enforce -> expand chunks -> verify -> stamp -> encode once -> fold. Nothing here waits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aguiapp import conf, protocol
from aguiapp.agents import new_id
from aguiapp.engine import endings
from aguiapp.engine.documents import Documents
from aguiapp.engine.limits import LimitExceeded
from aguiapp.models import Run
from aguiapp.protocol import Event

#: Findings kept per run; the rest is only counted.
MAX_FINDINGS = 100


Encoded = tuple[int, str]

_DELTAS = frozenset({"STATE_DELTA", "ACTIVITY_DELTA"})
_STATING = frozenset({"STATE_SNAPSHOT", "ACTIVITY_SNAPSHOT"})
_MESSAGES = frozenset({"TEXT_MESSAGE_START", "REASONING_MESSAGE_START", "TOOL_CALL_RESULT"})
#: Events that name something new, and where; messages of a snapshot are named by it.
_NAMING: dict[str, tuple[str, ...]] = {
    "TEXT_MESSAGE_START": ("messageId",),
    "REASONING_MESSAGE_START": ("messageId",),
    "TOOL_CALL_START": ("toolCallId", "parentMessageId"),
    "TOOL_CALL_RESULT": ("messageId",),
    "ACTIVITY_SNAPSHOT": ("messageId",),
    "MESSAGES_SNAPSHOT": (),
}


class Recorder:
    """Judges and encodes the events of one run, and folds them as every reader will.

    What passed stands in `rows` as (type code, JSON text) until `drain`. A refused event raises
    ProtocolError or LimitExceeded and leaves no trace; what came before it stays. After the
    terminal event everything is a finding.
    """

    def __init__(
        self,
        *,
        thread_id: str,
        run_id: str,
        run_key: str,
        folder: protocol.Fold,
        now: Callable[[], int],
        limits: conf.Settings | None = None,
    ) -> None:
        self.fold = folder
        self.verifier = protocol.Verifier(strict=True, thread_id=thread_id, run_id=run_id)
        self.rows: list[Encoded] = []
        self.counts: Counter[str] = Counter()
        self.events = 0
        self.bytes = 0
        self.findings: list[dict[str, Any]] = []
        self.terminal: Event | None = None
        #: The agent opened the run itself, so it owes the terminal event.
        self.agent_started = False
        #: Events that came after the terminal one.
        self.late = 0
        self._ids = {"threadId": thread_id, "runId": run_id}
        self._run_key = run_key
        self._now = now
        self._upgrader = protocol.Upgrader(new_id)
        self._expander = protocol.Expander()
        self._halves = protocol.Halves()
        self._limits = limits or conf.get()
        self._silent = True
        self._documents = Documents(folder, self.find)
        #: Messages that this run has named: another one's id is a finding when it comes again.
        self._named: set[str] = set()

    def feed(self, raw: Any) -> None:
        """Take one event of the agent in any form."""
        wire = protocol.to_wire(raw)
        if protocol.conforms(wire):
            for explicit in self._expanded(wire):
                self._take(explicit, plain=True)
            return
        for upgraded in self._upgrader.feed(wire):
            event, warnings = protocol.enforce(upgraded)
            self._note(warnings)
            if event is not None:
                for explicit in self._expanded(event):
                    self._take(explicit)
        self._note(self._upgrader.drain())

    def _expanded(self, event: Event) -> list[Event]:
        """The event without chunks; an error does not complete a call that chunks left open."""
        events = self._expander.feed(event)
        if event["type"] == "RUN_ERROR":
            return [found for found in events if found["type"] != "TOOL_CALL_END"]
        return events

    def write(self, event: Event, *, free: bool = False, plain: bool = False) -> None:
        """Record an event; `free` ones pass the limits, or a full run could not end."""
        kind = event["type"]
        stamped = event if "timestamp" in event else {**event, "timestamp": self._now()}
        # What the server puts around the values of others may nest deeper than those do.
        depth = protocol.MAX_DEPTH if free else self._limits.JSON_DEPTH
        text = protocol.dumps(stamped, plain=plain, max_depth=depth)
        ascii_only = text.isascii()
        size = len(text) if ascii_only else len(text.encode())
        if not free:
            self._check_size(kind, size)
            if kind in _STATING:
                self._documents.stated(stamped, size)
        if kind == "MESSAGES_SNAPSHOT":
            self._documents.restated()
        if not plain or not (ascii_only or max(text) < "\U00010000"):
            # The fold holds what was written: the agent may go on changing what it handed over,
            # and a pair of halves has become one character.
            stamped = json.loads(text)
        self.verifier.feed(stamped)
        self.fold.feed(stamped)
        if self.fold.warnings:
            self._note(self.fold.drain())
        self.counts[kind] += 1
        self.events += 1
        self.bytes += size
        if kind in protocol.TERMINAL:
            self.terminal = stamped
        self.rows.append((protocol.TYPE_CODES[kind], text))

    def close(self, terminal: endings.Terminal) -> None:
        """Record everything that legally ends the run now."""
        for event in endings.closing(self.verifier, terminal, new_id):
            self._write_whole(event, free=True)

    def _fail(self, event: Event) -> None:
        """The agent ends with an error of its own: what is open is closed first."""
        for closer in endings.closers(self.verifier, Run.Status.ERROR, new_id):
            self._write_whole(closer, free=True)
        metadata = event.get("metadata") or {}
        mark = {"aguiapp": {"runKey": self._run_key}, **metadata}
        self._write_whole({**event, "metadata": mark})

    def _write_whole(self, event: Event, *, free: bool = False, plain: bool = False) -> None:
        """Write an event behind the halves of characters that it cuts off."""
        for whole in self._halves.feed(event):
            if whole is event or not free:
                self.write(whole, free=free, plain=plain)
            else:
                with suppress(protocol.ProtocolError):  # a half of what was refused
                    self.write(whole, free=True)

    def end_chunks(self) -> None:
        """The agent returned in order: what its chunks opened is complete."""
        for event in self._expander.feed({"type": "RUN_FINISHED", **self._ids})[:-1]:
            self._write_whole(event, free=True)

    def drain(self) -> list[Encoded]:
        """Hand over what was recorded since the last call."""
        rows, self.rows = self.rows, []
        return rows

    def _take(self, event: Event, *, plain: bool = False) -> None:
        kind = event["type"]
        if self.terminal is not None:
            self.late += 1
            self.find("after_terminal", kind)
            return
        silent, self._silent = self._silent, False
        if kind == "RUN_STARTED" and silent:
            self._claim_start(event)
            return
        if kind in _NAMING:
            self._check_names(kind, event)
        if kind in _DELTAS:
            event = self._documents.settled(event)
        elif kind == "RUN_ERROR":
            self._fail(event)
            return
        elif kind == "RUN_FINISHED":
            event, plain = self._completed(event), False
        self._write_whole(event, plain=plain)

    def _claim_start(self, event: Event) -> None:
        """The engine's RUN_STARTED stands already: the agent's must agree, and is not repeated."""
        for name, ours in self._ids.items():
            if event[name] != ours:
                raise protocol.ProtocolError(
                    "VERIFY-42", f"RUN_STARTED.{name} is {event[name]!r}, the input says {ours!r}"
                )
        self.agent_started = True

    def _check_names(self, kind: str, event: Event) -> None:
        """Names must be such that a client can send them back, and a call is made once."""
        names = [event[field] for field in _NAMING[kind] if field in event]
        for message in event.get("messages", ()):
            names += [message["id"], *(call["id"] for call in message.get("toolCalls") or ())]
        for name in names:
            if not protocol.is_id(name):
                raise protocol.ProtocolError("bad_id", f"{kind} names something {name[:60]!r}")
        if kind == "TOOL_CALL_START" and self.fold.has_tool_call(event["toolCallId"]):
            said = f"tool call {event['toolCallId']!r} is already part of this thread"
            raise protocol.ProtocolError("repeated_call", said)
        if kind in _MESSAGES and names[0] not in self._named and self.fold.has_message(names[0]):
            self.find("message_reused", f"{kind} of message {names[0]!r}, which the thread has")
        self._named.update(names)

    def _completed(self, event: Event) -> Event:
        """Name the calls that wait for a client: a late joiner cannot count them."""
        pending = self.verifier.pending_tool_calls
        outcome = event.get("outcome") or {"type": "success"}
        if not pending or outcome.get("type") != "success" or "pendingToolCallIds" in outcome:
            return event
        return {**event, "outcome": {**outcome, "pendingToolCallIds": pending}}

    # -- limits and findings ---------------------------------------------------

    def _check_size(self, kind: str, size: int) -> None:
        limits = self._limits
        if size > limits.EVENT_BYTES:
            raise LimitExceeded(
                "event_too_large",
                f"{kind} has {size} bytes; at most {limits.EVENT_BYTES} are allowed.",
            )
        if self.bytes + size > limits.RUN_BYTES:
            raise LimitExceeded("run_too_large", f"The run grew beyond {limits.RUN_BYTES} bytes.")
        if self.events >= limits.RUN_EVENTS:
            raise LimitExceeded("run_too_large", f"The run has {self.events} events already.")

    def find(self, kind: str, message: str) -> None:
        """Note something wrong that does not stop the run."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append({"kind": kind, "message": message[:500]})

    def _note(self, warnings: Any) -> None:
        for found in warnings:
            self.find(found.kind, found.message)
