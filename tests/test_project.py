"""The example product: its agents, its scripted agent, its pages and its `demo` command."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client

from aguiapp import RunError, engine
from aguiapp.models import Run, Thread
from project import scripted, settings, views
from project.management.commands import demo
from project.models import Order

database = pytest.mark.django_db(transaction=True)


def run(agent: str, text: str = "", user: User | None = None, **forwarded: Any) -> Run:
    """A whole run of one of the example's agents."""
    return engine.run_now(agent, demo.run_input("thread", text, forwarded), user=user)


def said(run: Run) -> str:
    """The text of a run."""
    events = [json.loads(row.payload) for row in run.events.order_by("seq")]
    return "".join(e["delta"] for e in events if e["type"] == "TEXT_MESSAGE_CONTENT")


def deltas(run: Run, type: str) -> list[dict[str, Any]]:
    """The run's events of one type."""
    events = [json.loads(row.payload) for row in run.events.order_by("seq")]
    return [event for event in events if event["type"] == type]


@database
class TestAgents:
    def test_echo_says_it_back_word_by_word(self, user: User) -> None:
        done = run("echo", "one two  three", user)
        assert said(done) == "one two  three"
        assert len(deltas(done, "TEXT_MESSAGE_CONTENT")) == 3

    def test_counter_goes_on_where_the_state_is(self, user: User) -> None:
        first, second = run("counter", user=user, n=2), run("counter", user=user, n=1)
        assert deltas(first, "STATE_SNAPSHOT")[0]["snapshot"] == {"count": 0}
        values = [d["delta"][0]["value"] for r in (first, second) for d in deltas(r, "STATE_DELTA")]
        assert values == [1, 2, 3]

    def test_support_finds_an_order(self, user: User) -> None:
        Order.objects.create(number=7, status="shipped", items=["tea"])
        done = run("support", "Where is 7?", user)
        assert said(done) == "Order 7 (tea) is shipped."
        assert json.loads(deltas(done, "TOOL_CALL_RESULT")[0]["content"])["status"] == "shipped"
        assert deltas(done, "STATE_SNAPSHOT")[0]["snapshot"]["order"]["number"] == 7

    @pytest.mark.parametrize(
        ("text", "answer"),
        [("Where is 8?", "cannot find an order 8"), ("Hello", "give me its number")],
    )
    def test_support_stays_polite(self, user: User, text: str, answer: str) -> None:
        done = run("support", text, user)
        assert done.status == Run.Status.SUCCESS
        assert answer in said(done)

    def test_tokens_writes_as_many_as_it_is_told(self, user: User) -> None:
        assert said(run("tokens", user=user, n=5, delay=0)) == "0 1 2 3 4 "

    @pytest.mark.parametrize("n", [100_001, -1, "5", None, True])
    def test_tokens_keeps_its_bounds(self, user: User, n: Any) -> None:
        done = run("tokens", user=user, n=n)
        assert (done.status, done.error_code) == (Run.Status.ERROR, "bad_input")


async def played(*script: Any) -> list[dict[str, Any]]:
    """What a script yields."""
    context: Any = SimpleNamespace(forwarded={"script": list(script)})
    return [event async for event in scripted.play(context)]


class TestScripts:
    async def test_events_pass_as_they_are(self) -> None:
        event = {"type": "CUSTOM", "name": "n", "value": {"costs": "$100"}}
        assert await played(event, {"$sleep": 0}, event) == [event, event]

    async def test_repeat_counts_inside_strings(self) -> None:
        events = await played(
            {"$repeat": 2, "event": {"type": "RAW", "event": {"a$i": ["$i"], "n": 1}}}
        )
        assert [e["event"] for e in events] == [{"a0": ["0"], "n": 1}, {"a1": ["1"], "n": 1}]

    async def test_return_ends_it_wherever_it_stands(self) -> None:
        assert await played({"$repeat": 9, "events": [{"type": "A"}, {"$return": True}]}) == [
            {"type": "A"}
        ]

    @pytest.mark.parametrize("name", sorted(scripted.EXCEPTIONS))
    async def test_raise_raises_what_it_names(self, name: str) -> None:
        context: Any = SimpleNamespace(forwarded={"script": [{"$raise": name, "message": "boom"}]})
        expected = RuntimeError if name == "StopAsyncIteration" else scripted.EXCEPTIONS[name]
        with pytest.raises(expected):
            await anext(scripted.play(context))

    async def test_run_error_takes_a_code(self) -> None:
        with pytest.raises(RunError, match="no") as caught:
            await played({"$raise": "aguiapp.RunError", "message": "no", "code": "mine"})
        assert caught.value.code == "mine"

    async def test_generated_events_have_their_size(self) -> None:
        snapshot, state, custom, delta = await played(
            {"$gen": "MESSAGES_SNAPSHOT", "total_mb": 2.5},
            {"type": "STATE_SNAPSHOT", "snapshot": {"$blob_kb": 2}},
            {"$blob_kb": 1},
            {"type": "STATE_DELTA", "$gen": {"ops": 3, "template": {"op": "test"}}},
        )
        assert sum(len(m["content"]) for m in snapshot["messages"]) == 2.5 * 1024**2
        assert len(state["snapshot"]["blob"]) == 2048
        assert (custom["type"], len(custom["value"]["blob"])) == ("CUSTOM", 1024)
        assert delta == {"type": "STATE_DELTA", "delta": [{"op": "test"}] * 3}

    async def test_forever_goes_on(self) -> None:
        context: Any = SimpleNamespace(forwarded={"script": [{"$forever": [{"type": "A$i"}]}]})
        script = scripted.play(context)
        assert [await anext(script) for _ in range(3)] == [{"type": f"A{i}"} for i in range(3)]

    @pytest.mark.parametrize("after", [[], [{"$hang": True}], [{"$sleep": 60}]])
    async def test_on_cancel_has_the_last_word(self, after: list[Any]) -> None:
        last = {"$on_cancel": [{"type": "B"}, {"$sleep": 0}, {"type": "C"}]}
        task = asyncio.create_task(played({"type": "A"}, last, *after))
        await asyncio.sleep(0.01)
        task.cancel()
        assert await task == [{"type": "A"}, {"type": "B"}, {"type": "C"}]

    @pytest.mark.parametrize(
        "item",
        [
            {"$python": "1"},
            {"type": "CUSTOM", "$unknown": 1},
            {"$raise": "Exit"},
            {"$sleep": "1"},
            {"$sleep": -1},
            {"$repeat": 1},
            {"$gen": "STATE"},
            {"type": "STATE_DELTA", "$gen": 1},
            {"$forever": {}},
            [],
        ],
    )
    async def test_what_it_does_not_know_is_refused(self, item: Any) -> None:
        with pytest.raises(RunError, match="cannot be played"):
            await played(item)


@database
class TestPages:
    @pytest.mark.parametrize("path", ["/", "/chat/support/"])
    def test_pages_ask_for_a_login(self, client: Client, path: str) -> None:
        response = client.get(path)
        assert (response.status_code, response["Location"]) == (302, f"/login/?next={path}")

    def test_login_leads_home(self, client: Client, user: User) -> None:
        response = client.post("/login/", {"username": "ada", "password": "ada"}, follow=True)
        assert b"Talk to an agent" in response.content

    def test_pages_have_nothing_inline_and_a_strict_policy(
        self, client: Client, user: User
    ) -> None:
        client.force_login(user)
        for path in ("/", "/chat/support/"):
            response = client.get(path)
            assert "default-src 'self'" in response["Content-Security-Policy"]
            for inline in (b"<style", b"style=", b"onclick=", b"<script>"):
                assert inline not in response.content

    def test_home_lists_own_threads_only(self, client: Client, user: User, other: User) -> None:
        run("echo", "hi", user)
        thread = Thread.objects.get()
        for person, listed in ((user, True), (other, False)):
            client.force_login(person)
            page = client.get("/").content.decode()
            assert (str(thread.key) in page) is listed
            assert (">hi</a>" in page) is listed
            status = client.get(f"/chat/echo/?thread={thread.key}").status_code
            assert status == (200 if listed else 404)

    @pytest.mark.parametrize(
        ("payload", "title"),
        [
            (None, ""),
            ('{"content": "a\\ud800b"}', "a?b"),
            ('{"content": [{"type": "image"}]}', ""),
            ('{"role": "assistant"}', ""),
            (json.dumps({"content": "x" * 100}), "x" * 59 + "…"),
        ],
    )
    def test_threads_are_called_by_what_was_said(self, payload: str | None, title: str) -> None:
        assert views.opening(payload) == title

    @pytest.mark.parametrize("path", ["/chat/nobody/", "/chat/echo/?thread=1", "/elsewhere/"])
    def test_what_is_not_there_is_404(self, client: Client, user: User, path: str) -> None:
        client.force_login(user)
        response = client.get(path)
        assert (response.status_code, b"Nothing here" in response.content) == (404, True)

    def test_how_the_last_run_ended_can_be_asked(
        self, client: Client, user: User, other: User
    ) -> None:
        client.force_login(user)
        empty = Thread.objects.create(scope="user:1", thread_id="empty", owner=user)
        assert client.get(f"/threads/{empty.key}/ending/").status_code == 204
        run("echo", "hi", user)
        address = f"/threads/{run('tokens', user=user, n=-1).thread.key}/ending/"
        event = client.get(address).json()
        assert (event["type"], event["code"]) == ("RUN_ERROR", "bad_input")
        client.force_login(other)
        assert client.get(address).status_code == 404


@database
class TestDemo:
    def test_it_prepares_everything_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("DEMO_PASSWORD", raising=False)
        printed = [io.StringIO(), io.StringIO()]
        for out in printed:
            call_command("demo", "--no-serve", "--port", "8001", stdout=out)
        first, second = (out.getvalue() for out in printed)
        assert Run.objects.filter(status=Run.Status.SUCCESS).count() == 2
        assert "Home      http://127.0.0.1:8001/\n" in first
        assert "http://127.0.0.1:8001/chat/support/" in first
        assert "curl -N http://127.0.0.1:8001/agui/agents/tokens/" in first
        password = first.split("Password")[1].split()[0]
        assert User.objects.get(username="demo1").check_password(password)
        assert User.objects.get(username="admin").is_superuser
        assert "as printed the first time" in second

    def test_a_port_in_use_is_told_before_anything_else(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port, out = taken.getsockname()[1], io.StringIO()
            with pytest.raises(CommandError, match=f"{port} is in use: make demo PORT={port + 1}"):
                call_command("demo", "--port", str(port), stdout=out)
        assert out.getvalue() == ""
        assert not User.objects.exists()
        demo.try_port("127.0.0.1", port)

    def test_an_address_of_another_machine_is_told_as_well(self) -> None:
        with pytest.raises(CommandError, match=r"Cannot listen on 192\.0\.2\.1"):
            demo.try_port("192.0.2.1", 8000)

    def test_a_given_password_is_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DEMO_PASSWORD", "given")
        User.objects.create_user("demo2", password="old")
        call_command("demo", "--no-serve", stdout=io.StringIO())
        assert User.objects.get(username="demo2").check_password("given")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://a%40b:p%2Fw@h:1/n", ("n", "a@b", "p/w", "h", "1")),
        (
            "postgresql://postgres:@/postgres?host=/run/pg",
            ("postgres", "postgres", "", "/run/pg", ""),
        ),
    ],
)
def test_database_addresses(url: str, expected: tuple[str, ...]) -> None:
    found = settings.database(url)
    assert tuple(found[key] for key in ("NAME", "USER", "PASSWORD", "HOST", "PORT")) == expected
