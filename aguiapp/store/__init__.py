"""The only writer and reader of the log.

Everything here is synchronous and blocks on the database; `call` takes it off the loop.
"""

from aguiapp.store.inputs import digest, rebuild as rebuild_input
from aguiapp.store.reads import (
    Mark,
    Stored,
    ThreadSnapshot,
    active_run,
    end_position,
    last_seq,
    marks,
    pages,
    placed_runs,
    read,
    run_at,
    run_by_key,
    snapshot,
)
from aguiapp.store.runs import (
    Abandoned,
    Ending,
    Opened,
    Opening,
    abandoned,
    add_findings,
    command,
    earlier_state_hashes,
    finish,
    open_interrupts,
    open_run,
    pending_commands,
    refresh,
    renew,
    take,
)
from aguiapp.store.sql import Row, database
from aguiapp.store.workers import call, close, executor, submit
from aguiapp.store.writer import Lane, current as writer

__all__ = [
    "Abandoned",
    "Ending",
    "Lane",
    "Mark",
    "Opened",
    "Opening",
    "Row",
    "Stored",
    "ThreadSnapshot",
    "abandoned",
    "active_run",
    "add_findings",
    "call",
    "close",
    "command",
    "database",
    "digest",
    "earlier_state_hashes",
    "end_position",
    "executor",
    "finish",
    "last_seq",
    "marks",
    "open_interrupts",
    "open_run",
    "pages",
    "pending_commands",
    "placed_runs",
    "read",
    "rebuild_input",
    "refresh",
    "renew",
    "run_at",
    "run_by_key",
    "snapshot",
    "submit",
    "take",
    "writer",
]
