"""Ending a run from its stored events alone: its process died, or it does not let go."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from aguiapp import conf, protocol, store
from aguiapp.agents import new_id
from aguiapp.engine import endings, opening
from aguiapp.engine.clock import moment, now_ms
from aguiapp.engine.history import state_hash
from aguiapp.errors import RUN_ERROR_CODES, Fenced
from aguiapp.models import Run
from aguiapp.protocol.restate import run_started

logger = logging.getLogger("aguiapp.run")

SENTENCES = {
    "orphaned": "The server that ran this stopped unexpectedly. Please try again.",
    "shutdown": "The server was restarted while this ran. Please try again.",
    "run_timeout": "This took too long and was stopped.",
    "idle_timeout": "Nothing came for too long, so this was stopped.",
    "stale_history": "The conversation moved on before this edit's turn came. Please try again.",
    "forbidden": "You may not speak here any more.",
    "agent_not_ready": "The agent was not ready. Please try again.",
    "store_failed": "The run could not be stored and was stopped.",
    "agent_failed": "Something went wrong while answering.",
    "incomplete": "The agent stopped before it was finished.",
}

#: Ends of turns whose messages never became part of the thread.
UNHEARD = frozenset({"stale_history", "forbidden"})


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


@dataclass
class _Stored:
    """What is known of a run from its rows: fold and order rules, counters, what is unreadable."""

    folder: protocol.Fold
    verifier: protocol.Verifier = field(default_factory=protocol.Verifier)
    counts: Counter[str] = field(default_factory=Counter)
    seq: int = 0
    bytes: int = 0
    findings: list[dict[str, str]] = field(default_factory=list)
    rows: list[store.Row] = field(default_factory=list)
    first: datetime | None = None

    def read(self, run: Run) -> None:
        """Take in the stored rows; one that cannot be read breaks only itself."""
        for page in store.pages(run.pk):
            for row in page:
                self.seq = row.seq
                self.first = self.first or row.created
                self.bytes += len(row.payload.encode("utf-8", "surrogatepass"))
                try:
                    self._take(store.readable(row.payload))
                except (ValueError, protocol.ProtocolError):
                    found = {"kind": "unreadable", "message": f"event {row.seq}"}
                    self.findings.append(found)

    def write(self, event: protocol.Event) -> None:
        """Add an event of ours behind the stored ones."""
        stamped = {**event, "timestamp": now_ms()}
        text = protocol.dumps(stamped)
        self._take(stamped)
        self.seq += 1
        self.bytes += len(text.encode())
        code = protocol.TYPE_CODES[event["type"]]
        self.rows.append(store.Row(self.seq, code, text, now_ms()))

    def _take(self, event: protocol.Event) -> None:
        self.verifier.feed(event)
        self.folder.feed(event)
        self.counts[event["type"]] += 1


def end_stored(
    run: Run,
    token: int,
    *,
    status: str,
    code: str = "",
    detail: str = "",
    next_token: int = 0,
) -> Run | None:
    """End a run whose token we hold: fold what is stored, close what is open, write the terminal.

    A run that died before it wrote anything gets its beginning first: the turn of its user is in
    its input, and must not be lost. Returns the run that the slot went to, see store.finish.
    Blocks on the database. Raises Fenced when the token is gone.
    """
    stored = _Stored(store.snapshot(run.thread, at=run.offset).folder)
    stored.read(run)
    if not stored.seq:
        for event in _beginning(run, echoes=code not in UNHEARD):
            stored.write(event)
    owed = terminal(run, status=status, code=code)
    events = list(endings.closing(stored.verifier, owed, new_id))
    for event in events:
        stored.write(event)
    ending = store.Ending(
        **endings.fields_of(events[-1]),
        counts=dict(stored.counts),
        error_detail=detail,
        findings=stored.findings,
        fold_hash=state_hash(stored.folder.state),
        first_event_at=stored.first or moment(stored.rows[0].created),
    )
    return store.finish(run.pk, token, stored.rows, stored.bytes, ending, next_token=next_token)


def _beginning(run: Run, *, echoes: bool) -> list[protocol.Event]:
    """What the run would have written first, from its stored input."""
    bare = [run_started({"threadId": run.thread.thread_id, "runId": run.run_id})]
    if not echoes:
        return bare
    try:
        given = protocol.parse_input(store.rebuild_input(run), max_depth=conf.get().JSON_DEPTH)
        return opening.read(run.thread, run, given).events
    except Exception:  # whatever is wrong with its input, the run must end
        logger.exception("the run's input could not be read run=%s", run.key)
        return bare


@dataclass(frozen=True)
class Ended:
    """A run was ended from outside; its slot went to `following`."""

    following: Run | None


def take_over(run: Run, *, status: str, code: str = "", promotes: bool = False) -> Ended | None:
    """Revoke the run's token and end it; None when somebody else was faster.

    With `promotes` the next queued run gets the slot, for the caller to drive.
    """
    token = store.take(run)
    if token is None:
        return None
    next_token = store.new_token() if promotes else 0
    try:
        following = end_stored(run, token, status=status, code=code, next_token=next_token)
    except Fenced:
        return None
    logger.warning("run ended from outside run=%s status=%s code=%s", run.key, status, code)
    return Ended(following)


def sweep() -> list[Run]:
    """End every run whose process is gone, for commands; returns those that this call ended."""
    ended = []
    for run in store.abandoned():
        try:
            if take_over(run, status=Run.Status.ERROR, code="orphaned"):
                ended.append(run)
        except Exception:  # one run that cannot be ended must not keep the others
            logger.exception("run could not be ended run=%s", run.key)
    return ended
