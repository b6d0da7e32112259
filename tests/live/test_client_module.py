"""The module for clients that the app ships, under the official client and by itself."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest
from django.contrib.auth.models import User

from aguiapp.models import Run
from tests.live.servers import (
    Person,
    Servers,
    delta,
    ended,
    free_port,
    new_id,
    said,
    stored,
    trickle,
    until,
)

pytestmark = pytest.mark.node

LONG, SHORT = 2000, 20


class Script:
    """A case of a script, in a process of its own."""

    def __init__(
        self, node: str, js: Path, case: str, *, file: str = "module.mjs", **given: Any
    ) -> None:
        self.process = subprocess.Popen(
            [node, str(js / file), json.dumps({"case": case, **given})],
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> dict[str, Any]:
        """The next line that it prints."""
        with self._printing() as printed:
            line = printed.readline()
        assert line, "it printed nothing"
        found: dict[str, Any] = json.loads(line)
        return found

    def done(self) -> list[dict[str, Any]]:
        """The other lines that it prints until it ends by itself."""
        with self._printing() as printed:
            lines = printed.readlines()
            printed.close()
        assert self.process.wait(10) == 0
        return [json.loads(line) for line in lines]

    @contextmanager
    def _printing(self) -> Iterator[IO[str]]:
        """What it prints; ended when it takes too long."""
        assert self.process.stdout is not None
        late = threading.Timer(30, self.process.kill)
        late.start()
        try:
            yield self.process.stdout
        finally:
            late.cancel()


class Talk:
    """What a case of the official client found, and the run it left."""

    def __init__(self, node: str, js: Path, case: str, ada: Person, **given: Any) -> None:
        thread_id = new_id()
        url, n = ada.server.url("/agui"), given.pop("n", LONG)
        options = {"url": url, "token": ada.token, "threadId": thread_id, "n": n, **given}
        (self.found,) = Script(node, js, case, **options).done()
        self.run = Run.objects.select_related("thread").filter(thread__thread_id=thread_id).first()

    @property
    def calls(self) -> list[tuple[str, int | None]]:
        return [(call["path"], call["status"]) for call in self.found["calls"]]

    def check_cancelled(self) -> None:
        """Assert that one call stopped the run within a second of the abort."""
        assert self.run is not None
        run = ended(str(self.run.key))
        assert run.status == Run.Status.CANCELLED
        assert run.finished_at is not None
        took = run.finished_at.timestamp() - self.found["aborted"]["at"]
        assert took < 1
        path = f"/threads/{self.run.thread.key}/runs/{run.key}/cancel"
        assert self.calls == [("/agents/tokens/", 200), (path, 200)]
        assert self.found["failures"] == []
        print(f"abort to cancelled: {took * 1000:.0f} ms")  # noqa: T201


@pytest.fixture
def mute() -> Iterator[tuple[str, int]]:
    """A server that takes connections and opens a stream to GET, and then says nothing."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    held.append(connection)
                    if connection.recv(3) == b"GET":
                        connection.sendall(
                            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
                        )

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for connection in held:
        connection.close()


# -- stopping ----------------------------------------------------------------------


def test_an_abort_in_mid_run_cancels_it(ada: Person, node: str, js: Path) -> None:
    talk = Talk(node, js, "aborted", ada)
    talk.check_cancelled()
    assert talk.found["aborted"]["status"] == 200
    (error,) = talk.found["errors"]
    assert error["code"] == "abort"


def test_an_abort_ahead_of_the_headers_cancels_the_run(ada: Person, node: str, js: Path) -> None:
    talk = Talk(node, js, "early", ada)
    talk.check_cancelled()
    assert talk.found["aborted"]["status"] is None


def test_an_abort_after_the_connection_was_lost_cancels_the_run(
    ada: Person, node: str, js: Path
) -> None:
    talk = Talk(node, js, "cut", ada)
    talk.check_cancelled()
    assert talk.found["errors"] != []


@pytest.mark.parametrize("case", ["plain", "detached"])
def test_who_only_leaves_does_not_stop_the_run(ada: Person, node: str, js: Path, case: str) -> None:
    talk = Talk(node, js, case, ada, n=SHORT)
    assert talk.run is not None
    run = ended(str(talk.run.key))
    assert run.status == Run.Status.SUCCESS
    assert talk.calls == [("/agents/tokens/", 200)]


def test_an_abort_after_the_end_calls_nothing(ada: Person, node: str, js: Path) -> None:
    talk = Talk(node, js, "finished", ada, n=SHORT)
    assert talk.calls == [("/agents/tokens/", 200)]
    assert talk.found["aborted"] is not None
    assert (talk.found["errors"], talk.found["failures"]) == ([], [])


def test_a_refused_request_has_nothing_to_cancel(ada: Person, node: str, js: Path) -> None:
    talk = Talk(node, js, "refused", ada)
    assert talk.calls == [("/agents/tokens/", 401)]
    assert talk.found["failures"] == []
    assert talk.run is None


def test_a_stop_that_is_refused_is_reported(ada: Person, node: str, js: Path) -> None:
    talk = Talk(node, js, "denied", ada, n=SHORT)
    assert [status for _, status in talk.calls] == [200, 401]
    assert talk.found["failures"] == ["Refused: The bearer token is not valid."]


def test_a_server_that_never_answers_is_given_up(
    node: str, js: Path, mute: tuple[str, int]
) -> None:
    url = f"http://127.0.0.1:{mute[1]}"
    (found,) = Script(node, js, "mute", url=url, token="", threadId="t", n=1).done()
    assert found["failures"] == ["Error: No answer within 200 ms: the run may go on."]
    assert len(found["calls"]) == 1


# -- following ---------------------------------------------------------------------


def followed(node: str, js: Path, case: str, ada: Person, path: str, **given: Any) -> Script:
    """A script that follows a stream."""
    options = {"url": ada.server.url("/agui"), "token": ada.token, "after": "", **given}
    return Script(node, js, case, stream=ada.server.url(path), **options)


def check_followed(lines: list[dict[str, Any]], runs: list[str], first: int = 1) -> None:
    """Assert that every event of the runs was printed once, in order, with its cursor."""
    assert [line["event"] for line in lines] == [
        json.loads(payload) for run in runs for payload in stored(run)
    ][first - 1 :]
    positions = [int(line["cursor"].rpartition("-")[2]) for line in lines]
    assert positions == list(range(first, first + len(lines)))


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_a_follower_gets_every_event_once_across_a_restart(
    servers: Servers, kind: str, database_url: str, user: User, node: str, js: Path, how: str
) -> None:
    server = servers.start(kind, database_url)
    ada, thread = Person(server, user), new_id()
    first = ada.play(*said(trickle(2000, 0.005)), thread=thread).opened()
    script = followed(node, js, "follow", ada, f"/agui/threads/{first.thread}/stream", terminals=2)
    lines = [script.line() for _ in range(100)]
    getattr(server, how)()
    server = servers.start(kind, database_url, port=server.port)
    there = ada.at(server)

    def answered() -> str:
        reader = there.play(*said(trickle(20, 0.005)), thread=thread).opened()
        return reader.run if reader.status == 200 else ""

    second = until(answered, what="the thread is free again")
    ended(second)
    *more, found = script.done()
    assert found["refused"] is None
    check_followed(lines + more, [first.run, second])


def test_following_one_run_ends_with_it(ada: Person, node: str, js: Path) -> None:
    wide = {"type": "CUSTOM", "name": "wide", "value": "ü€" * 50_000}  # comes in pieces
    reader = ada.play(wide, *said(trickle(20, 0.005))).opened()
    path = f"/agui/threads/{reader.thread}/stream?run={reader.run}"
    *lines, found = followed(node, js, "follow", ada, path).done()
    assert found["refused"] is None
    check_followed(lines, [reader.run])
    *rest, _ = followed(node, js, "follow", ada, path, after=lines[4]["cursor"]).done()
    assert rest == lines[5:]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "cursor_malformed"),
        (401, "unauthenticated"),
        (404, "not_found"),
        (409, "cursor_foreign"),
    ],
)
def test_a_follower_does_not_come_back_after_a_refusal(
    ada: Person, node: str, js: Path, status: int, code: str
) -> None:
    reader = ada.play(*said(delta())).done()
    thread = str(uuid.uuid4()) if status == 404 else reader.thread
    after = {400: "nonsense", 409: "aaaaaa-1"}.get(status, "")
    token = "nobody" if status == 401 else ada.token
    path = f"/agui/threads/{thread}/stream"
    (found,) = followed(node, js, "follow", ada, path, after=after, token=token).done()
    assert found["refused"] == {"name": "Refused", "status": status, "code": code}


def test_a_page_that_is_no_stream_is_refused(ada: Person, node: str, js: Path) -> None:
    (found,) = followed(node, js, "follow", ada, "/login/").done()
    assert found["refused"] == {"name": "Refused", "status": 200}


def test_a_follower_comes_back_ever_later(node: str, js: Path) -> None:
    stream = f"http://127.0.0.1:{free_port()}/"
    (found,) = Script(node, js, "pauses", url="", token="", stream=stream).done()
    for pause, shortest in zip(found["pauses"], (100, 200, 400, 800), strict=True):
        assert shortest - 5 < pause < shortest + 100


def test_a_follower_stops_while_it_waits(node: str, js: Path) -> None:
    stream = f"http://127.0.0.1:{free_port()}/"
    (found,) = Script(node, js, "waiting", url="", token="", stream=stream).done()
    assert found["refused"] is None


def test_a_follower_leaves_a_connection_that_went_silent(
    node: str, js: Path, mute: tuple[str, int]
) -> None:
    stream = f"http://127.0.0.1:{mute[1]}/"
    (found,) = Script(node, js, "silent", url="", token="", stream=stream).done()
    assert found["attempts"] == 3
