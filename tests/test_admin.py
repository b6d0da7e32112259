"""The admin shows threads and runs to those who may see them, exactly as they are stored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.http import HttpRequest, StreamingHttpResponse
from django.test import AsyncClient, Client
from django.test.utils import CaptureQueriesContext
from django.urls import path, reverse

from aguiapp import conf, protocol, store
from aguiapp.admin import cells, export, folds, replay
from aguiapp.admin.readonly import ReadOnly
from aguiapp.models import Participant, Run, RunEvent, Thread
from aguiapp.store import reads

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]

urlpatterns = [path("admin/", admin.site.urls)]

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
POISON = {
    "no JSON": "not json <script>alert(1)</script>",
    "no object": '["a list"]',
    "no known type": '{"type": "FUTURE_EVENT"}',
    "cut off": '{"type": "TEXT_MESSAGE_CONTENT", "mess',
    "NaN": '{"type": "STATE_SNAPSHOT", "snapshot": NaN}',
}
HALF = r'{"type":"TEXT_MESSAGE_CONTENT","messageId":"m-b","delta":"half \ud83d"}'
NUL = r'{"type":"STATE_SNAPSHOT","snapshot":{"nul":"a\u0000b","half":"\udc00","big":123456789012345678901}}'


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    folds.memory.clear()
    yield
    folds.memory.clear()


def conversation(name: str, words: int = 3) -> list[dict[str, Any]]:
    """The events of a run with text, a tool, state and a step."""
    turn = {"id": f"u-{name}", "role": "user", "content": f"question of {name}"}
    return [
        {"type": "RUN_STARTED", "threadId": "t", "runId": name, "input": _input(name, turn)},
        {"type": "STEP_STARTED", "stepName": "plan"},
        {"type": "STATE_SNAPSHOT", "snapshot": {"count": 0, "run": name}},
        {"type": "TEXT_MESSAGE_START", "messageId": f"m-{name}", "role": "assistant"},
        *(
            {"type": "TEXT_MESSAGE_CONTENT", "messageId": f"m-{name}", "delta": f"word {n} "}
            for n in range(words)
        ),
        {"type": "TEXT_MESSAGE_END", "messageId": f"m-{name}"},
        {"type": "TOOL_CALL_START", "toolCallId": f"c-{name}", "toolCallName": "lookup"},
        {"type": "TOOL_CALL_ARGS", "toolCallId": f"c-{name}", "delta": '{"id": 1}'},
        {"type": "STATE_DELTA", "delta": [{"op": "replace", "path": "/count", "value": words}]},
        {"type": "TOOL_CALL_END", "toolCallId": f"c-{name}"},
        {"type": "STEP_FINISHED", "stepName": "plan"},
        {"type": "RUN_FINISHED", "threadId": "t", "runId": name},
    ]


def _input(name: str, *messages: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {"tools": [], "context": [], "state": {}, "forwardedProps": {}}
    return {"threadId": "t", "runId": name, "messages": list(messages), **given}


def make_run(thread: Thread, name: str, payloads: list[str], **fields: Any) -> Run:
    """A run as the store leaves it, with these payload texts."""
    values: dict[str, Any] = {
        "agent": "bot",
        "status": Run.Status.SUCCESS,
        "offset": sum(run.last_seq for run in thread.runs.all()),
        "last_seq": len(payloads),
        "bytes": sum(len(each.encode()) for each in payloads),
        "started_at": START,
        "finished_at": START + timedelta(seconds=75),
        **fields,
    }
    run = Run.objects.create(thread=thread, run_id=name, **values)
    RunEvent.objects.bulk_create(
        RunEvent(
            run_id=run.pk,
            seq=seq,
            type=_code(payload),
            payload=payload,
            created=START + timedelta(milliseconds=10 * seq),
        )
        for seq, payload in enumerate(payloads, 1)
    )
    return run


def _code(payload: str) -> int:
    try:
        return protocol.TYPE_CODES[json.loads(payload)["type"]]
    except (ValueError, KeyError, TypeError):
        return protocol.TYPE_CODES["RAW"]


def texts(events: list[dict[str, Any]]) -> list[str]:
    """The stored texts of events."""
    return [protocol.dumps(event) for event in events]


@pytest.fixture
def thread(user: User) -> Thread:
    """A thread without runs."""
    return Thread.objects.create(scope="user:1", thread_id="thread-1", title="Orders", owner=user)


@pytest.fixture
def run(thread: Thread) -> Run:
    """The second run of its thread."""
    make_run(thread, "first", texts(conversation("first")))
    return make_run(thread, "second", texts(conversation("second", words=5)))


@pytest.fixture
def poisoned(thread: Thread) -> Run:
    """A run with rows that cannot be read, half a surrogate pair, and a NUL."""
    events = texts(conversation("b"))
    return make_run(thread, "b", [*events[:4], HALF, NUL, *POISON.values(), *events[4:]])


@pytest.fixture
def web(staff: User, client: Client) -> Client:
    """The browser of somebody who may do everything."""
    client.force_login(staff)
    return client


def client_with(*permissions: str) -> Client:
    """The browser of a staff member with exactly these permissions."""
    person = User.objects.create_user(f"staff{User.objects.count()}", is_staff=True)
    person.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(person)
    return client


def pages(run: Run) -> dict[str, str]:
    """The addresses of a run's pages."""
    names = ("change", "replay", "replay_events", "replay_at", "export")
    return {name: reverse(f"admin:aguiapp_run_{name}", args=[run.pk]) for name in names}


def body(response: Any) -> bytes:
    """The whole of a streamed answer."""
    assert isinstance(response, StreamingHttpResponse)
    return b"".join(response)


# -- who may see what ---------------------------------------------------------------------------

VIEW, PAYLOAD, EXPORT = "view_run", "view_run_payload", "export_run"


@pytest.mark.parametrize(
    ("permissions", "form", "watching", "exporting"),
    [
        ((), 403, 403, 403),
        ((VIEW,), 200, 403, 403),
        ((PAYLOAD, EXPORT), 403, 403, 403),
        ((VIEW, PAYLOAD), 200, 200, 403),
        ((VIEW, EXPORT), 200, 403, 403),
        ((VIEW, PAYLOAD, EXPORT), 200, 200, 200),
    ],
)
def test_each_page_needs_its_permissions(
    run: Run, permissions: tuple[str, ...], form: int, watching: int, exporting: int
) -> None:
    client = client_with(*permissions)
    found = {name: client.get(address).status_code for name, address in pages(run).items()}
    assert found == {
        "change": form,
        "replay": watching,
        "replay_events": watching,
        "replay_at": watching,
        "export": exporting,
    }


def test_the_form_offers_only_what_is_allowed(run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(error_detail="the traceback", result={"secret": 1})
    address = pages(run)["change"]
    bare = client_with(VIEW).get(address).content.decode()
    assert "the traceback" not in bare
    assert "secret" not in bare
    assert pages(run)["replay"] not in bare
    assert pages(run)["export"] not in bare
    full = client_with(VIEW, PAYLOAD, EXPORT).get(address).content.decode()
    assert "the traceback" in full
    assert "secret" in full
    assert pages(run)["replay"] in full
    assert pages(run)["export"] in full


def test_the_list_links_replay_only_for_those_who_may_follow(run: Run) -> None:
    address = reverse("admin:aguiapp_run_changelist")
    assert pages(run)["replay"] not in client_with(VIEW).get(address).content.decode()
    assert pages(run)["replay"] in client_with(VIEW, PAYLOAD).get(address).content.decode()


def test_strangers_are_sent_to_the_login(run: Run, client: Client) -> None:
    for address in pages(run).values():
        response = client.get(address)
        assert response.status_code == 302
        assert "/login/" in response["Location"]


def test_nobody_writes_through_the_admin(run: Run, web: Client) -> None:
    for model, pk in (("run", run.pk), ("thread", run.thread_id)):
        assert web.get(reverse(f"admin:aguiapp_{model}_add")).status_code == 403
        assert web.get(reverse(f"admin:aguiapp_{model}_delete", args=[pk])).status_code == 403
        change = reverse(f"admin:aguiapp_{model}_change", args=[pk])
        assert web.post(change, {"run_id": "other"}).status_code == 403
    assert web.post(pages(run)["replay"]).status_code == 405
    assert not ReadOnly().has_add_permission(HttpRequest())


def test_an_unknown_run_is_not_found(web: Client, run: Run) -> None:
    for pk in (run.pk + 1, 10**30):
        for name in ("replay", "replay_events", "replay_at", "export"):
            assert web.get(reverse(f"admin:aguiapp_run_{name}", args=[pk])).status_code == 404


# -- lists --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["run", "thread"])
@pytest.mark.parametrize("query", ["", "?q=r1", "?status=success", "?agent=bot&kind=agent"])
def test_a_list_costs_the_same_queries_for_5_and_50_rows(
    web: Client, staff: User, model: str, query: str
) -> None:
    if model == "thread" and not query.startswith("?q"):
        query = ""
    address = reverse(f"admin:aguiapp_{model}_changelist") + query
    counts = []
    for total in (5, 50):
        for number in range(Thread.objects.count(), total):
            thread = Thread.objects.create(scope="s", thread_id=f"r1{number}", owner=staff)
            make_run(thread, f"r1{number}", [], user=staff)
        with CaptureQueriesContext(
            connection,
        ) as queries:
            response = web.get(address)
        assert len(response.context["cl"].result_list) == total
        counts.append(len(queries))
        assert not [each for each in queries if "aguiapp_runevent" in each["sql"]]
    assert counts[0] == counts[1] <= 6


def test_the_list_tells_the_statuses_apart(web: Client, thread: Thread) -> None:
    for status in Run.Status:
        code = "agent_failed" if status == "error" else ""
        make_run(thread, f"run-{status}", [], status=status, error_code=code)
    page = web.get(reverse("admin:aguiapp_run_changelist")).content.decode()
    for status in Run.Status:
        assert f"agui-badge-{status}" in page
    assert ">agent_failed</code>" in page
    assert "1 min 15 s" in page


def test_long_ids_are_short_in_lists_and_whole_on_pointing(web: Client, user: User) -> None:
    thread = Thread.objects.create(scope="s", thread_id="thread-without-title", owner=user)
    make_run(thread, "run<of-the-list>", [], kind="edit")
    page = web.get(reverse("admin:aguiapp_run_changelist")).content.decode()
    assert '<span class="nowrap" title="run&lt;of-the-list&gt;">run&lt;of-t…</span></a>' in page
    assert '<span class="nowrap" title="thread-without-title">thread-w…</span>' in page
    assert "field-kind" not in page
    assert page.index("field-status_badge") < page.index("field-agent") < page.index("field-run_")


def test_a_thread_without_a_title_is_called_by_its_id_once(web: Client, thread: Thread) -> None:
    Thread.objects.create(scope="s", thread_id="untitled", owner=thread.owner)
    page = web.get(reverse("admin:aguiapp_thread_changelist")).content.decode()
    assert '<span title="thread-1">Orders</span>' in page
    assert page.count(">untitled<") == 1


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?q=alpha", {"alpha"}),
        ("?q=thread-1", {"alpha", "beta"}),
        ("?q=agent_f", {"beta"}),
        ("?q=%00", {"alpha", "beta"}),
        ("?status=error", {"beta"}),
        ("?agent=one", {"alpha"}),
        ("?agent=gone", set()),
        ("?kind=edit", {"beta"}),
    ],
)
def test_runs_are_searched_and_filtered(
    web: Client, thread: Thread, query: str, expected: set[str]
) -> None:
    make_run(thread, "alpha", [], agent="one")
    fields = {"agent": "two", "status": "error", "kind": "edit", "error_code": "agent_failed"}
    make_run(thread, "beta", [], **fields)
    response = web.get(reverse("admin:aguiapp_run_changelist") + query)
    assert {run.run_id for run in response.context["cl"].result_list} == expected


def test_a_thread_leads_to_its_runs(web: Client, run: Run, other: User) -> None:
    Participant.objects.create(thread=run.thread, user=other)
    runs = reverse("admin:aguiapp_run_changelist") + f"?thread__id__exact={run.thread_id}"
    assert runs in web.get(reverse("admin:aguiapp_thread_changelist")).content.decode()
    form = web.get(reverse("admin:aguiapp_thread_change", args=[run.thread_id])).content.decode()
    assert runs in form
    assert "bob" in form
    elsewhere = Thread.objects.create(scope="s", thread_id="elsewhere")
    make_run(elsewhere, "third", [])
    found = {each.run_id for each in web.get(runs).context["cl"].result_list}
    assert found == {"first", "second"}


def test_the_form_shows_the_input_with_its_messages(
    web: Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run.objects.filter(pk=run.pk).update(input="[]")
    monkeypatch.setattr(store, "rebuild_input", lambda run: '{"messages": ["the posted text"]}')
    assert "the posted text" in web.get(pages(run)["change"]).content.decode()


# -- Replay -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("stride", [3, folds.STRIDE])
def test_replay_equals_the_fold_of_the_prefix_at_every_event(
    web: Client, run: Run, order: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "STRIDE", stride)
    monkeypatch.setattr("aguiapp.conf.get", _small_pages(2))
    events = conversation("second", words=5)
    before = conversation("first")
    seqs = list(range(len(events) + 1))
    for seq in seqs if order == "forwards" else reversed(seqs):
        found = web.get(pages(run)["replay_at"], {"seq": seq}).json()
        expected = protocol.fold([*before, *events[:seq]])
        assert found["messages"] == expected.messages
        assert found["state"] == expected.state
        assert found["pendingToolCallIds"] == expected.pending_tool_calls
        assert found["interrupts"] == expected.interrupts
        open_items = [(item["kind"], item["id"]) for item in found["openItems"]]
        assert open_items == [(item.kind, item.id) for item in expected.open_items]
        assert found["position"] == len(before) + seq
        assert found["event"] == (protocol.dumps(events[seq - 1]) if seq else None)
        assert found["valid"] is (seq > 0)
        assert found["unreadable"] == 0


def _small_pages(rows: int) -> Any:
    settings = conf.Settings(PAGE_EVENTS=rows)
    return lambda: settings


def test_replay_equals_the_snapshot_of_the_store(poisoned: Run) -> None:
    for seq in range(poisoned.last_seq + 1):
        found, expected = folds.at(poisoned, seq), store.snapshot(poisoned.thread, at=seq)
        assert (found.fold, found.unreadable) == (expected.fold, expected.unreadable)


def test_the_memory_of_folds_is_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "STRIDE", 1)
    monkeypatch.setattr(folds, "MEMORY_BYTES", 5000)
    monkeypatch.setattr("aguiapp.conf.get", _small_pages(1))
    end = folds.at(run, run.last_seq).fold
    assert 0 < folds.memory.used <= 5000
    assert folds.at(run, run.last_seq).fold == end
    monkeypatch.setattr(folds, "FOLD_BYTES", 10)
    folds.memory.clear()
    folds.at(run, run.last_seq)
    assert folds.memory.used == 0


def test_an_interrupt_is_shown(web: Client, thread: Thread) -> None:
    interrupt = {"id": "i1", "reason": "approval"}
    events = conversation("i")
    events[-1]["outcome"] = {"type": "interrupt", "interrupts": [interrupt]}
    run = make_run(thread, "i", texts(events), status="interrupt")
    found = web.get(pages(run)["replay_at"], {"seq": run.last_seq}).json()
    assert found["interrupts"] == [interrupt]


def test_only_the_last_messages_are_sent_when_asked_so(web: Client, run: Run) -> None:
    address = pages(run)["replay_at"]
    whole = web.get(address, {"seq": run.last_seq}).json()
    cut = web.get(address, {"seq": run.last_seq, "messages": 2}).json()
    assert cut["messages"] == whole["messages"][-2:]
    assert cut["messageCount"] == whole["messageCount"] == len(whole["messages"])


def test_events_come_in_pages(web: Client, run: Run) -> None:
    address = pages(run)["replay_events"]
    first = web.get(address, {"limit": 4}).json()
    rest = web.get(address, {"after": 4}).json()
    assert first["last"] == rest["last"] == run.last_seq
    lines = [*first["events"], *rest["events"]]
    assert [line["seq"] for line in lines] == list(range(1, run.last_seq + 1))
    events = conversation("second", words=5)
    assert [line["type"] for line in lines] == [event["type"] for event in events]
    assert [line["size"] for line in lines] == [len(text.encode()) for text in texts(events)]
    assert all(line["valid"] for line in lines)
    summaries = [line["summary"] for line in lines]
    assert "word 0 " in summaries
    assert "lookup" in summaries
    assert "replace /count" in summaries


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("replay_at", {"seq": "x"}),
        ("replay_at", {"seq": "-1"}),
        ("replay_at", {"seq": "999"}),
        ("replay_at", {"seq": "9" * 5000}),
        ("replay_events", {"limit": "1001"}),
        ("replay_events", {"limit": "0"}),
        ("replay_events", {"after": str(2**63)}),
    ],
)
def test_a_bad_number_is_refused(web: Client, run: Run, name: str, query: dict[str, str]) -> None:
    response = web.get(pages(run)[name], query)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "bad_parameter"


def test_the_page_opens_at_the_event_that_the_address_names(web: Client, run: Run) -> None:
    for query, seq in (("", run.last_seq), ("?seq=3", 3), ("?seq=rubbish", run.last_seq)):
        response = web.get(pages(run)["replay"] + query)
        assert response.context["config"]["seq"] == seq


def test_the_page_reads_without_javascript(web: Client, run: Run) -> None:
    page = web.get(pages(run)["replay"]).content.decode()
    plain = page[page.index("<noscript>") : page.index("</noscript>")]
    assert plain.count("<tr>") == 1 + run.last_seq
    assert "TOOL_CALL_START" in plain
    assert "&quot;count&quot;: 5" in plain


def test_a_long_run_folds_its_final_state_only_when_asked(
    web: Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "PLAIN_FOLD", 5)
    page = pages(run)["replay"]
    assert "&quot;count&quot;: 5" not in web.get(page).content.decode()
    assert "&quot;count&quot;: 5" in web.get(page + "?plain").content.decode()


def test_the_page_holds_nothing_inline(web: Client, run: Run) -> None:
    for address in (pages(run)["replay"], pages(run)["change"]):
        page = web.get(address).content.decode()
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
        scripts = re.findall(r"<script[^>]*>", page)
        assert all("src=" in tag or "application/json" in tag for tag in scripts)


def test_an_empty_and_a_queued_run_can_be_replayed(web: Client, run: Run) -> None:
    empty = make_run(run.thread, "empty", [], status="error")
    queued = make_run(run.thread, "queued", [], status="queued", offset=None, started_at=None)
    for each, messages in ((empty, 6), (queued, 0)):
        assert web.get(pages(each)["replay"]).status_code == 200
        assert web.get(pages(each)["replay_events"]).json()["events"] == []
        found = web.get(pages(each)["replay_at"]).json()
        assert (found["seq"], found["event"], len(found["messages"])) == (0, None, messages)
        assert body(web.get(pages(each)["export"])) == b""


def test_a_running_run_shows_what_is_stored_now(web: Client, thread: Thread) -> None:
    events = texts(conversation("live"))
    run = make_run(thread, "live", events[:6], status="running", finished_at=None)
    Run.objects.filter(pk=run.pk).update(last_seq=2)
    found = web.get(pages(run)["replay_events"]).json()
    assert (found["last"], len(found["events"]), found["ended"]) == (6, 6, False)
    assert web.get(pages(run)["replay_at"], {"seq": 6}).json()["event"] == events[5]
    assert body(web.get(pages(run)["export"])).decode().splitlines() == events[:6]


# -- what cannot be read ------------------------------------------------------------------------


def test_rows_that_cannot_be_read_are_flagged_and_break_nothing(web: Client, poisoned: Run) -> None:
    lines = web.get(pages(poisoned)["replay_events"]).json()["events"]
    flagged = {line["seq"]: line["summary"] for line in lines if not line["valid"]}
    assert flagged == dict(enumerate(POISON.values(), 7))
    for seq, text in enumerate(POISON.values(), 7):
        found = web.get(pages(poisoned)["replay_at"], {"seq": seq}).json()
        assert (found["event"], found["valid"]) == (text, False)
        assert found["unreadableSeqs"] == list(range(7, seq + 1))
    page = web.get(pages(poisoned)["replay"]).content.decode()
    assert "<script>alert" not in page
    assert page.count("⚠") == len(POISON)


def test_lone_surrogates_and_nul_arrive_as_stored(web: Client, poisoned: Run) -> None:
    response = web.get(pages(poisoned)["replay_at"], {"seq": 6})
    assert response.content.isascii()
    found = response.json()
    assert found["messages"][-1]["content"] == "half \ud83d"
    assert found["state"] == {"nul": "a\0b", "half": "\udc00", "big": 123456789012345678901}
    assert found["event"] == NUL


def test_lists_search_filters_and_forms_survive_poisoned_rows(web: Client, poisoned: Run) -> None:
    changelist = reverse("admin:aguiapp_run_changelist")
    for query in ("", "?q=b", "?status=success"):
        assert len(web.get(changelist + query).context["cl"].result_list) == 1
    assert web.get(pages(poisoned)["change"]).status_code == 200


def test_a_missing_row_is_no_event(web: Client, run: Run) -> None:
    RunEvent.objects.filter(run_id=run.pk, seq=5).delete()
    found = web.get(pages(run)["replay_at"], {"seq": 5}).json()
    assert (found["event"], found["valid"], found["position"]) == (
        None,
        False,
        len(conversation("first")) + 5,
    )
    assert len(web.get(pages(run)["replay_events"]).json()["events"]) == run.last_seq - 1


def test_a_state_deeper_than_json_goes_is_refused_and_the_page_stays(
    web: Client, thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "STRIDE", 1)
    nest: Any = {}
    for _ in range(90):
        nest = {"a": nest}
    deltas = [
        {
            "type": "STATE_DELTA",
            "delta": [{"op": "add", "path": "/a" * (90 * n + 1), "value": nest}],
        }
        for n in range(120)
    ]
    run = make_run(thread, "deep", texts(deltas))
    assert web.get(pages(run)["replay"]).status_code == 200
    response = web.get(pages(run)["replay_at"], {"seq": run.last_seq})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    assert web.get(pages(run)["replay_at"], {"seq": 2}).status_code == 200
    assert len(web.get(pages(run)["replay_events"]).json()["events"]) == run.last_seq


def test_a_page_can_hold_any_text() -> None:
    assert cells.block("half \ud83d and \0") == (
        '<pre class="agui-pre">half \\ud83d and \\u0000</pre>'
    )
    assert cells.json_block({"key": "\udc00"}).encode()
    assert cells.block("") == cells.json_block({}) == "-"
    assert len(cells.block("x" * 300_000)) < 210_000
    assert "later" in cells.badge("later")
    assert cells.duration(timedelta(hours=2, minutes=3)) == "2 h 03 min"


# -- export -------------------------------------------------------------------------------------


def test_the_export_is_the_stored_texts_and_nothing_else(
    web: Client, poisoned: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "PAGE_BYTES", 200)
    response = web.get(pages(poisoned)["export"])
    stored = poisoned.events.order_by("seq").values_list("payload", flat=True)
    assert body(response) == b"".join(text.encode() + b"\n" for text in stored)
    assert response["Content-Disposition"] == 'attachment; filename="b.agui.jsonl"'


@pytest.mark.django_db(transaction=True)
async def test_the_export_is_the_same_under_asgi(
    poisoned: Run, staff: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "PAGE_BYTES", 200)
    client = AsyncClient()
    await client.aforce_login(staff)
    response: Any = await client.get(pages(poisoned)["export"])
    assert response.is_async
    found = b"".join([part async for part in response])
    texts = poisoned.events.order_by("seq").values_list("payload", flat=True)
    assert found == b"".join([text.encode() + b"\n" async for text in texts])


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        ("run-1", "run-1"),
        ("../../etc/passwd", "etc_passwd"),
        ('a"b\\c;d\r\ne', "a_b_c_d_e"),
        ("Lauf № 1", "Lauf_1"),
        ("..", "7"),
        ("x" * 255, "x" * 100),
    ],
)
def test_the_file_has_a_plain_name(run_id: str, name: str) -> None:
    assert export.filename(Run(pk=7, run_id=run_id)) == f"{name}.agui.jsonl"
