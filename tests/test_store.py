"""The log's tables: openings, endings, inputs, leases, and what may stand in a column."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import uuid
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, InterfaceError, OperationalError, transaction
from django.utils import timezone
from hypothesis import given, settings as hypothesis, strategies as st

from aguiapp import errors, protocol, store
from aguiapp.models import Command, InputMessage, Run, RunEvent, Thread
from aguiapp.store import inputs, lease, reads, sql
from tests import scripts
from tests.scripts import opening, row, run_input, said

database = pytest.mark.django_db(transaction=True)
ODD = "a\0b\ud800c\udfffd"
CLEAN = "a\ufffdb\ufffdc\ufffdd"


def opened(**more: Any) -> Run:
    """A run that this process holds."""
    return store.open_run(opening(**more)).run


def whole(run: Run, count: int = 3) -> list[store.Row]:
    """RUN_STARTED, CUSTOM …, RUN_FINISHED."""
    ids = {"threadId": run.thread.thread_id, "runId": run.run_id}
    events: list[dict[str, Any]] = [{"type": "RUN_STARTED", **ids}]
    events += [{"type": "CUSTOM", "name": "n", "value": n} for n in range(count - 2)]
    return [
        row(seq, event) for seq, event in enumerate([*events, {"type": "RUN_FINISHED", **ids}], 1)
    ]


def ended(run: Run, count: int = 3, **ending: Any) -> Run:
    """The run with its terminal."""
    rows = whole(run, count)
    given_ = {"status": "success", **ending}
    again = False
    while True:  # as a driver does: a lost connection is tried again
        try:
            store.finish(
                run.pk, run.lease_token or 0, rows, 10, store.Ending(**given_), again=again
            )
        except (OperationalError, InterfaceError):
            assert not again, "lost twice"
            again = True
        else:
            return store.refresh(run)


# -- inputs ----------------------------------------------------------------------

SPACES = st.text(" \t\n\r", max_size=3)
WORDS = st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | st.just("messages"), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def odd_json(draw: Any, value: Any) -> str:
    """Some JSON text of the value: any white space, any escapes."""

    def space() -> str:
        return str(draw(SPACES))

    def string(text: str) -> str:
        ascii_only = draw(st.booleans())
        made = json.dumps(text, ensure_ascii=ascii_only or not text.isprintable())
        if text and text[0].isalpha() and text[0].isascii() and draw(st.booleans()):
            made = f'"\\u{ord(text[0]):04x}{made[2:]}'
        return made

    def write(item: Any) -> str:
        if isinstance(item, dict):
            members = (
                f"{space()}{string(k)}{space()}:{space()}{write(v)}{space()}"
                for k, v in item.items()
            )
            return "{" + (",".join(members) or space()) + "}"
        if isinstance(item, list):
            parts = (space() + write(part) + space() for part in item)
            return "[" + (",".join(parts) or space()) + "]"
        return string(item) if isinstance(item, str) else json.dumps(item)

    return space() + write(value) + space()


@st.composite
def bodies(draw: Any) -> tuple[str, list[Any]]:
    """The text of an object with `messages` somewhere in it, and those messages."""
    pool = draw(st.lists(st.dictionaries(WORDS, VALUES, max_size=3), min_size=1, max_size=3))
    messages = draw(st.lists(st.sampled_from(pool), max_size=5))
    members = draw(st.dictionaries(WORDS, VALUES, max_size=3))
    members.pop("messages", None)
    pairs = list(members.items())
    pairs.insert(draw(st.integers(0, len(pairs))), ("messages", messages))
    return draw(odd_json(dict(pairs))), messages


class TestInputs:
    @hypothesis(max_examples=150, deadline=None)
    @given(bodies())
    def test_any_text_is_cut_at_its_messages_and_put_together_again(
        self, made: tuple[str, list[Any]]
    ) -> None:
        text, messages = made
        template, cut = inputs.cut(text)
        parts = json.loads(template)
        assert "".join(cut[p] if n % 2 else p for n, p in enumerate(parts)) == text
        assert [json.loads(cut[name]) for name in parts[1::2]] == messages
        assert all(inputs.digest(payload) == name for name, payload in cut.items())

    @pytest.mark.parametrize(
        "text",
        [
            "{}",
            ' { "messages" : [ ] } ',
            '{"messages":[{"id":"1"},{"id":"1"}]}',
            '{"state":{"messages":[{"id":"no"}]},"messages":[{"id":"1"}],"x":[{"messages":[1]}]}',
            '{"a":"\\"messages\\":[","mess\\u0061ges":[\n{"a":"]"} ,\t{"b":"\\u0000\\ud800"}\r\n]}',
            '{"messages":[{"n":1e400000000},{"n":-0.0},{"n":1E2}]}',
            '{"messages":[' + ",".join(['{"id":"x"}'] * 500) + "]}",
        ],
    )
    @database
    def test_what_was_posted_is_rebuilt_byte_for_byte(self, text: str) -> None:
        run = opened(text=text)
        assert store.rebuild_input(store.refresh(run)) == text

    @database
    def test_a_message_is_stored_once_per_thread_however_often_it_comes(self) -> None:
        def post(thread: str, run: str, *messages: Any) -> Run:
            text = protocol.dumps(run_input(thread, run, messages=messages))
            made = opened(thread=thread, run=run, text=text)
            assert store.rebuild_input(made) == text
            return ended(made)

        post("t1", "r1", said("1"))
        post("t1", "r2", said("1"), said("2"), said("2"))
        post("t1", "r3", said("1"), said("2"), said("1", "changed"))
        assert InputMessage.objects.count() == 3
        post("t2", "r1", said("1"))
        assert InputMessage.objects.count() == 4

    @database
    def test_an_input_of_very_many_messages_can_be_read_again(self) -> None:
        text = protocol.dumps(run_input(messages=[said(str(n), "") for n in range(35_000)]))
        run = opened(text=text)
        assert store.rebuild_input(run) == text

    @database
    def test_a_run_without_input_has_none(self) -> None:
        run = opened()
        Run.objects.filter(pk=run.pk).update(input="")
        assert store.rebuild_input(store.refresh(run)) == ""


# -- opening ---------------------------------------------------------------------


@database
class TestOpening:
    def test_the_first_run_makes_the_thread(self, user: User) -> None:
        found = store.open_run(opening(scope=f"user:{user.pk}", user_id=user.pk))
        assert (found.thread.owner, found.attached) == (user, False)
        assert found.run.status == "running"
        assert found.run.offset == 0
        assert found.run.lease_owner == lease.owner()
        assert found.run.lease_token
        expires = store.refresh(found.run).lease_expires
        assert expires is not None
        assert expires > timezone.now()

    def test_scopes_are_apart(self) -> None:
        assert opened(scope="user:1").thread_id != opened(scope="user:2").thread_id

    def test_a_busy_thread_refuses_and_stores_nothing(self) -> None:
        first = opened()
        before = InputMessage.objects.count()
        with pytest.raises(errors.ThreadBusy) as caught:
            opened(run="r2", text='{"messages":[{"id":"x"}]}')
        assert caught.value.details == {"run": str(first.key), "runId": "r1"}
        assert Run.objects.count() == 1
        assert InputMessage.objects.count() == before

    @pytest.mark.parametrize("is_ended", [False, True])
    def test_the_same_post_attaches(self, is_ended: bool) -> None:
        run = opened()
        if is_ended:
            ended(run)
        again = store.open_run(opening())
        assert (again.run.pk, again.attached) == (run.pk, True)

    @pytest.mark.parametrize("other", [{"input_hash": "x"}, {"agent": "other"}])
    @pytest.mark.parametrize("is_ended", [False, True])
    def test_the_same_id_for_something_else_is_refused(self, is_ended: bool, other: Any) -> None:
        run = opened()
        if is_ended:
            ended(run)
        with pytest.raises(errors.RunIdTaken):
            opened(**other)

    def test_the_database_itself_allows_one_running_run_per_thread(self) -> None:
        run = opened()
        with pytest.raises(IntegrityError), transaction.atomic():
            Run.objects.create(thread=run.thread, run_id="r2", agent="a", offset=0)

    @pytest.mark.parametrize("expired", [True, False])
    def test_a_run_of_the_dead_is_abandoned(self, expired: bool) -> None:
        run = opened()
        changes: dict[str, Any] = {"lease_owner": f"{socket.gethostname()} 1 other-boot 1"}
        if expired:
            past = timezone.now() - timedelta(seconds=1)
            changes = {"lease_owner": "elsewhere 1 b 1", "lease_expires": past}
        Run.objects.filter(pk=run.pk).update(**changes)
        with pytest.raises(store.Abandoned) as caught:
            opened(run="r2")
        assert caught.value.run.pk == run.pk
        assert Run.objects.count() == 1
        assert [r.pk for r in store.abandoned()] == [run.pk]

    def test_a_shared_thread_is_found_by_its_key(self) -> None:
        run = ended(opened(scope="user:1"))
        joined = opened(scope="user:2", run="r2", thread_key=run.thread.key)
        assert joined.thread_id == run.thread_id
        with pytest.raises(errors.NotFound):
            opened(scope="user:2", run="r3", thread_key=uuid.uuid4())
        assert Thread.objects.count() == 1

    def test_positions_go_on_without_a_gap(self) -> None:
        offsets = []
        for number, count in enumerate((3, 2, 5, 4)):
            run = ended(opened(run=f"r{number}"), count)
            offsets.append((run.offset, run.last_seq))
        assert offsets == [(0, 3), (3, 2), (5, 5), (10, 4)]
        thread = Thread.objects.get()
        assert store.end_position(thread.pk) == 14
        assert store.snapshot(thread).position == 14
        assert store.snapshot(thread, at=4).position == 4
        assert store.snapshot(thread, at=0).position == 0
        for after in range(14):
            found = store.run_at(thread.pk, after)
            assert found is not None
            offset = found.offset or 0
            assert offset <= after < offset + found.last_seq
        assert store.run_at(thread.pk, 14) is None

    def test_a_base_must_be_the_end_of_the_history(self) -> None:
        run = ended(opened(), 3)
        epoch = run.thread.epoch
        for base in (f"{epoch}-2", f"{epoch}-4", "aaaaaa-3", ""):
            with pytest.raises(errors.StaleHistory) as caught:
                opened(run="r2", base=base)
            assert caught.value.details == {"cursor": f"{epoch}-3"}
        assert opened(run="r2", base=f"{epoch}-3").offset == 3

    def test_interrupts_wait_for_all_their_answers(self) -> None:
        interrupts = [{"id": "i1"}, {"id": "i2"}]
        outcome = {"type": "interrupt", "interrupts": interrupts}
        run = ended(opened(), status="interrupt", outcome=outcome)
        assert store.open_interrupts(run.thread_id) == interrupts
        for resume in ((), ("i1",)):
            with pytest.raises(errors.InterruptsOpen) as caught:
                opened(run="r2", resume=frozenset(resume))
            assert caught.value.details == sorted({"i1", "i2"} - set(resume))
        with pytest.raises(errors.InvalidInput, match="not here") as unknown:
            opened(run="r2", resume=frozenset({"i1", "i2", "i3"}))
        assert [p["path"] for p in unknown.value.details] == ["resume"]
        failed = ended(
            opened(run="r2", resume=frozenset({"i1", "i2"})), status="error", error_code="x"
        )
        assert store.open_interrupts(failed.thread_id) == interrupts
        ended(opened(run="r3", resume=frozenset({"i1", "i2"})))
        assert store.open_interrupts(failed.thread_id) == []

    def test_a_parent_must_be_a_run_of_this_owner(self) -> None:
        ended(opened(scope="user:2", run="theirs"))
        ended(opened(scope="user:1", thread="elsewhere", run="mine"))
        with pytest.raises(errors.InvalidInput):
            opened(parent_run="theirs")
        assert opened(parent_run="mine").parent_run == "mine"


# -- ending ----------------------------------------------------------------------


@database
class TestEnding:
    def test_the_terminal_frees_the_slot_and_settles_the_commands(self) -> None:
        run = opened()
        store.command(run, Command.Kind.CANCEL, "p1")
        assert len(store.pending_commands([run.pk])) == 1
        run = ended(run, 4)
        assert (run.status, run.last_seq, run.bytes) == ("success", 4, 10)
        assert (run.lease_token, run.lease_expires) == (None, None)
        assert run.finished_at
        assert store.pending_commands([run.pk]) == []
        assert opened(run="r2").offset == 4

    def test_without_the_token_nothing_is_written(self) -> None:
        run = opened()
        with pytest.raises(errors.Fenced):
            store.finish(run.pk, 1, whole(run), 10, store.Ending(status="success"))
        assert not RunEvent.objects.exists()
        assert store.refresh(run).status == "running"

    @pytest.mark.parametrize("arrived", [True, False])
    def test_a_connection_lost_at_the_end_is_no_loss(
        self, arrived: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = opened()
        failures: list[int] = []
        real = sql.writing

        @contextmanager
        def writing(found: Any) -> Any:
            if failures:
                with real(found):
                    yield
                return
            failures.append(1)
            with real(found):
                yield
                if not arrived:
                    raise OperationalError("lost before COMMIT")
            raise OperationalError("lost after COMMIT")

        monkeypatch.setattr(sql, "writing", writing)
        run = ended(run)
        assert run.status == "success"
        assert [r.seq for r in store.read(run.pk)] == [1, 2, 3]

    @pytest.mark.parametrize("error", [OperationalError, InterfaceError])
    def test_a_connection_that_cannot_be_opened_is_tried_again(
        self, error: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = opened()
        original, refusals = sql.connection, iter([error("connection refused")])

        def connection() -> Any:
            if refused := next(refusals, None):
                raise refused
            return original()

        monkeypatch.setattr(sql, "connection", connection)
        assert ended(run).status == "success"

    def test_odd_text_survives_in_every_column(self) -> None:
        value = {ODD: [ODD, {"deep": ODD}], "n": 10**30}
        run = opened(
            text=json.dumps(run_input(messages=[said("m", ODD)], forwardedProps={ODD: ODD}))
        )
        rows = [
            row(1, {"type": "RUN_STARTED", "threadId": "t1", "runId": "r1"}),
            row(2, {"type": "CUSTOM", "name": ODD, "value": value}),
            row(3, {"type": "RUN_ERROR", "message": ODD, "code": ODD}),
        ]
        ending = store.Ending(
            status="error",
            result=value,
            outcome=value,
            usage=value,
            error_code=ODD,
            error_message=ODD,
            error_detail=ODD,
            findings=[{"kind": ODD, "message": ODD}],
            counts={ODD: 1},
        )
        store.finish(run.pk, run.lease_token or 0, rows, 10, ending)
        store.add_findings(run.pk, [{"kind": "late", "message": ODD}])
        run = store.refresh(run)
        cleaned = {CLEAN: [CLEAN, {"deep": CLEAN}], "n": 10**30}
        assert (run.result, run.outcome, run.usage) == (cleaned, cleaned, cleaned)
        assert (run.error_code, run.error_message, run.error_detail) == (CLEAN, CLEAN, CLEAN)
        assert [f["message"] for f in run.findings] == [CLEAN, CLEAN]
        assert protocol.loads(store.read(run.pk)[1].payload)["value"] == value
        assert json.loads(store.rebuild_input(run))["messages"] == [said("m", ODD)]

    def test_reading_by_pages_gives_everything_once(self, settings: Any) -> None:
        settings.AGUIAPP = {"PAGE_EVENTS": 4}
        run = ended(opened(), 11)
        for after in range(12):
            for until in (None, *range(after, 12)):
                pages = store.pages(run.pk, after, until)
                seqs = [r.seq for page in pages for r in page]
                assert seqs == list(range(after + 1, (11 if until is None else until) + 1))

    def test_an_unreadable_row_breaks_only_itself(self) -> None:
        run = ended(opened(), 4)
        RunEvent.objects.filter(run=run, seq=2).update(payload="{broken")
        RunEvent.objects.filter(run=run, seq=3).update(payload='{"type":"CUSTOM"}')
        found = store.snapshot(run.thread)
        assert (found.position, found.unreadable) == (4, [2, 3])


# -- leases ----------------------------------------------------------------------


@database
class TestLeases:
    def test_renewal_moves_the_expiry_and_says_whose_token_is_gone(self) -> None:
        kept, lost = opened(thread="a"), opened(thread="b")
        past = timezone.now() - timedelta(hours=1)
        Run.objects.update(lease_expires=past)
        rows = [(kept.pk, kept.lease_token or 0, 7, 99), (lost.pk, 1, 8, 98)]
        assert store.renew(rows) == [lost.pk]
        kept, lost = store.refresh(kept), store.refresh(lost)
        assert kept.lease_expires is not None
        ahead = kept.lease_expires - timezone.now()
        assert timedelta(seconds=10) < ahead <= timedelta(seconds=16)
        assert (kept.last_seq, kept.bytes) == (7, 99)
        assert (lost.lease_expires, lost.last_seq) == (past, 0)
        assert store.renew([]) == []

    def test_an_ended_run_has_no_lease_to_renew(self) -> None:
        run = opened()
        token = run.lease_token or 0
        ended(run)
        assert store.renew([(run.pk, token, 1, 1)]) == [run.pk]
        assert store.refresh(run).lease_expires is None

    def test_only_one_can_take_a_run(self) -> None:
        run = opened()
        token = store.take(run)
        assert token
        assert store.take(run) is None
        assert store.refresh(run).lease_token == token

    def test_a_live_lease_is_not_abandoned(self) -> None:
        opened()
        assert store.abandoned() == []

    @pytest.mark.parametrize(
        ("owner", "dead"),
        [
            ("{host} {pid} {boot} {start}", False),
            ("{host} {pid} {boot} 1", True),
            ("{host} 4194303 {boot} 1", True),
            ("{host} {pid} other {start}", True),
            ("elsewhere {pid} {boot} 1", False),
            ("{host} {pid} - -", False),
            ("", False),
            ("{host} x {boot} 1", False),
        ],
    )
    def test_the_dead_are_known_by_boot_and_start(self, owner: str, dead: bool) -> None:
        _, pid, boot, start = lease.owner().split(" ")
        assert pid == str(os.getpid())
        text = owner.format(host=socket.gethostname(), pid=pid, boot=boot, start=start)
        assert lease.is_dead(text) is dead


@database
def test_helpers_make_legal_rows() -> None:
    run = ended(opened(), 5)
    scripts.legal([protocol.loads(r.payload) for r in store.read(run.pk)])


@pytest.mark.django_db(transaction=True)
def test_a_page_holds_so_many_bytes_or_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended(opened(), 8)
    size = len(store.read(run.pk)[1].payload)
    monkeypatch.setattr(reads, "PAGE_BYTES", 3 * size)
    found = [row.seq for page in store.pages(run.pk) for row in page]
    assert found == list(range(1, 9))
    assert max(len(page) for page in store.pages(run.pk)) <= 3
    monkeypatch.setattr(reads, "PAGE_BYTES", 1)
    assert [[row.seq for row in page] for page in store.pages(run.pk)] == [[n] for n in found]


def test_a_process_that_is_dead_and_not_yet_buried_is_dead() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        owner = lease._owner_of(process.pid)
        assert not lease.is_dead(owner)
        process.kill()
        deadline = time.monotonic() + 10
        while not lease.is_dead(owner):
            assert time.monotonic() < deadline
    finally:
        process.wait(10)
    assert lease.is_dead(owner)
