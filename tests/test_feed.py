"""The one follower: whatever the cursor, the batches and the losses, head and rest are the whole."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from aguiapp import errors, feed, protocol, store
from aguiapp.models import Run, Thread
from tests import scripts
from tests.scripts import opening

database = pytest.mark.django_db(transaction=True)
CODES = protocol.TYPE_CODES


class Writing:
    """Runs of one thread, committed as the test says."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.count = 0
        self.run: Run | None = None
        self.tail: feed.Tail | None = None
        self.thread: Thread | None = None

    async def begin(self, *, local: bool = True) -> Run:
        """A new run; `local` ones hand what they commit to the readers of this process."""
        self.count += 1
        opened = await store.call(store.open_run, opening(run=f"r{self.count}"))
        self.run, self.thread, self.seq = opened.run, opened.thread, 0
        self.tail = feed.current().open_tail(opened.thread, opened.run) if local else None
        self.write_start()
        return opened.run

    def write_start(self) -> None:
        self.waiting: list[store.Row] = []
        self.add({"type": "RUN_STARTED", "threadId": "t1", "runId": f"r{self.count}"})

    def add(self, event: Any = None) -> None:
        """One event for the next commit."""
        self.seq += 1
        value = {"type": "CUSTOM", "name": "n", "value": f"{self.count}.{self.seq}"}
        self.waiting.append(scripts.row(self.seq, event or value))

    async def commit(self) -> None:
        """Everything that waits."""
        assert self.run is not None
        rows, self.waiting = self.waiting, []
        if not rows:
            return
        job = scripts.writer.Job(self.run.pk, self.run.lease_token, rows)
        assert await store.call(scripts.writer.commit, [job]) == [None]
        self.publish(rows)

    def publish(self, rows: list[store.Row]) -> None:
        self.sent += [row.payload for row in rows]
        if self.tail is not None:
            self.tail.publish(rows)

    async def end(self) -> None:
        """The terminal, and the slot is free."""
        assert self.run is not None
        self.add({"type": "RUN_FINISHED", "threadId": "t1", "runId": f"r{self.count}"})
        rows, self.waiting = self.waiting, []
        ending = store.Ending(status="success")
        await store.call(store.finish, self.run.pk, self.run.lease_token or 0, rows, 1, ending)
        self.publish(rows)
        if self.tail is not None:
            self.tail.close()

    async def whole(self, count: int = 4, *, local: bool = True) -> Run:
        run = await self.begin(local=local)
        for _ in range(count - 2):
            self.add()
            await self.commit()
        await self.end()
        return run


async def read(thread: Thread, after: int, count: int, run: Run | None = None) -> list[str]:
    """So many payloads behind a position, and their numbering."""
    found: list[str] = []
    follower = feed.Follower(thread, after, run)
    async with asyncio.timeout(scripts.SECONDS):
        if count:
            async for batch in follower.batches(scripts.SECONDS):
                assert batch is not None
                assert batch.first == after + len(found) + 1
                found += batch.payloads
                assert batch.last == follower.position
                if len(found) >= count:
                    break
    return found


@database
class TestFollower:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("tail_bytes", [0, 200, 10**6])
    async def test_head_and_rest_are_the_whole_for_every_cursor_while_it_is_written(
        self, seed: int, tail_bytes: int, settings: Any
    ) -> None:
        settings.AGUIAPP = {"TAIL_BYTES": tail_bytes, "PAGE_EVENTS": 3, "POLL_SECONDS": 0.02}
        dice = random.Random(seed)
        writing = Writing()
        await writing.begin(local=dice.random() < 0.7)
        await writing.commit()
        assert writing.thread is not None
        readers = []
        for _ in range(3):
            for _ in range(dice.randrange(4)):
                for _ in range(dice.randrange(4)):
                    writing.add()
                await writing.commit()
                after = dice.randrange(len(writing.sent) + 1)
                readers.append((after, asyncio.ensure_future(keep(writing.thread, after))))
            await writing.end()
            await writing.begin(local=dice.random() < 0.7)
            await writing.commit()
        await writing.end()
        last = writing.sent[-1]
        for after, reader in readers:
            assert await ended_by(reader, last) == writing.sent[after:]
        thread = writing.thread
        for after in range(len(writing.sent)):
            rest = await read(thread, after, len(writing.sent) - after)
            assert rest == writing.sent[after:]

    async def test_a_follower_of_one_run_ends_with_its_terminal(self) -> None:
        writing = Writing()
        runs = [await writing.whole(count) for count in (4, 2, 5)]
        thread = writing.thread
        assert thread is not None
        start = 0
        for run in runs:
            for after in range(start, start + run.last_seq or 1):
                follower = feed.Follower(thread, after, run)
                async with asyncio.timeout(scripts.SECONDS):
                    got = [p async for b in follower.batches(9) if b for p in b.payloads]
                end = (run.offset or 0) + (await store.call(store.refresh, run)).last_seq
                assert follower.finished
                assert got == writing.sent[max(after, run.offset or 0) : end]
            start += (await store.call(store.refresh, run)).last_seq

    async def test_an_early_cursor_of_one_run_starts_with_that_run(self) -> None:
        writing = Writing()
        await writing.whole(3)
        second = await writing.whole(4)
        follower = feed.Follower(second.thread, 0, second)
        got = [p async for b in follower.batches(9) if b for p in b.payloads]
        assert got == writing.sent[3:]
        assert follower.cursor == f"{second.thread.epoch}-7"

    async def test_it_never_leaves_a_run_before_its_terminal(self, settings: Any) -> None:
        """The next run is there already, but this run's last rows came late to the reader."""
        settings.AGUIAPP = {"PAGE_EVENTS": 2, "TAIL_BYTES": 0}
        writing = Writing()
        for _ in range(3):
            await writing.whole(5, local=False)
        thread = writing.thread
        assert thread is not None
        assert await read(thread, 0, 15) == writing.sent

    async def test_the_tail_and_the_table_say_the_same(self, settings: Any) -> None:
        settings.AGUIAPP = {"TAIL_BYTES": 150}
        writing = Writing()
        await writing.begin()
        for _ in range(20):
            writing.add()
            await writing.commit()
        tail, thread = writing.tail, writing.thread
        assert tail is not None
        assert thread is not None
        assert tail.bytes <= 150 + max(map(len, writing.sent))
        assert tail.behind(0) is None
        for after in range(21):
            batches = tail.behind(after)
            stored = (await store.call(store.read, tail.run_id, after)) or []
            if batches is not None:
                texts = [p for batch in batches for p in batch.payloads]
                assert texts == [row.payload for row in stored]
        assert tail.behind(21) == []

    async def test_a_slow_reader_gets_everything_from_the_table(self, settings: Any) -> None:
        settings.AGUIAPP = {"TAIL_BYTES": 200, "PAGE_EVENTS": 5}
        writing = Writing()
        await writing.begin()
        await writing.commit()
        thread = writing.thread
        assert thread is not None
        source = feed.Follower(thread, 0).batches(scripts.SECONDS)
        first = await anext(source)
        assert first is not None
        seen = list(first.payloads)
        for _ in range(60):
            writing.add()
            await writing.commit()
        await writing.end()
        await writing.whole(3)
        while len(seen) < len(writing.sent):
            batch = await asyncio.wait_for(anext(source), scripts.SECONDS)
            assert batch is not None
            seen += batch.payloads
        assert seen == writing.sent
        await source.aclose()
        assert feed.current().bells == {}

    async def test_a_lost_hint_costs_a_poll_only(self, settings: Any) -> None:
        settings.AGUIAPP = {"POLL_SECONDS": 0.02}
        writing = Writing()
        await writing.begin(local=False)
        await writing.commit()
        thread = writing.thread
        assert thread is not None
        reader = asyncio.ensure_future(read(thread, 0, 8))
        await asyncio.sleep(0)
        for _ in range(3):
            writing.add()
            await writing.commit()
        await writing.end()
        await writing.whole(3, local=False)
        assert await asyncio.wait_for(reader, scripts.SECONDS) == writing.sent

    async def test_silence_is_told_at_its_time(self) -> None:
        writing = Writing()
        await writing.begin()
        await writing.commit()
        thread = writing.thread
        assert thread is not None
        source = feed.Follower(thread, 1).batches(0.02)
        async with asyncio.timeout(scripts.SECONDS):
            assert [await anext(source) for _ in range(3)] == [None] * 3
            writing.add()
            await writing.commit()
            batch = await anext(source)
        assert batch is not None
        assert batch.payloads == writing.sent[1:]
        await source.aclose()

    async def test_closing_the_feed_ends_every_follower(self) -> None:
        writing = Writing()
        run = await writing.begin()
        await writing.commit()
        follower = feed.Follower(run.thread, 0, run)

        async def everything() -> list[Any]:
            return [batch async for batch in follower.batches(scripts.SECONDS)]

        reader = asyncio.ensure_future(everything())
        await asyncio.sleep(0)
        feed.current().close()
        await asyncio.wait_for(reader, scripts.SECONDS)
        assert not follower.finished

    async def test_a_stored_read_takes_no_more_than_asked(self) -> None:
        writing = Writing()
        for _ in range(3):
            await writing.whole(4, local=False)
        thread = writing.thread
        assert thread is not None
        for limit in (1, 3, 4, 5, 11, 12, 50):
            follower = feed.Follower(thread, 0)
            got = [p for batch in await follower.read(limit) for p in batch.payloads]
            assert got == writing.sent[:limit]
            assert follower.position == len(got)

    async def test_a_follower_that_goes_leaves_nothing_behind(self) -> None:
        writing = Writing()
        await writing.begin()
        await writing.commit()
        thread = writing.thread
        assert thread is not None
        readers = [asyncio.ensure_future(keep(thread, 0)) for _ in range(20)]
        bells = feed.current().bells
        await scripts.until(lambda: thread.pk in bells and bells[thread.pk].followers == 20)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        assert feed.current().bells == {}


async def keep(thread: Thread, after: int) -> list[str]:
    """Read on for ever; what was read is `seen` of the running task's list."""
    seen: list[str] = []
    READ[asyncio.current_task()] = seen
    async for batch in feed.Follower(thread, after).batches(scripts.SECONDS):
        seen += batch.payloads if batch is not None else ()
    return seen


READ: dict[Any, list[str]] = {}


async def ended_by(reader: asyncio.Task[Any], last: str) -> list[str]:
    """What a reader saw, once that included `last`."""
    await scripts.until(lambda: reader.done() or last in READ.get(reader, ()))
    assert not reader.done(), reader.exception()
    reader.cancel()
    return READ.pop(reader)


class TestBell:
    async def test_a_ring_before_the_wait_counts(self) -> None:
        bell = feed.Bell()
        seen = bell.version
        bell.ring()
        assert await bell.wait(seen, 60)

    async def test_it_wakes_everybody(self) -> None:
        bell = feed.Bell()
        waits = [asyncio.ensure_future(bell.wait(0, 60)) for _ in range(3)]
        await asyncio.sleep(0)
        bell.ring()
        assert await asyncio.gather(*waits) == [True] * 3

    async def test_time_passes(self) -> None:
        assert not await feed.Bell().wait(0, 0.001)

    async def test_a_reader_who_leaves_while_the_loop_was_busy_is_let_go(self) -> None:
        """The timer is due and the task is cancelled in the same turn of the loop."""
        bell = feed.Bell()
        reader = asyncio.ensure_future(bell.wait(0, 0.01))
        await asyncio.sleep(0)
        time.sleep(0.03)  # noqa: ASYNC251 - a busy loop
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader


class TestCursor:
    thread = Thread(pk=1, epoch="abc234", thread_id="t1", scope="s")

    def test_there_and_back(self) -> None:
        for position in (0, 1, 10**12):
            text = feed.cursor("abc234", position)
            assert feed.parse_cursor(self.thread, text) == position

    @pytest.mark.parametrize(
        "text",
        [
            "5",
            "-5",
            "abc234-",
            "abc234",
            "abc234-x",
            "abc234-٣",
            "abc234-1.0",
            "abc234--",
            "r1:50",
            " ",
            "abc234-" + "9" * 30,
        ],
    )
    def test_malformed_is_400(self, text: str) -> None:
        with pytest.raises(errors.BadCursor) as caught:
            feed.parse_cursor(self.thread, text)
        assert (caught.value.status, caught.value.code) == (400, "cursor_malformed")

    @pytest.mark.parametrize("text", ["abc235-5", "zzzzzz-0", "ABC234-1"])
    def test_another_history_is_409(self, text: str) -> None:
        with pytest.raises(errors.CursorForeign) as caught:
            feed.parse_cursor(self.thread, text)
        assert (caught.value.status, caught.value.code) == (409, "cursor_foreign")


class TestBatch:
    def test_a_batch_is_framed_with_cursors(self) -> None:
        batch = feed.Batch("abc234", 7, [21, 21], ['{"a":1}', '{"b":2}'])
        assert batch.sse == b'id: abc234-7\ndata: {"a":1}\n\nid: abc234-8\ndata: {"b":2}\n\n'
        assert batch.last == 8
        assert batch.behind(6) is batch
        assert batch.behind(7).payloads == ['{"b":2}']
        assert batch.behind(7).first == 8
        assert not batch.ends
        assert feed.Batch("abc234", 1, [CODES["RUN_ERROR"]], ["{}"]).ends


def test_groups_are_hashed() -> None:
    assert feed.group(1) != feed.group(2)
    assert len(feed.group(10**18)) < 100
