"""The snippets of docs/how-to/clients.md, in Node and in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User

from aguiapp.models import Run, Thread
from project.management.commands import demo
from tests.live.servers import (
    Person,
    Server,
    Servers,
    delta,
    ended,
    free_port,
    new_id,
    said,
    stored,
    until,
)
from tests.live.test_client_module import Script
from tests.test_replay_browser import browsing, cookie

BASE = Path(settings.BASE_DIR)
MODULE = BASE / "aguiapp" / "static" / "aguiapp" / "client.js"
SNIPPET = re.compile(r"^```(?:js|python)\n(?://|#) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STATIC = {"SERVE_STATIC": "1"}
CORS, POLICY = "tests.live.middleware.cors", "project.middleware.content_security_policy"
TEXT = (BASE / "docs" / "how-to" / "clients.md").read_text("utf-8")
SNIPPETS = dict(SNIPPET.findall(TEXT))

#: Posts a run, reads its first bytes, aborts, and leaves the page at once where it should.
STOP = """
async ([url, body, headers, leaves]) => {
  const controller = new AbortController();
  const { signal } = controller;
  headers = { "Content-Type": "application/json", Accept: "text/event-stream", ...headers };
  const response = await agentFetch(url, { method: "POST", headers, body, signal });
  const reader = response.body.getReader();
  await reader.read();
  if (leaves) {
    setTimeout(() => {
      controller.abort();
      location.href = "about:blank";
    });
    return null;
  }
  controller.abort();
  const error = await reader.read().catch(({ name }) => name);
  return { error, problems };
}
"""


def test_every_snippet_is_tried_here() -> None:
    assert TEXT.count("```") == 2 * len(SNIPPETS)
    assert list(SNIPPETS) == ["chat.js", "session.js", "watch.js", "mysite/settings.py"]


# -- in Node -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, js: Path) -> str:
    """The snippets as files beside the official client."""
    (tmp_path / "node_modules").symlink_to(js / "node_modules")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for name, code in SNIPPETS.items():
        if name.endswith(".js"):
            here = code.replace("/static/aguiapp/client.js", MODULE.as_uri())
            (tmp_path / name).write_text(here, encoding="utf-8")
    return str(tmp_path)


def documented(node: str, js: Path, case: str, ada: Person, folder: str, **given: Any) -> Script:
    """A case of `documented.mjs`."""
    options = {"url": ada.server.url("/agui"), "token": ada.token, "folder": folder, **given}
    return Script(node, js, case, file="documented.mjs", **options)


@pytest.mark.node
def test_the_stop_button_of_the_guide_stops(ada: Person, node: str, js: Path, folder: str) -> None:
    thread_id = new_id()
    documented(node, js, "chat", ada, folder, threadId=thread_id).done()
    run = Run.objects.get(thread__thread_id=thread_id)
    assert ended(str(run.key)).status == Run.Status.CANCELLED


@pytest.mark.node
@pytest.mark.parametrize("kind", ["uvicorn"])
def test_the_page_of_the_guide_begins_again_with_a_new_history(
    servers: Servers,
    own_server: Server,
    database_url: str,
    user: User,
    node: str,
    js: Path,
    folder: str,
) -> None:
    ada, thread_id = Person(own_server, user), new_id()
    first = ada.play(*said(delta("one")), thread=thread_id).done()
    thread = own_server.url(f"/agui/threads/{first.thread}")
    script = documented(node, js, "watch", ada, folder, thread=thread, starts=2)
    assert script.line() == {key: ada.snapshot(first.thread)[key] for key in ("messages", "state")}
    second = ada.play(*said(delta("two", "m2"), message="m2"), thread=thread_id).done()
    seen = [script.line()["event"] for _ in second.logged]
    assert seen == [json.loads(payload) for payload in stored(second.run)]

    own_server.kill()
    Thread.objects.filter(key=first.thread).update(epoch="zzzzzz")
    server = servers.start(own_server.kind, database_url, port=own_server.port)
    (again,) = script.done()
    snapshot = ada.at(server).snapshot(first.thread)
    assert again == {key: snapshot[key] for key in ("messages", "state")}


# -- in a browser ------------------------------------------------------------------


def page(tab: Any, address: str, agent_fetch: str) -> None:
    """The page, with the `agentFetch` that an expression makes."""
    tab.set_default_timeout(20_000)
    for name, code in SNIPPETS.items():
        serve(tab, name, code)
    tab.goto(address)
    tab.evaluate(
        f"async () => {{ globalThis.problems = []; globalThis.agentFetch = {agent_fetch}; }}"
    )
    tab.unroute_all()  # a request that is held here would not outlive the page


def serve(tab: Any, name: str, code: str) -> None:
    """Answer the page's requests for a script."""
    tab.route(f"**/{name}", lambda route: route.fulfill(body=code, content_type="text/javascript"))


def only_run(thread_id: str) -> Run:
    """The run of the thread, ended."""
    return ended(str(Run.objects.get(thread__thread_id=thread_id).key))


def asked(thread_id: str, n: int) -> str:
    """The body of a run's request."""
    return json.dumps(demo.run_input(thread_id, "go", {"n": n, "delay": 0.02}))


@pytest.fixture
def unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    # The driver runs an event loop in this thread; the tests' own queries may block it.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")


@pytest.mark.browser
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_the_session_of_the_guide_stops_in_a_browser(
    servers: Servers,
    kind: str,
    database_url: str,
    user: User,
    chromium: str,
    unsafe: None,
    leaves: bool,
) -> None:
    server = servers.shared(kind, database_url, "static", environment=STATIC)
    thread_id = new_id()
    with browsing(chromium, server.url(""), cookie(user)) as tab:
        page(tab, server.url("/"), '(await import("/session.js")).sessionFetch')
        body = asked(thread_id, 2000)
        found = tab.evaluate(STOP, ["/agui/agents/tokens/", body, {}, leaves])
        if leaves:
            tab.wait_for_url("about:blank")
        else:
            assert found == {"error": "AbortError", "problems": []}
        until(lambda: Run.objects.filter(thread__thread_id=thread_id), what="the run")
        assert only_run(thread_id).status == Run.Status.CANCELLED


@pytest.mark.browser
@pytest.mark.parametrize("exposed", [True, False], ids=["exposed", "hidden"])
def test_another_origin_stops_where_the_headers_are_exposed(
    servers: Servers,
    kind: str,
    database_url: str,
    user: User,
    chromium: str,
    unsafe: None,
    exposed: bool,
) -> None:
    chosen: dict[str, Any] = {}
    exec(compile(SNIPPETS["mysite/settings.py"], "settings.py", "exec"), chosen)  # noqa: S102
    port = free_port()
    origin = f"http://localhost:{port}"  # the agent is at 127.0.0.1
    overrides = {
        "MIDDLEWARE": [CORS, *(each for each in settings.MIDDLEWARE if each != POLICY)],
        "CORS_ALLOWED_ORIGINS": [origin],
        "CORS_EXPOSE_HEADERS": chosen["CORS_EXPOSE_HEADERS"] if exposed else [],
    }
    server = servers.start(kind, database_url, environment=STATIC, overrides=overrides, port=port)
    ada, thread_id = Person(server, user), new_id()
    with browsing(chromium, origin, cookie(user)) as tab:
        page(
            tab,
            f"{origin}/login/",
            '(await import("/static/aguiapp/client.js")).cancellingFetch('
            "{ onError: ({ message }) => problems.push(message) })",
        )
        url, body = server.url("/agui/agents/tokens/"), asked(thread_id, 2000 if exposed else 20)
        found = tab.evaluate(STOP, [url, body, ada.headers, False])
        hidden = "CORS does not expose AGUI-Thread and AGUI-Run."
        assert found == {"error": "AbortError", "problems": [] if exposed else [hidden]}
        status = Run.Status.CANCELLED if exposed else Run.Status.SUCCESS
        assert only_run(thread_id).status == status
