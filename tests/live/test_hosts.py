"""The host's own rules count for our routes, with `aguiapp.asgi` and without it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from django.contrib.auth.models import User
from django.middleware.csrf import _get_new_csrf_string
from django.test import Client

from project.management.commands import demo
from tests.live.servers import MOUNTED, PLAIN, Person, Server, Servers, new_id, stored

HOST = {"LIVE_HOST_MIDDLEWARE": "1"}
#: What must be the same; what a server adds on its own (date, server) may differ.
HEADERS = (
    "Content-Type",
    "Cache-Control",
    "X-Accel-Buffering",
    "Content-Security-Policy",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "Referrer-Policy",
    "Vary",
    "X-Host",
    "Retry-After",
    "WWW-Authenticate",
    "Allow",
    "Location",
)


@pytest.fixture
def pair(servers: Servers, kind: str, database_url: str) -> tuple[Server, Server]:
    """The same host with our mount, and without."""
    mounted, plain = (
        servers.shared(kind, database_url, application, application=application, environment=HOST)
        for application in (MOUNTED, PLAIN)
    )
    return mounted, plain


def browser(user: User) -> tuple[str, str]:
    """Cookies of a signed-in browser, and its CSRF token."""
    client = Client()
    client.force_login(user)
    token = _get_new_csrf_string()
    return f"sessionid={client.cookies['sessionid'].value}; csrftoken={token}", token


def seen(response: httpx.Response) -> dict[str, Any]:
    """What must be equal."""
    cookies = sorted(c for c in response.headers.get_list("set-cookie"))
    content: Any = response.text
    if content and response.headers.get("content-type", "").startswith("application/json"):
        content = response.json()
    elif "event-stream" in response.headers.get("content-type", ""):
        content = [
            json.loads(line[6:])["type"] for line in content.splitlines() if line[:5] == "data:"
        ]
    return {
        "status": response.status_code,
        "headers": {name: response.headers.get(name) for name in HEADERS},
        "cookies": [c.split("expires")[0] for c in cookies],
        "content": content,
    }


def requests(user: User, person: Person) -> dict[str, dict[str, Any]]:
    """Requests of every kind that a host's rules must answer, by name."""
    cookies, token = browser(user)
    signed_in, bearer = {"Cookie": cookies}, person.headers
    agent = {"method": "POST", "url": "/agui/agents/echo/", "json": demo.run_input("t", "hi", {})}

    def post(**headers: str) -> dict[str, Any]:
        given = demo.run_input(f"t-{len(headers)}-{token[:6]}", "hi", {})
        return {**agent, "json": given, "headers": headers}

    return {
        "anonymous": post(),
        "bearer": post(**bearer),
        "bearer, foreign origin": post(**bearer, Origin="https://evil.example"),
        "bad bearer": post(Authorization="Bearer x"),
        "cookie without token": post(**signed_in),
        "cookie with token": post(**signed_in, **{"X-CSRFToken": token}),
        "cookie, foreign origin": post(
            **signed_in, **{"X-CSRFToken": token, "Origin": "https://evil.example"}
        ),
        "maintenance": post(**bearer, **{"X-Maintenance": "1"}),
        "maintenance of a stream": {
            "method": "GET",
            "url": f"/agui/threads/{new_id()}/stream",
            "headers": {**bearer, "X-Maintenance": "1"},
        },
        "GET of an agent": {"method": "GET", "url": "/agui/agents/echo/", "headers": bearer},
        "unknown agent": {**agent, "url": "/agui/agents/nobody/", "headers": bearer},
        "no JSON": {
            **agent,
            "json": None,
            "content": b"{",
            "headers": {**bearer, "Content-Type": "application/json"},
        },
        "wrong type": {**agent, "json": None, "content": b"{}", "headers": bearer},
        "invalid input": {**agent, "json": {"threadId": 1}, "headers": bearer},
        "too large": {
            **agent,
            "json": None,
            "content": b" " * (8 * 1024 * 1024 + 1),
            "headers": {**bearer, "Content-Type": "application/json"},
        },
        "unknown thread": {
            "method": "GET",
            "url": f"/agui/threads/{new_id()}/stream",
            "headers": bearer,
        },
        "without the slash": {**agent, "url": "/agui/agents/echo", "headers": bearer},
        "OPTIONS": {"method": "OPTIONS", "url": "/agui/agents/echo/", "headers": bearer},
        "HEAD": {"method": "HEAD", "url": "/agui/agents/echo/", "headers": bearer},
    }


EXPECTED = {
    "anonymous": 401,
    "bearer": 200,
    "bearer, foreign origin": 200,
    "bad bearer": 401,
    "cookie without token": 403,
    "cookie with token": 200,
    "cookie, foreign origin": 403,
    "maintenance": 503,
    "maintenance of a stream": 503,
    "GET of an agent": 405,
    "unknown agent": 404,
    "no JSON": 400,
    "wrong type": 415,
    "invalid input": 422,
    "too large": 413,
    "unknown thread": 404,
    "without the slash": 301,
    "OPTIONS": 405,
    "HEAD": 405,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_host_answers_the_same_with_and_without_the_mount(
    pair: tuple[Server, Server], user: User, name: str
) -> None:
    answers = []
    for server in pair:
        request = requests(user, Person(server, user))[name]
        url = server.url(request.pop("url"))
        answers.append(seen(httpx.request(url=url, timeout=30, **request)))
    mounted, plain = answers
    assert mounted["status"] == EXPECTED[name]
    assert mounted["headers"]["X-Host"] == "seen"
    assert any(cookie.startswith("visited=yes") for cookie in mounted["cookies"])
    if mounted["status"] == 503:
        assert mounted["content"] == "closed"
    elif mounted["status"] >= 400 and name != "HEAD":
        assert set(mounted["content"]) == {"error"}
    assert mounted == plain


@pytest.mark.parametrize("application", [MOUNTED, PLAIN])
def test_a_client_that_takes_gzip_can_read_the_stream(
    pair: tuple[Server, Server], user: User, application: str
) -> None:
    server = pair[0] if application == MOUNTED else pair[1]
    person = Person(server, user)
    given = demo.run_input("gzip", "go", {"n": 300, "delay": 0.002})
    reader = person.post("tokens", given, **{"Accept-Encoding": "gzip, deflate, br"}).done()
    assert reader.headers["Content-Encoding"] == "identity"
    assert reader.logged == stored(reader.run)
    assert len(set(reader.times)) > 5
    page = person.get(f"/agui/threads/{reader.thread}/events", headers={"Accept-Encoding": "gzip"})
    assert page.text.splitlines() == reader.logged


PREFIXES: dict[str, dict[str, Any]] = {
    "setting": {"overrides": {"FORCE_SCRIPT_NAME": "/shop"}},
    "server": {"arguments": ("--root-path", "/shop")},
}


@pytest.mark.parametrize("application", [MOUNTED, PLAIN])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_path_prefix_changes_nothing(
    servers: Servers, kind: str, database_url: str, user: User, prefix: str, application: str
) -> None:
    options: dict[str, Any] = {"application": application, **PREFIXES[prefix]}
    server = servers.start(kind, database_url, **options)
    # uvicorn puts its root path before what it is asked for, as behind a proxy that strips it.
    stripped = kind == "uvicorn" and prefix == "server"
    path = "/agui" if stripped else "/shop/agui"
    person = Person(server, user)
    reader = person.post("echo", demo.run_input("prefixed", "one two", {}), path).done()
    assert (reader.status, reader.end) == (200, "clean")
    assert reader.logged == stored(reader.run)
    stream = f"{path}/threads/{reader.thread}/stream?run={reader.run}"
    assert person.get(stream).text.count("data: ") == len(reader.logged)
    assert person.get(f"{path}/agents/echo/capabilities").json()["identity"] == {"name": "echo"}
    anonymous = httpx.post(server.url(f"{path}/agents/echo/"), json={})
    assert anonymous.status_code == 401
