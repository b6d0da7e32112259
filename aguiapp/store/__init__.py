"""The only writer and reader of the log.

Everything here is synchronous and blocks on the database; `call` takes it off the loop.
"""

from aguiapp.store import watchers
from aguiapp.store.inputs import digest, rebuild as rebuild_input
from aguiapp.store.lease import new_token
from aguiapp.store.openings import Abandoned, BeingEnded, Contended, Opened, Opening, open_run
from aguiapp.store.queue import claim, claimable, give_back, open_interrupts, queued, withdraw
from aguiapp.store.reads import (
    Mark,
    Stored,
    ThreadSnapshot,
    active_run,
    deliverable,
    end_position,
    first_kept,
    last_seq,
    marks,
    next_kept,
    pages,
    placed_runs,
    read,
    readable,
    run_at,
    run_by_key,
    snapshot,
)
from aguiapp.store.runs import (
    Ending,
    abandoned,
    add_findings,
    command,
    earlier_state_hashes,
    finish,
    holds,
    pending_commands,
    refresh,
    refresh_by_id,
    renew,
    take,
)
from aguiapp.store.sql import Row, database
from aguiapp.store.workers import call, close, executor, submit
from aguiapp.store.writer import Lane, current as writer

__all__ = [
    "Abandoned",
    "BeingEnded",
    "Contended",
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
    "claim",
    "claimable",
    "close",
    "command",
    "database",
    "deliverable",
    "digest",
    "earlier_state_hashes",
    "end_position",
    "executor",
    "finish",
    "first_kept",
    "give_back",
    "holds",
    "last_seq",
    "marks",
    "new_token",
    "next_kept",
    "open_interrupts",
    "open_run",
    "pages",
    "pending_commands",
    "placed_runs",
    "queued",
    "read",
    "readable",
    "rebuild_input",
    "refresh",
    "refresh_by_id",
    "renew",
    "run_at",
    "run_by_key",
    "snapshot",
    "submit",
    "take",
    "watchers",
    "withdraw",
    "writer",
]
