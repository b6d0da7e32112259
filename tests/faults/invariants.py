"""What holds of every run and every reader, whatever broke."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from django.utils import timezone

from aguiapp import protocol, store
from aguiapp.models import Run, RunEvent, Thread
from tests.live.servers import DEADLINE, Person, Reader, ended, legal, stored, until

#: A thread takes its next run within this many seconds once the one before has ended.
AT_ONCE = 5.0


def hold(
    thread_id: str, *readers: Reader, by: Person | None = None, timeout: float = DEADLINE
) -> list[Run]:
    """Everything, for one thread and those who read it; `by` is who posts the run after.

    Returns the thread's runs. A thread that is not there must have shown nothing to anybody.
    """
    keys = list(runs_of(thread_id).values_list("key", flat=True))
    if not keys:
        assert not any(reader.payloads for reader in readers)
        return []
    found = [run_is_sound(str(key), timeout) for key in keys]
    is_in_the_log(found[0].thread, readers)
    if by is not None:
        before = [stored(str(key)) for key in keys]
        takes_a_new_run(by, thread_id)
        assert [stored(str(key)) for key in keys] == before
    return found


def runs_of(thread_id: str) -> Any:
    """The runs of a thread in their order."""
    return Run.objects.filter(thread__thread_id=thread_id).order_by("offset", "pk")


def run_is_sound(key: str, timeout: float = DEADLINE) -> Run:
    """A run ends, once, as its last event; its rows are gapless and legal and its row agrees."""
    run = ended(key, timeout)
    rows = stored(key)
    events = [json.loads(row) for row in rows]
    terminals = [index for index, event in enumerate(events) if event["type"] in protocol.TERMINAL]
    assert terminals == [len(events) - 1], f"run {key}: terminals at {terminals} of {len(events)}"
    assert events[0]["type"] == "RUN_STARTED"
    legal(rows)
    row_agrees(run, rows, events)
    turn_is_kept(run)
    return run


def row_agrees(run: Run, rows: list[str], events: list[dict[str, Any]]) -> None:
    """The run's row says what its events say."""
    last = events[-1]
    outcome = (last.get("outcome") or {}).get("type", "success")
    status = "error" if last["type"] == "RUN_ERROR" else outcome
    assert (run.status, run.error_code) == (status, last.get("code", ""))
    assert (run.last_seq, sum(run.counts.values())) == (len(rows), len(rows))
    assert run.bytes == sum(len(row.encode()) for row in rows)
    assert (run.lease_token, run.lease_expires) == (None, None)
    assert run.finished_at is not None
    assert run.finished_at <= timezone.now()


def turn_is_kept(run: Run) -> None:
    """What the person said in this run stands in the thread."""
    said = json.loads(store.rebuild_input(run))["messages"]
    kept = {message["id"] for message in store.snapshot(run.thread).fold.messages}
    assert kept.issuperset(message["id"] for message in said)


def log_of(thread: Thread) -> dict[int, str]:
    """What is stored of a thread, by position; the positions are 1 to n."""
    rows = RunEvent.objects.filter(run__thread=thread).order_by("run__offset", "seq")
    found: list[tuple[int, str]] = [
        ((offset or 0) + seq, payload)
        for offset, seq, payload in rows.values_list("run__offset", "seq", "payload")
    ]
    assert [position for position, _ in found] == list(range(1, len(found) + 1))
    return dict(found)


def is_in_the_log(thread: Thread, readers: Iterable[Reader]) -> None:
    """Whatever a reader got stands in the log at its cursor, byte for byte, and in a row."""
    log = log_of(thread)
    for reader in readers:
        got = [(frame.id, frame.data) for frame in list(reader.frames) if frame.id]
        positions = [int(cursor.rpartition("-")[2]) for cursor, _ in got]
        for (cursor, payload), position in zip(got, positions, strict=True):
            assert log.get(position) == payload, f"{cursor}: {payload!r}"
        first = positions[0] if positions else 0
        assert positions == list(range(first, first + len(positions)))


def takes_a_new_run(person: Person, thread_id: str) -> float:
    """The thread takes a run at once; the seconds that took."""
    began = time.monotonic()
    reader = person.run("echo", "still there?", thread_id).done()
    assert (reader.status, reader.end) == (200, "clean"), (reader.status, bytes(reader.raw[:300]))
    assert reader.last["type"] == "RUN_FINISHED"
    seconds = time.monotonic() - began
    assert seconds < AT_ONCE
    return seconds


def all_ended(thread_ids: Iterable[str], timeout: float = DEADLINE) -> float:
    """Wait until no run of these threads runs; the seconds that took."""
    began = time.monotonic()
    running = Run.objects.filter(
        thread__thread_id__in=list(thread_ids), status__in=["queued", "running"]
    )
    until(lambda: not running.exists(), timeout, "every run has ended")
    return time.monotonic() - began
