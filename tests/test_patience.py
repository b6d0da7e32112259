"""Runs that end because their time is up, or because everybody who may speak has left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User

from aguiapp import engine, store
from aguiapp.engine import attendance, leases, patience
from aguiapp.models import Participant, Run, Thread, Watcher
from aguiapp.store import lease, watchers
from project import scripted
from tests import scripts
from tests.scripts import Person, Stream, legal, run_input, said, text

pytestmark = pytest.mark.django_db(transaction=True)

HANG = {"$hang": True}
PING = {"type": "CUSTOM", "name": "ping", "value": None}
FOREVER = {"$forever": [PING, {"$sleep": 0.02}]}


@pytest.fixture
def ada(user: User) -> Person:
    return Person(user)


@pytest.fixture(autouse=True)
def quick(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is looked at more often than in life."""
    settings.AGUIAPP = {**settings.AGUIAPP, "COMMAND_SECONDS": 0.02, "CANCEL_SECONDS": 0.1}
    monkeypatch.setattr(patience, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(attendance, "LINGER_SECONDS", 0.1)
    monkeypatch.setattr(attendance, "START_SECONDS", 0.3)


@pytest.fixture
def scripted_as() -> Iterator[Any]:
    """The scripted agent with options."""
    with scripts.registered("scripted", scripted.play):

        def register(**options: Any) -> Any:
            return scripts.registered("scripted", scripted.play, **options)

        yield register


async def ended(run_id: str = "r1") -> Run:
    """The run, once it has ended."""
    async with asyncio.timeout(scripts.SECONDS):
        while True:
            run = await Run.objects.select_related("thread").aget(run_id=run_id)
            if run.ended:
                return run
            await asyncio.sleep(0.02)


async def noted(wanted: bool) -> None:
    """Some process holds readers, or none does any more."""
    async with asyncio.timeout(scripts.SECONDS):
        while await Watcher.objects.aexists() is not wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def leave(stream: Stream) -> None:
    """The reader goes away."""
    await stream.response.source.aclose()


class TestTime:
    @pytest.mark.parametrize(
        ("limits", "script", "code"),
        [
            ({"run_seconds": 0.2}, [FOREVER], "run_timeout"),
            ({"run_seconds": 0.2, "idle_seconds": 5}, [HANG], "run_timeout"),
            ({"idle_seconds": 0.2}, [PING, HANG], "idle_timeout"),
            ({"idle_seconds": 0.2, "run_seconds": 5}, [*text("m1", "a")[:2], HANG], "idle_timeout"),
        ],
    )
    async def test_a_limit_ends_the_run(
        self, ada: Person, scripted_as: Any, limits: Any, script: Any, code: str
    ) -> None:
        with scripted_as(limits=limits):
            reply = await ada.run(run_input(messages=[said("u1")], script=script))
            legal(reply.events)
            assert (reply.types[-1], reply.events[-1]["code"]) == ("RUN_ERROR", code)
            assert (await ended()).error_code == code
            again = await ada.run(run_input(run="r2", script=[]))
            assert again.types[-1] == "RUN_FINISHED"

    async def test_events_of_any_kind_keep_a_run_from_idling(
        self, ada: Person, scripted_as: Any
    ) -> None:
        busy = {"$repeat": 30, "events": [PING, {"$sleep": 0.02}]}
        with scripted_as(limits={"idle_seconds": 0.3}):
            assert (await ada.run(run_input(script=[busy]))).types[-1] == "RUN_FINISHED"

    async def test_nothing_is_no_limit(self, ada: Person, scripted_as: Any, settings: Any) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "RUN_SECONDS": 0.05, "IDLE_SECONDS": 0.05}
        with scripted_as(limits={"run_seconds": 0, "idle_seconds": 0}):
            reply = await ada.run(run_input(script=[{"$sleep": 0.4}]))
            assert reply.types[-1] == "RUN_FINISHED"

    async def test_an_agent_that_ignores_its_cancellation_is_ended_anyway(
        self, ada: Person, scripted_as: Any
    ) -> None:
        deaf = {"$on_cancel": [{"$sleep": 1}, {**PING, "name": "late"}]}
        with scripted_as(limits={"run_seconds": 0.2}):
            reply = await ada.run(run_input(script=[deaf, HANG]))
            assert reply.events[-1]["code"] == "run_timeout"
            assert "late" not in "".join(await scripts.stored())

    async def test_an_agent_that_blocks_the_loop_is_ended_from_outside(
        self, ada: Person, scripted_as: Any, monkeypatch: pytest.MonkeyPatch, settings: Any
    ) -> None:
        settings.AGUIAPP = {**settings.AGUIAPP, "LEASE_SECONDS": 1.0}
        monkeypatch.setattr(leases, "OVERDUE_SECONDS", 0.2)
        seen: list[str] = []

        def blocks(run: Any) -> Iterator[Any]:
            yield PING
            until = time.monotonic() + 10
            while not (status := _status()) or status == "running":
                assert time.monotonic() < until
            seen.append(status)
            yield {**PING, "name": "late"}

        async def blocking(run: Any) -> Any:
            await run.emit(PING)
            await asyncio.sleep(0.1)
            # The database from the loop, on purpose: nothing but this agent runs meanwhile.
            done = store.submit("probe", list, blocks(run))
            done.result()
            await run.emit({**PING, "name": "late"})

        with scripts.registered("blocking", blocking, limits={"run_seconds": 0.3}):
            reply = await ada.run(run_input(), "blocking")
        assert seen == ["error"]
        assert (reply.types[-1], reply.events[-1]["code"]) == ("RUN_ERROR", "run_timeout")
        legal(reply.events)
        assert reply.logged == await scripts.stored()
        assert "late" not in "".join(reply.logged)
        store.close()


def _status() -> str:
    return Run.objects.values_list("status", flat=True).get()


class TestReaders:
    async def test_a_run_goes_on_without_its_readers(self, ada: Person, scripted_as: Any) -> None:
        with scripted_as():
            stream = await ada.watch(run_input(script=[PING, {"$sleep": 0.4}]))
            await stream.until(bool)
            await leave(stream)
            assert (await ended()).status == "success"

    async def test_a_run_is_cancelled_when_its_last_reader_leaves(
        self, ada: Person, scripted_as: Any
    ) -> None:
        with scripted_as(disconnect="cancel"):
            stream = await ada.watch(run_input(script=[PING, HANG]))
            await stream.until(lambda raw: len(scripts.frames(raw)) >= 2)
            await leave(stream)
            run = await ended()
            assert run.status == "cancelled"
            assert [found["kind"] for found in run.findings] == ["stopped"]

    async def test_a_post_that_was_dropped_before_it_was_read_counts_as_left(
        self, ada: Person, scripted_as: Any
    ) -> None:
        with scripted_as(disconnect="cancel"):
            await ada.watch(run_input(script=[HANG]))
            assert (await ended()).status == "cancelled"

    @pytest.mark.parametrize("where", ["stream", "post", "connect"])
    async def test_another_reader_who_may_speak_keeps_it(
        self, ada: Person, scripted_as: Any, where: str
    ) -> None:
        with scripted_as(disconnect="cancel"):
            given = run_input(script=[PING, {"$sleep": 0.6}])
            stream = await ada.watch(given)
            await stream.until(lambda raw: len(scripts.frames(raw)) >= 2)
            thread = await Thread.objects.aget()
            path, body = {
                "stream": (f"/agui/threads/{thread.key}/stream", None),
                "post": ("/agui/agents/scripted/", given),
                "connect": ("/agui/agents/scripted/connect", run_input()),
            }[where]
            other = Stream(await ada.open(path, body))
            await other.until(lambda raw: len(scripts.frames(raw)) >= 1)
            await leave(stream)
            assert (await ended()).status == "success"
            await leave(other)

    async def test_who_may_only_look_keeps_nothing(
        self, ada: Person, other: User, scripted_as: Any
    ) -> None:
        with scripted_as(disconnect="cancel"):
            stream = await ada.watch(run_input(script=[PING, HANG]))
            await stream.until(lambda raw: len(scripts.frames(raw)) >= 2)
            thread = await Thread.objects.aget()
            await Participant.objects.acreate(thread=thread, user=other, role="viewer")
            watching = Stream(await Person(other).open(f"/agui/threads/{thread.key}/stream"))
            await watching.until(lambda raw: len(scripts.frames(raw)) >= 2)
            await leave(stream)
            assert (await ended()).status == "cancelled"
            await leave(watching)

    async def test_who_comes_back_in_time_keeps_it(self, ada: Person, scripted_as: Any) -> None:
        with scripted_as(disconnect=0.6):
            stream = await ada.watch(run_input(script=[PING, {"$sleep": 1.2}]))
            await stream.until(lambda raw: len(scripts.frames(raw)) >= 2)
            await leave(stream)
            await asyncio.sleep(0.3)
            assert not (await Run.objects.aget()).ended
            thread = await Thread.objects.aget()
            back = Stream(await ada.open(f"/agui/threads/{thread.key}/stream"))
            await back.until(lambda raw: b"RUN_FINISHED" in raw)
            await leave(back)
            assert (await ended()).status == "success"

    async def test_a_run_that_nobody_was_to_read_goes_on(
        self, ada: Person, scripted_as: Any
    ) -> None:
        with scripted_as(disconnect="cancel"):
            given = run_input(script=[PING, {"$sleep": 0.4}])
            reply = await ada.run(given, prefer="respond-async")
            assert reply.status == 202
            # Nor does a look at it make it depend on who looks.
            look = Stream(await ada.open(reply.json["urls"]["stream"]))
            await look.until(lambda raw: len(scripts.frames(raw)) >= 1)
            await leave(look)
            assert (await ended()).status == "success"


class TestOtherProcesses:
    elsewhere = "elsewhere 1 boot 1"

    async def test_a_reader_elsewhere_keeps_the_run(self, ada: Person, scripted_as: Any) -> None:
        with scripted_as(disconnect="cancel"):
            stream = await ada.watch(run_input(script=[PING, HANG]))
            await stream.until(lambda raw: len(scripts.frames(raw)) >= 2)
            thread = await Thread.objects.aget()
            await store.call(watchers.note, self.elsewhere, {thread.pk: 2})
            await leave(stream)
            await asyncio.sleep(0.5)
            assert not (await Run.objects.aget()).ended
            await store.call(watchers.note, self.elsewhere, {thread.pk: 0})
            assert (await ended()).status == "cancelled"

    async def test_rows_say_what_this_process_holds(self, ada: Person, scripted_as: Any) -> None:
        with scripted_as(disconnect="cancel"):
            streams = [await ada.watch(run_input(script=[HANG])) for _ in range(2)]
            for stream in streams:
                await stream.until(lambda raw: len(scripts.frames(raw)) >= 1)
            await noted(True)
            row = await Watcher.objects.aget()
            assert row.process.startswith(lease.owner())
            for stream in streams:
                await leave(stream)
            await ended()
            await noted(False)

    async def test_no_row_is_written_where_no_agent_asks(
        self, ada: Person, scripted_as: Any
    ) -> None:
        with scripted_as():
            await ada.run(run_input(script=[PING]))
            assert not await Watcher.objects.aexists()

    async def test_dead_and_expired_rows_count_for_nobody(self, ada: Person) -> None:
        thread = await Thread.objects.acreate(scope="user:1", thread_id="t1")

        def dead() -> tuple[set[int], int]:
            gone = lease.owner().split(" ")
            gone[1], gone[3] = "4194304", "1"
            with_clock: Any = lease.expiry()
            row = Watcher.objects.create(
                thread=thread, process=" ".join(gone), count=1, expires=with_clock
            )
            found = watchers.watched([thread.pk], "")
            row.expires = row.thread.created
            Watcher.objects.create(
                thread=thread, process=self.elsewhere, count=1, expires=thread.created
            )
            found |= watchers.watched([thread.pk], "")
            watchers.forget()
            return found, Watcher.objects.count()

        assert await store.call(dead) == (set(), 1)


async def test_the_attendance_is_empty_when_everybody_left(ada: Person) -> None:
    with scripts.registered("scripted", scripted.play, disconnect="cancel"):
        await ada.run(run_input(script=[PING]))
        thread = await Thread.objects.aget()
        async with asyncio.timeout(scripts.SECONDS):
            while engine.current().attendance.here(thread.pk):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
