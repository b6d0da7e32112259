"""Runs a case: over the wire and through every stage of a consumer, and sees what comes out."""

import json
from dataclasses import dataclass, field
from typing import Any

from aguiapp import protocol
from tests.conformance.corpus import Case
from tests.protocol import cases


@dataclass(slots=True)
class Seen:
    """What a client made of a stream, up to its end or to the rejection."""

    events: list[Any] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    state: Any = None
    interrupts: list[Any] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    request: Any = None
    rejected: bool = False
    error: str = ""
    rule: str | None = None
    index: int | None = None

    @property
    def outcome(self) -> str:
        """The word of the corpus for how the stream ended."""
        return "failed" if self.rejected else "completed"

    @property
    def run_error(self) -> str | None:
        """What the last RUN_ERROR said; None when the producer reported no failure."""
        said = [event["message"] for event in self.events if event["type"] == "RUN_ERROR"]
        return said[-1] if said else None


class Consumer(cases.Client):
    """The pipeline of the conformance vectors, which also remembers what it delivered."""

    def __init__(self, case: Case) -> None:
        start = {"messages": case.input.get("messages", []), "state": case.input.get("state")}
        super().__init__(
            {"initial": {**start, "state": {} if start["state"] is None else start["state"]}}
        )
        self.verifier = protocol.Verifier(strict=case.client.get("strict", False))
        self.decoder = protocol.SSEDecoder()
        self.seen = Seen()

    def receive(self, raw: Any) -> None:
        """Take one element of a stream as the frame it is on the wire."""
        for event in self.decoder.feed(b"data: " + json.dumps(raw).encode() + b"\n\n"):
            self.feed(event)

    def feed(self, event: Any) -> None:
        try:
            # What is modern already passes the upgrader of the whole pipeline untouched.
            for modern in self.upgrader.feed(event):
                self.note(event, self.upgrader.drain())
                self.note(event, protocol.enforce(modern).warnings)
                super().feed(modern)
        finally:
            self.note(event, self.upgrader.drain())
            self.note(event, [*self.verifier.drain(), *self.fold.drain()])

    def note(self, event: Any, findings: Any) -> None:
        """Write findings as one line each: what, at which JSON Pointer, of which event."""
        for found in findings:
            pointer = cases.slashed(found.path) if found.path else ""
            self.seen.warnings.append(
                f"{found.kind} {pointer} {found.message} ({event.get('type')})"
            )

    def _terminal(self, event: Any) -> None:
        super()._terminal(event)
        self.seen.events.append(event)


def run(case: Case) -> Seen:
    """Feed the whole stream, or as much of it as is accepted."""
    consumer = Consumer(case)
    seen = consumer.seen
    try:
        seen.request = _request(case, consumer)
        for index, raw in enumerate(case.stream):
            seen.index = index
            consumer.receive(raw)
        seen.index = len(case.stream)
        _whole(consumer.verifier)
        seen.index = None
    except protocol.ProtocolError as problem:
        seen.rejected, seen.error, seen.rule = True, str(problem), problem.rule
    final = consumer.fold.snapshot()
    seen.messages, seen.state = final.messages, final.state
    seen.interrupts, seen.pending = final.interrupts, final.pending_tool_calls
    return seen


def _request(case: Case, consumer: Consumer) -> Any:
    """Judge the run input as it would be sent; there is no client that could send it."""
    given = {"messages": [], **case.input}
    request, findings = protocol.check_input({**case.first_run(), **given})
    consumer.note({"type": "RunAgentInput"}, findings)
    return request


def _whole(verifier: protocol.Verifier) -> None:
    """Judge the end of a stream, which the verifier leaves to its caller."""
    if verifier.phase == "idle" or verifier.run_open:
        raise protocol.ProtocolError("VERIFY-40", "the stream ended without a terminal event")
