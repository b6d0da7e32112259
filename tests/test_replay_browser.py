"""The Replay page in a real browser, under a strict content security policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import User
from django.contrib.sessions.backends.db import SessionStore
from django.urls import path, reverse

from aguiapp import protocol
from aguiapp.models import Run, RunEvent, Thread

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
]

urlpatterns = [path("admin/", admin.site.urls)]

POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " object-src 'none'; base-uri 'none'"
)
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def stored(run: Run, payloads: list[str]) -> Run:
    """The run with these events."""
    RunEvent.objects.bulk_create(
        [
            RunEvent(
                run_id=run.pk,
                seq=seq,
                type=protocol.TYPE_CODES[_type(payload)],
                payload=payload,
                created=START + timedelta(milliseconds=10 * seq),
            )
            for seq, payload in enumerate(payloads, 1)
        ],
        batch_size=2000,
    )
    return run


def _type(payload: str) -> str:
    try:
        return str(protocol.loads(payload)["type"])
    except protocol.ProtocolError:
        return "RAW"


def make_run(payloads: list[str], **fields: Any) -> Run:
    """A run of a thread of its own."""
    thread = Thread.objects.create(scope="s", thread_id=f"thread-{Thread.objects.count()}")
    values = {"status": "success", "offset": 0, "last_seq": len(payloads), "started_at": START}
    run = Run.objects.create(thread=thread, run_id="run", agent="bot", **(values | fields))
    return stored(run, payloads)


def conversation(turns: int, words: int) -> list[str]:
    """The texts of a run that counts its turns in the state."""
    events: list[dict[str, Any]] = [
        {"type": "RUN_STARTED", "threadId": "t", "runId": "r"},
        {"type": "STATE_SNAPSHOT", "snapshot": {"turn": 0}},
    ]
    for turn in range(turns):
        message = {"messageId": f"m{turn}"}
        delta = {**message, "type": "TEXT_MESSAGE_CONTENT", "delta": f"turn{turn} "}
        call = {"toolCallId": f"c{turn}"}
        replace = {"op": "replace", "path": "/turn", "value": turn + 1}
        events += [
            {"type": "TEXT_MESSAGE_START", **message, "role": "assistant"},
            *[delta] * words,
            {"type": "TEXT_MESSAGE_END", **message},
            {
                "type": "TOOL_CALL_START",
                **call,
                "toolCallName": "look",
                "parentMessageId": f"m{turn}",
            },
            {"type": "TOOL_CALL_ARGS", **call, "delta": '{"id":1}'},
            {"type": "TOOL_CALL_END", **call},
            {"type": "STATE_DELTA", "delta": [replace]},
        ]
    events.append({"type": "RUN_FINISHED", "threadId": "t", "runId": "r"})
    return [protocol.dumps(event) for event in events]


def cookie(user: User) -> str:
    """The session key of somebody who signed in."""
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.save()
    return str(session.session_key)


@contextmanager
def browsing(chromium: str, address: str, session: str) -> Iterator[Any]:
    """A signed-in tab; whatever the policy blocks and whatever fails ends the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        context.add_cookies([{"name": "sessionid", "value": session, "url": address}])
        trouble: list[str] = []
        context.expose_binding("trouble", lambda _source, text: trouble.append(text))
        context.add_init_script("window.alert = (text) => trouble(`alert: ${text}`)")
        context.add_init_script(
            "addEventListener('securitypolicyviolation', (e) =>"
            " trouble(`blocked: ${e.violatedDirective} ${e.blockedURI}`))"
        )
        tab = context.new_page()
        tab.on("pageerror", lambda error: trouble.append(str(error)))
        tab.route("**/admin/**", _with_policy)
        yield tab
        browser.close()
        assert trouble == []


def _with_policy(route: Any) -> None:
    response = route.fetch()
    headers = {**response.headers, "content-security-policy": POLICY}
    route.fulfill(response=response, headers=headers)


def at(tab: Any, seq: int) -> None:
    """Wait until the page shows that event."""
    tab.wait_for_function(
        "(seq) => document.getElementById('agui-replay').dataset.at === seq", arg=str(seq)
    )


def text(tab: Any, name: str) -> str:
    """The text of a panel."""
    return str(tab.inner_text(f"#agui-{name}"))


def slide(tab: Any, seq: int) -> None:
    """Move the slider as a person does."""
    tab.locator("#agui-slider").evaluate(
        "(slider, seq) => { slider.value = seq; slider.dispatchEvent(new Event('input')); }", seq
    )
    at(tab, seq)


def replay_address(live_server: Any, run: Run, tail: str = "") -> str:
    """The full address of the run's Replay page."""
    return f"{live_server.url}{reverse('admin:aguiapp_run_replay', args=[run.pk])}{tail}"


def test_moving_changes_what_is_shown(live_server: Any, staff: User, chromium: str) -> None:
    run = make_run(conversation(turns=3, words=5))
    address = replay_address(live_server, run, "#e4")
    with browsing(chromium, live_server.url, cookie(staff)) as tab:
        tab.goto(address)
        at(tab, 4)
        assert "turn0" in text(tab, "conversation")
        assert '"turn": 0' in text(tab, "state")
        slide(tab, run.last_seq)
        assert "turn2" in text(tab, "conversation")
        assert '"turn": 3' in text(tab, "state")
        assert "RUN_FINISHED" in text(tab, "event")
        tab.wait_for_url(f"**#e{run.last_seq}")

        tab.click("[data-go=previous]")
        at(tab, run.last_seq - 1)
        tab.click("[data-go=first]")
        at(tab, 0)
        assert "turn" not in text(tab, "conversation")
        tab.locator("#agui-events").focus()
        for key, seq in (("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1), ("PageDown", 37)):
            tab.keyboard.press(key)
            at(tab, seq if key != "PageDown" else run.last_seq)
        tab.keyboard.press("Home")
        at(tab, 0)
        tab.fill("#agui-number", "9")
        tab.press("#agui-number", "Enter")
        at(tab, 9)
        tab.click("#agui-row-12")
        at(tab, 12)
        assert tab.get_attribute("#agui-row-12", "aria-selected") == "true"
        assert tab.get_attribute("#agui-events", "aria-activedescendant") == "agui-row-12"
        tab.wait_for_function("document.getElementById('agui-live').textContent.includes('12 of')")


def test_a_run_of_20000_events_stays_small(live_server: Any, staff: User, chromium: str) -> None:
    run = make_run(conversation(turns=200, words=93))
    assert run.last_seq > 19_000
    count = "document.querySelectorAll('*').length"
    with browsing(chromium, live_server.url, cookie(staff)) as tab:
        tab.goto(replay_address(live_server, run, "?seq=12000"))
        at(tab, 12000)
        tab.wait_for_selector("#agui-row-12000 .agui-type")
        assert tab.evaluate(count) < 1000
        slide(tab, 30)
        tab.wait_for_selector("#agui-row-30 .agui-type")
        slide(tab, run.last_seq)
        tab.wait_for_selector(f"#agui-row-{run.last_seq} .agui-type")
        assert tab.evaluate(count) < 1000


def test_markup_and_broken_rows_are_text(live_server: Any, staff: User, chromium: str) -> None:
    events = [protocol.loads(each) for each in conversation(turns=1, words=2)]
    events[3]["delta"] = MARKUP
    events[1]["snapshot"] = {"html": MARKUP, "big": 123456789012345678901, "one": 1.0}
    payloads = [protocol.dumps(each) for each in events]
    payloads[4] = f"no JSON {MARKUP}"
    run = make_run(payloads)
    with browsing(chromium, live_server.url, cookie(staff)) as tab:
        tab.goto(replay_address(live_server, run, "#e5"))
        at(tab, 5)
        assert MARKUP in text(tab, "conversation")
        assert "123456789012345678901" in text(tab, "state")
        assert '"one": 1.0' in text(tab, "state")
        assert f"no JSON {MARKUP}" in text(tab, "event")
        assert "#5" in text(tab, "skipped")
        tab.wait_for_selector("#agui-row-5 .agui-flag")
        assert tab.locator("#agui-replay img, #agui-replay script").count() == 0


def test_a_running_run_loads_more(
    live_server: Any, staff: User, chromium: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The driver runs an event loop in this thread; the tests' own queries may block it.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    payloads = conversation(turns=1, words=2)
    run = make_run(payloads[:4], status="running", last_seq=1)
    with browsing(chromium, live_server.url, cookie(staff)) as tab:
        tab.goto(replay_address(live_server, run))
        at(tab, 4)
        for seq, payload in enumerate(payloads[4:], 5):
            code = protocol.TYPE_CODES[_type(payload)]
            RunEvent.objects.create(
                run_id=run.pk, seq=seq, type=code, payload=payload, created=START
            )
        Run.objects.filter(pk=run.pk).update(status="success", last_seq=len(payloads))
        tab.click("#agui-refresh")
        at(tab, len(payloads))
        assert "success" in text(tab, "status")
        assert not tab.is_visible("#agui-refresh")


def test_an_empty_run_is_readable(live_server: Any, staff: User, chromium: str) -> None:
    run = make_run([], status="error", error_code="agent_failed")
    with browsing(chromium, live_server.url, cookie(staff)) as tab:
        tab.goto(replay_address(live_server, run))
        at(tab, 0)
        assert tab.is_disabled("#agui-slider")
        assert tab.is_disabled("[data-go=next]")
        assert text(tab, "events") == "No events stored."


def test_the_other_admin_pages_keep_to_the_policy(
    live_server: Any, staff: User, chromium: str
) -> None:
    run = make_run(conversation(turns=1, words=2))
    pages = [
        reverse("admin:aguiapp_run_changelist"),
        reverse("admin:aguiapp_run_change", args=[run.pk]),
        reverse("admin:aguiapp_thread_changelist"),
        reverse("admin:aguiapp_thread_change", args=[run.thread_id]),
    ]
    with browsing(chromium, live_server.url, cookie(staff)) as tab:
        for page in pages:
            assert tab.goto(live_server.url + page).status == 200
