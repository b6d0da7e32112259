"""Ending a run from its stored events alone: its process died, or it does not let go."""

from __future__ import annotations

import logging

from aguiapp import protocol, store
from aguiapp.agents import new_id
from aguiapp.engine import endings
from aguiapp.engine.clock import now_ms
from aguiapp.engine.history import state_hash
from aguiapp.errors import RUN_ERROR_CODES, Fenced
from aguiapp.models import Run

logger = logging.getLogger("aguiapp.run")

SENTENCES = {
    "orphaned": "The server that ran this stopped unexpectedly. Please try again.",
    "shutdown": "The server was restarted while this ran. Please try again.",
    "store_failed": "The run could not be stored and was stopped.",
    "agent_failed": "Something went wrong while answering.",
    "incomplete": "The agent stopped before it was finished.",
}


def terminal(run: Run, *, status: str, code: str = "", message: str = "") -> endings.Terminal:
    """The terminal event owed to a run; the sentence follows from the code where none is given."""
    return endings.Terminal(
        status=status,
        thread_id=run.thread.thread_id,
        run_id=run.run_id,
        run_key=str(run.key),
        code=code,
        message=message or SENTENCES.get(code) or RUN_ERROR_CODES.get(code, ""),
    )


def end_stored(run: Run, token: int, *, status: str, code: str = "", detail: str = "") -> None:
    """End a run whose token we hold: fold what is stored, close what is open, write the terminal.

    Blocks on the database. Raises Fenced when the token is gone.
    """
    thread = run.thread
    before = store.snapshot(thread, at=run.offset).folder
    verifier = protocol.Verifier()
    counts: dict[str, int] = {}
    seq = size = 0
    events: list[protocol.Event] = []
    unreadable: list[dict[str, str]] = []
    for page in store.pages(run.pk):
        for row in page:
            seq, size = row.seq, size + len(row.payload.encode("utf-8", "surrogatepass"))
            try:
                event = store.readable(row.payload)
                verifier.feed(event)
            except (ValueError, protocol.ProtocolError):
                unreadable.append({"kind": "unreadable", "message": f"event {row.seq}"})
                continue
            before.feed(event)
            counts[event["type"]] = counts.get(event["type"], 0) + 1
    owed = terminal(run, status=status, code=code)
    if not verifier.run_open and status == Run.Status.CANCELLED:
        events.append(_start(run))
        verifier.feed(events[-1])
    events += endings.closing(verifier, owed, new_id)
    rows = []
    for event in events:
        stamped = {**event, "timestamp": now_ms()}
        before.feed(stamped)
        text = protocol.dumps(stamped)
        seq, size = seq + 1, size + len(text)
        rows.append(store.Row(seq, protocol.TYPE_CODES[event["type"]], text, now_ms()))
        counts[event["type"]] = counts.get(event["type"], 0) + 1
    ending = store.Ending(
        **endings.fields_of(events[-1]),
        counts=counts,
        error_detail=detail,
        findings=unreadable,
        fold_hash=state_hash(before.state),
    )
    store.finish(run.pk, token, rows, size, ending)


def _start(run: Run) -> protocol.Event:
    """RUN_STARTED for a run that was stopped before it wrote its own."""
    return {
        "type": "RUN_STARTED",
        "threadId": run.thread.thread_id,
        "runId": run.run_id,
        "protocolVersion": protocol.PROTOCOL_VERSION,
    }


def take_over(run: Run, *, status: str, code: str = "") -> bool:
    """Revoke the run's token and end it; False when somebody else was faster."""
    token = store.take(run)
    if token is None:
        return False
    try:
        end_stored(run, token, status=status, code=code)
    except Fenced:
        return False
    logger.warning("run ended from outside run=%s status=%s code=%s", run.key, status, code)
    return True


def sweep() -> list[Run]:
    """End every run whose process is gone; returns those that this call ended."""
    ended = []
    for run in store.abandoned():
        try:
            if take_over(run, status=Run.Status.ERROR, code="orphaned"):
                ended.append(run)
        except Exception:  # one run that cannot be ended must not keep the others
            logger.exception("run could not be ended run=%s", run.key)
    return ended
