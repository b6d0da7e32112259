"""The plain WebSocket: one frame in, the run's events out, then 1000."""

from __future__ import annotations

import contextlib
import json
import socket as sockets
import struct
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from aguiapp.models import Run
from project.management.commands import demo
from tests.live.servers import Person, Server, delta, ended, legal, said, stored, trickle, until


def open_socket(
    server: Server, headers: dict[str, str], agent: str = "scripted"
) -> ClientConnection:
    url = server.url(f"/agui/agents/{agent}/ws").replace("http", "ws")
    return connect(url, additional_headers=headers, max_size=None, proxy=None)


def drained(socket: ClientConnection) -> list[str]:
    """The frames up to the close, whatever its code."""
    frames = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            frames.append(str(socket.recv(timeout=30)))
    return frames


def given(thread: str, *script: Any) -> str:
    return json.dumps(demo.run_input(thread, "play", {"script": list(script)}))


def run_of(thread: str) -> Run:
    run = until(lambda: Run.objects.filter(thread__thread_id=thread).first())
    assert run is not None
    return run


def refused(server: Server, headers: dict[str, str], agent: str = "echo") -> tuple[str, int | None]:
    """Error code of the frame, and the close code, of a socket that is closed at once."""
    with open_socket(server, headers, agent) as socket:
        frames = [json.loads(frame) for frame in drained(socket)]
        assert [frame["type"] for frame in frames] == ["aguiapp.error"]
        return frames[0]["code"], socket.close_code


def test_a_socket_carries_the_stored_events(ada: Person) -> None:
    with open_socket(ada.server, ada.headers) as socket:
        socket.send(given("wire", *said(delta("é"), trickle(50, 0.001), delta("\U0001f600"))))
        frames = drained(socket)
        assert socket.close_code == 1000
    run = run_of("wire")
    assert frames == stored(str(run.key))
    legal([str(frame) for frame in frames])
    assert (run.transport, run.mode, run.status) == ("websocket", "ws", "success")


def test_the_same_run_over_socket_and_stream_has_the_same_types(ada: Person) -> None:
    script = said(delta("a"), {"type": "CUSTOM", "name": "n", "value": 1}, delta("b"))
    with open_socket(ada.server, ada.headers) as socket:
        socket.send(given("types", *script))
        types = [json.loads(frame)["type"] for frame in drained(socket)]
    assert types == ada.play(*script).done().types
    key = str(run_of("types").thread.key)
    watcher = ada.watch(key, run=str(run_of("types").key)).done()
    assert watcher.types == types


def test_a_stale_socket_is_healed_ahead_of_its_run(ada: Person) -> None:
    ada.run("echo", "one", "stale").done()
    with open_socket(ada.server, ada.headers, "echo") as socket:
        socket.send(json.dumps(demo.run_input("stale", "two", {})))
        frames = drained(socket)
    rows = stored(str(Run.objects.get(thread__thread_id="stale", offset__gt=0).key))
    assert frames[-len(rows) :] == rows
    ahead = [json.loads(frame)["type"] for frame in frames[: -len(rows)]]
    assert ahead[0] == "RUN_STARTED"
    assert ahead[-1] == "RUN_FINISHED"
    legal([str(frame) for frame in frames])


def test_anonymous_is_closed_with_4401(server: Server, database_url: str) -> None:
    assert refused(server, {}) == ("unauthenticated", 4401)
    assert refused(server, {"Authorization": "Bearer nonsense"})[1] == 4401


def test_an_unknown_agent_is_closed_with_4404(ada: Person) -> None:
    assert refused(ada.server, ada.headers, "nobody") == ("not_found", 4404)


def test_another_path_is_no_socket(ada: Person) -> None:
    with (
        pytest.raises(InvalidStatus) as caught,
        connect(ada.server.url("/agui/nothing").replace("http", "ws"), proxy=None),
    ):
        pass
    assert caught.value.response.status_code == 403


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", 4400),
        ("[]", 4400),
        ('{"threadId": "t"}', 4400),
        (b"{}", 4400),
    ],
)
def test_a_bad_frame_is_answered_and_closed(ada: Person, frame: Any, code: int) -> None:
    with open_socket(ada.server, ada.headers, "echo") as socket:
        socket.send(frame)
        answer = [json.loads(frame) for frame in drained(socket)]
        assert [a["type"] for a in answer] == ["aguiapp.error"]
        assert socket.close_code == code
    assert not Run.objects.exists()


def test_too_large_a_frame_is_closed_with_4413(impatient: Server, user: User) -> None:
    headers = Person(impatient, user).headers
    with open_socket(impatient, headers, "echo") as socket:
        socket.send('"' + "x" * 200_000 + '"')
        (answer,) = [json.loads(frame) for frame in drained(socket)]
        assert (answer["code"], socket.close_code) == ("too_large", 4413)


def test_a_busy_thread_is_said_so(ada: Person) -> None:
    reader = ada.play({"$hang": True}, thread="busy").events(1)
    with open_socket(ada.server, ada.headers) as socket:
        socket.send(given("busy"))
        (frame,) = [json.loads(frame) for frame in drained(socket)]
    assert (frame["type"], frame["code"]) == ("aguiapp.error", "thread_busy")
    ada.cancel(reader)
    reader.done()


def cookie(user: User) -> dict[str, str]:
    """A signed-in browser's cookie header."""
    browser = Client()
    browser.force_login(user)
    return {"Cookie": f"sessionid={browser.cookies['sessionid'].value}"}


@pytest.mark.parametrize("origin", [None, "same"])
def test_a_browsers_session_opens_a_socket(server: Server, user: User, origin: str | None) -> None:
    headers = cookie(user)
    if origin:
        headers["Origin"] = server.url("")
    with open_socket(server, headers, "echo") as socket:
        socket.send(json.dumps(demo.run_input("cookie", "hi", {})))
        assert json.loads(drained(socket)[-1])["type"] == "RUN_FINISHED"
    assert run_of("cookie").user == user


@pytest.mark.parametrize("origin", ["https://evil.example", "null"])
@pytest.mark.parametrize("signed_in", [True, False])
def test_a_foreign_origin_is_refused_before_it_is_accepted(
    server: Server, user: User, origin: str, signed_in: bool
) -> None:
    headers = {**(cookie(user) if signed_in else {}), "Origin": origin}
    with pytest.raises(InvalidStatus) as caught, open_socket(server, headers, "echo"):
        pass
    assert caught.value.response.status_code == 403


def test_a_dropped_socket_leaves_the_run_going(ada: Person) -> None:
    with open_socket(ada.server, ada.headers) as socket:
        socket.send(given("dropped", *said(trickle(30, 0.02))))
        socket.recv()
        linger = struct.pack("ii", 1, 0)
        socket.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, linger)
        socket.socket.shutdown(sockets.SHUT_RDWR)
    run = ended(str(run_of("dropped").key))
    assert run.status == Run.Status.SUCCESS
    assert len(stored(str(run.key))) == 34


def test_a_second_frame_does_not_start_a_second_run(ada: Person) -> None:
    with open_socket(ada.server, ada.headers) as socket:
        socket.send(given("twice", *said(trickle(20, 0.02))))
        socket.recv()
        socket.send(given("twice-2", *said(delta("x"))))
        frames = drained(socket)
        assert socket.close_code == 4400
    assert json.loads(frames[-1])["type"] == "aguiapp.error"
    assert ended(str(run_of("twice").key)).status == Run.Status.SUCCESS
    assert not Run.objects.filter(thread__thread_id="twice-2").exists()


def test_who_was_shut_out_since_the_handshake_starts_nothing(ada: Person, user: User) -> None:
    with open_socket(ada.server, ada.headers) as socket:
        user.is_active = False
        user.save()
        socket.send(given("too late", *said(delta("x"))))
        frames = drained(socket)
        assert socket.close_code == 4401
    assert json.loads(frames[-1])["code"] == "unauthenticated"
    assert not Run.objects.exists()


def test_a_socket_that_asks_for_nothing_is_closed(impatient: Server, user: User) -> None:
    with open_socket(impatient, Person(impatient, user).headers) as socket:
        assert drained(socket) == []
        assert socket.close_code == 4408
