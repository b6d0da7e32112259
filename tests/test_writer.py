"""The group commit: fenced, together, and yet every run by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError

from aguiapp import store
from aguiapp.errors import Fenced
from aguiapp.models import Run, RunEvent
from aguiapp.store import sql
from tests import scripts
from tests.scripts import writer as module

pytestmark = pytest.mark.django_db(transaction=True)

EVENT = '{"type":"CUSTOM","name":"n","value":1}'
CODE = 21
NOW = 1_700_000_000_000


class Watch:
    """What a lane reported."""

    def __init__(self) -> None:
        self.rows: list[store.Row] = []
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    def committed(self, rows: Sequence[store.Row]) -> None:
        self.rows += rows
        self.changed.set()

    def lost(self, error: Exception) -> None:
        self.error = error
        self.changed.set()

    async def until(self, count: int) -> None:
        """Until so many rows are committed or the lane is lost."""
        async with asyncio.timeout(scripts.SECONDS):
            while self.error is None and len(self.rows) < count:
                self.changed.clear()
                await self.changed.wait()


async def lanes(count: int) -> tuple[list[store.Lane], list[Watch]]:
    """So many runs, each on a thread of its own."""
    made, watches = [], []
    for number in range(count):
        opened = await store.call(store.open_run, scripts.opening(thread=f"t{number}"))
        watches.append(Watch())
        made.append(store.Lane(opened.run.pk, opened.run.lease_token or 0, watches[-1]))
    return made, watches


async def seqs(lane: store.Lane) -> list[int]:
    """The stored seqs of a run."""
    rows = RunEvent.objects.filter(run_id=lane.run_id).order_by("seq")
    return [seq async for seq in rows.values_list("seq", flat=True)]


class Gate:
    """A commit that waits for permission, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.calls: list[list[Any]] = []
        self._loop = asyncio.get_running_loop()
        self._entered = asyncio.Event()
        original = module.commit

        def commit(jobs: Sequence[Any]) -> Any:
            self.calls.append([list(job.rows) for job in jobs])
            self._loop.call_soon_threadsafe(self._entered.set)
            assert self.open.wait(scripts.SECONDS)
            return original(jobs)

        monkeypatch.setattr(module, "commit", commit)

    async def entered(self) -> None:
        await asyncio.wait_for(self._entered.wait(), scripts.SECONDS)
        self._entered.clear()


async def test_rows_are_numbered_and_reported_once_they_are_stored() -> None:
    (lane,), (watch,) = await lanes(1)
    writer = store.writer()
    for _ in range(7):
        writer.append(lane, CODE, EVENT, NOW)
    assert watch.rows == []
    await watch.until(7)
    assert [row.seq for row in watch.rows] == list(range(1, 8)) == await seqs(lane)
    assert lane.uncommitted == 0
    assert lane.bytes == 7 * len(EVENT)


async def test_one_commit_in_flight_and_the_rest_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, second), watches = await lanes(2)
    gate, writer = Gate(monkeypatch), store.writer()
    writer.append(first, CODE, EVENT, NOW)
    await gate.entered()
    for _ in range(3):
        writer.append(first, CODE, EVENT, NOW)
        writer.append(second, CODE, EVENT, NOW)
    await asyncio.sleep(0)
    assert len(gate.calls) == 1
    assert not watches[0].rows
    assert first.uncommitted == 4 * len(EVENT)
    gate.open.set()
    await watches[0].until(4)
    await watches[1].until(3)
    assert [[len(rows) for rows in call] for call in gate.calls] == [[1], [3, 3]]
    assert await seqs(first) == [1, 2, 3, 4]
    assert await seqs(second) == [1, 2, 3]


async def test_a_producer_waits_for_its_own_bytes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    (busy, idle), (watch, _) = await lanes(2)
    gate, writer = Gate(monkeypatch), store.writer()
    for _ in range(4):
        writer.append(busy, CODE, EVENT, NOW)
    await writer.below(idle, 0)
    waiting = asyncio.ensure_future(writer.below(busy, 2 * len(EVENT)))
    await gate.entered()
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.open.set()
    await asyncio.wait_for(waiting, scripts.SECONDS)
    await watch.until(4)


async def test_a_poisoned_run_among_50_harms_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One breaks the key, one is fenced, one brings what is no text for a database."""
    made, watches = await lanes(50)
    twice, fenced, odd = 7, 23, 41
    await RunEvent.objects.acreate(
        run_id=made[twice].run_id,
        seq=2,
        type=CODE,
        payload=EVENT,
        created="2026-01-01T00:00:00Z",
    )
    await Run.objects.filter(pk=made[fenced].run_id).aupdate(lease_token=1)
    calls: list[int] = []
    original = module.commit

    def commit(jobs: Sequence[Any]) -> Any:
        calls.append(len(jobs))
        return original(jobs)

    monkeypatch.setattr(module, "commit", commit)
    writer = store.writer()
    for number, lane in enumerate(made):
        # The row that is there already says 2: only a first row that lies behind it can clash.
        lane.seq = 1 if number == twice else 0
        for _ in range(3):
            writer.append(lane, CODE, "\ud800" if number == odd else EVENT, NOW)
    for watch in watches:
        await watch.until(3)
    assert calls[0] == 50
    for number, (lane, watch) in enumerate(zip(made, watches, strict=True)):
        if number == fenced:
            assert isinstance(watch.error, Fenced)
            assert await seqs(lane) == []
        elif number == odd:
            assert watch.error is not None
            assert not isinstance(watch.error, Fenced)
            assert await seqs(lane) == []
        elif number != twice:
            assert watch.error is None, (number, watch.error)
            assert await seqs(lane) == [1, 2, 3]


async def test_a_clash_of_the_key_is_the_fault_of_its_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (bad, good), (lost, kept) = await lanes(2)
    monkeypatch.setattr(sql, "last_seq", lambda run_id: 0)
    await RunEvent.objects.acreate(
        run_id=bad.run_id, seq=1, type=CODE, payload=EVENT, created="2026-01-01T00:00:00Z"
    )
    writer = store.writer()
    writer.append(bad, CODE, EVENT, NOW)
    writer.append(good, CODE, EVENT, NOW)
    await lost.until(1)
    await kept.until(1)
    assert kept.error is None
    assert await seqs(good) == [1]
    assert isinstance(lost.error, IntegrityError)


@pytest.mark.parametrize("arrived", [True, False])
async def test_a_connection_lost_at_commit_costs_and_doubles_nothing(
    arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lane, other), (watch, beside) = await lanes(2)
    original = module._commit_together
    failures: list[Any] = []

    def lossy(jobs: Sequence[Any]) -> Any:
        if not failures:
            failures.append(original(jobs) if arrived else None)
            raise OperationalError("server closed the connection unexpectedly")
        return original(jobs)

    monkeypatch.setattr(module, "_commit_together", lossy)
    writer = store.writer()
    for _ in range(3):
        writer.append(lane, CODE, EVENT, NOW)
        writer.append(other, CODE, EVENT, NOW)
    await watch.until(3)
    await beside.until(3)
    writer.append(lane, CODE, EVENT, NOW)
    await watch.until(4)
    assert failures
    assert [row.seq for row in watch.rows] == [1, 2, 3, 4] == await seqs(lane)
    assert [row.seq for row in beside.rows] == [1, 2, 3] == await seqs(other)


async def test_a_database_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (lane,), (watch,) = await lanes(1)
    original, refusals = sql.connection, iter(range(4))

    def connection() -> Any:
        if next(refusals, None) is not None:
            raise OperationalError("connection refused")
        return original()

    monkeypatch.setattr(sql, "connection", connection)
    store.writer().append(lane, CODE, EVENT, NOW)
    store.writer().append(lane, CODE, EVENT, NOW)
    await watch.until(2)
    assert watch.error is None
    assert await seqs(lane) == [1, 2]


async def test_a_run_that_somebody_holds_locked_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (lane, free), (watch, beside) = await lanes(2)
    original, asked = sql.held, []

    def held(found: Any, claims: Any) -> set[int]:
        asked.append(len(claims))
        standing: set[int] = original(found, claims)
        return standing - {lane.run_id} if len(asked) < 6 else standing

    monkeypatch.setattr(sql, "held", held)
    writer = store.writer()
    writer.append(lane, CODE, EVENT, NOW)
    writer.append(free, CODE, EVENT, NOW)
    await beside.until(1)
    assert not watch.rows
    writer.append(lane, CODE, EVENT, NOW)
    await watch.until(2)
    assert watch.error is None
    assert await seqs(lane) == [1, 2]


async def test_whoever_cannot_be_stored_for_a_whole_lease_is_lost(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.AGUIAPP = {"LEASE_SECONDS": 0.05}
    (lane,), (watch,) = await lanes(1)
    monkeypatch.setattr(module, "commit", lambda jobs: [module.Again("locked") for _ in jobs])
    store.writer().append(lane, CODE, EVENT, NOW)
    await watch.until(1)
    assert isinstance(watch.error, module.Again)
    with pytest.raises(module.Again):
        await store.writer().below(lane, 0)


async def test_a_commit_that_explodes_loses_its_runs_and_the_writer_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (bad, good), (lost, kept) = await lanes(2)
    with monkeypatch.context() as patch:
        patch.setattr(module, "commit", lambda jobs: 1 // 0)
        store.writer().append(bad, CODE, EVENT, NOW)
        await lost.until(1)
    assert lost.error is not None
    store.writer().append(good, CODE, EVENT, NOW)
    await kept.until(1)
    assert kept.error is None


async def test_a_fenced_run_writes_no_more_row() -> None:
    (lane,), (watch,) = await lanes(1)
    store.writer().append(lane, CODE, EVENT, NOW)
    await watch.until(1)
    await Run.objects.filter(pk=lane.run_id).aupdate(lease_token=None)
    store.writer().append(lane, CODE, EVENT, NOW)
    await watch.until(2)
    assert isinstance(watch.error, Fenced)
    assert await seqs(lane) == [1]
    with pytest.raises(Fenced):
        await lane.settle()


@pytest.mark.parametrize(
    "payload",
    [
        '"\\u0000 \\ud800 \\\\N \\\\. \\n \\t"',
        '"back\\\\slash \\\\\\\\ end\\\\"',
        '"é 漢 \U0001f600"',
        '"\\\\.\\\\."',
        '"' + "x" * 3_000_000 + '"',
    ],
)
async def test_text_is_stored_byte_for_byte(payload: str) -> None:
    (lane,), (watch,) = await lanes(1)
    store.writer().append(lane, CODE, payload, NOW)
    await watch.until(1)
    (row,) = await store.call(store.read, lane.run_id)
    assert row.payload == payload
    assert row.type == CODE
    assert row.created.timestamp() * 1000 == NOW


async def test_many_rows_of_many_runs_fit_into_one_commit() -> None:
    made, watches = await lanes(3)
    for _ in range(7000):
        for lane in made:
            store.writer().append(lane, CODE, EVENT, NOW)
    for lane, watch in zip(made, watches, strict=True):
        await watch.until(7000)
        assert await seqs(lane) == list(range(1, 7001))
