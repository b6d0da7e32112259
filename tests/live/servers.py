"""Servers as processes, people who talk to them, and readers who note what they get."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import pytest
from django.conf import settings
from django.contrib.auth.models import User

from aguiapp import access, protocol
from aguiapp.models import Run, RunEvent
from project.management.commands import demo

T = TypeVar("T")

KINDS = ("daphne", "uvicorn")
MOUNTED, PLAIN = "project.asgi:application", "tests.live.plain:application"
DEADLINE = 20.0


def until(predicate: Callable[[], T], timeout: float = DEADLINE, what: str = "") -> T:
    """Ask until the answer is true; returns it. Fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout:g} s: {what or predicate}; last answer {answer!r}")
        time.sleep(0.02)
    return answer


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One server process."""

    def __init__(
        self,
        kind: str,
        database_url: str,
        log: Path,
        *,
        application: str = MOUNTED,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        overrides: dict[str, Any] | None = None,
        port: int | None = None,
    ) -> None:
        self.kind = kind
        self.port = port or free_port()
        self.log = log
        where = str(self.port)
        quiet = ["--log-level", "warning", "--no-server-header"]
        command = {
            "daphne": ["daphne", "-b", "127.0.0.1", "-p", where, "--no-server-name"],
            "uvicorn": ["uvicorn", "--host", "127.0.0.1", "--port", where, *quiet],
        }[kind]
        env = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, *arguments, application],
                cwd=settings.BASE_DIR,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **env,
                    "DATABASE_URL": database_url,
                    "DJANGO_SETTINGS_MODULE": "tests.live.settings",
                    "SCRIPTED_AGENT": "1",
                    "LIVE_SETTINGS": json.dumps(overrides or {}),
                    **(environment or {}),
                },
            )

    def ready(self) -> Server:
        """Wait until the port takes connections."""

        def listening() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"{self.kind} did not start:\n{self.said()[-3000:]}")
            with contextlib.suppress(OSError), socket.create_connection(self.address, timeout=1):
                return True
            return False

        until(listening, 60, f"{self.kind} listens")
        return self

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def url(self, path: str) -> str:
        """An address on this server."""
        return f"http://127.0.0.1:{self.port}{path}"

    def said(self) -> str:
        """What the process logged so far."""
        return self.log.read_text(errors="replace")

    def inside(self) -> dict[str, Any]:
        """Tasks, threads and open files of the process."""
        found: dict[str, Any] = httpx.get(self.url("/inside/"), timeout=30).json()
        return found

    def terminate(self, timeout: float = 15) -> float:
        """SIGTERM; the seconds until the process was gone."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout)
        return time.monotonic() - started

    def kill(self) -> None:
        """SIGKILL, unless it is gone already."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(15)


class Servers:
    """Starts servers, and ends what it started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.kept: dict[Any, Server] = {}
        self.started: list[Server] = []

    def start(self, kind: str, database_url: str, **options: Any) -> Server:
        """A server that takes connections."""
        return self.launch(kind, database_url, **options).ready()

    def launch(self, kind: str, database_url: str, **options: Any) -> Server:
        """A server that is about to start."""
        self._count += 1
        log = self._folder / f"{kind}-{self._count}.log"
        server = Server(kind, database_url, log, **options)
        self.started.append(server)
        return server

    def shared(self, kind: str, database_url: str, name: str = "", **options: Any) -> Server:
        """The server of that name, which many tests use; started at its first use."""
        found = self.kept.get((kind, name))
        if found is None or found.process.poll() is not None:
            found = self.kept[kind, name] = self.start(kind, database_url, **options)
        return found

    def close(self) -> None:
        """End everything."""
        for server in self.started:
            server.kill()


class Frame(NamedTuple):
    """One SSE frame as it came."""

    id: str
    data: str
    comment: str


def parse_frame(block: bytes) -> Frame:
    """A frame of the stream, without its blank line."""
    fields = {"id": "", "data": "", "": ""}
    for line in block.decode("utf-8", "surrogatepass").split("\n"):
        name, _, value = line.partition(":")
        fields[name] = value.removeprefix(" ")
    return Frame(fields["id"], fields["data"], fields[""])


class Reader:
    """Reads a response in a thread of its own, and notes what came, when, and how it ended."""

    def __init__(self, method: str, url: str, **request: Any) -> None:
        self.status = 0
        self.headers = httpx.Headers()
        self.frames: list[Frame] = []
        self.times: list[float] = []
        self.raw = bytearray()
        self.end = ""  # "clean", "aborted"
        self.began = time.monotonic()
        self._parsed = 0
        self._socket: Any = None
        self._thread = threading.Thread(target=self._read, args=(method, url, request), daemon=True)
        self._thread.start()

    def _read(self, method: str, url: str, request: dict[str, Any]) -> None:
        try:
            timeout = httpx.Timeout(60)
            with httpx.stream(method, url, timeout=timeout, **request) as response:
                stream = response.extensions["network_stream"]
                self._socket = stream.get_extra_info("socket")
                self.headers, self.status = response.headers, response.status_code
                for chunk in response.iter_bytes():
                    self._take(chunk)
            self.end = "clean"
        except httpx.HTTPError as error:
            self.end = "aborted"
            self.error = error

    def _take(self, chunk: bytes) -> None:
        self.raw += chunk
        now = time.monotonic()
        while (at := self.raw.find(b"\n\n", self._parsed)) >= 0:
            self.frames.append(parse_frame(bytes(self.raw[self._parsed : at])))
            self.times.append(now)
            self._parsed = at + 2

    def wait(self, predicate: Callable[[Reader], Any], timeout: float = DEADLINE) -> Reader:
        """Wait until the predicate holds for what was read."""
        until(
            lambda: predicate(self), timeout, f"{self.status} {bytes(self.raw[-300:])!r} {self.end}"
        )
        return self

    def opened(self) -> Reader:
        """Wait for the headers."""
        return self.wait(lambda r: r.status or r.end)

    def events(self, count: int) -> Reader:
        """Wait for that many events."""
        return self.wait(lambda r: len(r.payloads) >= count or r.end)

    def done(self, timeout: float = DEADLINE) -> Reader:
        """Wait for the end."""
        self.wait(lambda r: r.end, timeout)
        self._thread.join()
        return self

    def drop(self) -> None:
        """Close the connection from this side."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    @property
    def payloads(self) -> list[str]:
        """The events' JSON as it came."""
        return [frame.data for frame in list(self.frames) if frame.data]

    @property
    def logged(self) -> list[str]:
        """The payloads of frames with a cursor."""
        return [frame.data for frame in list(self.frames) if frame.id]

    @property
    def ids(self) -> list[str]:
        return [frame.id for frame in list(self.frames) if frame.id]

    @property
    def comments(self) -> list[str]:
        return [frame.comment for frame in list(self.frames) if frame.comment]

    @property
    def types(self) -> list[str]:
        return [json.loads(payload)["type"] for payload in self.payloads]

    @property
    def last(self) -> dict[str, Any]:
        """The last event."""
        assert self.payloads, (self.status, bytes(self.raw[:1000]))
        event: dict[str, Any] = json.loads(self.payloads[-1])
        return event

    @property
    def thread(self) -> str:
        return str(self.headers["AGUI-Thread"])

    @property
    def run(self) -> str:
        return str(self.headers["AGUI-Run"])

    @property
    def cancel_path(self) -> str:
        return f"/agui/threads/{self.thread}/runs/{self.run}/cancel"


class Person:
    """Somebody with a bearer token, and the server they talk to."""

    def __init__(self, server: Server, user: User) -> None:
        self.server = server
        self.token = access.make_token(user)
        self.headers = {"Authorization": f"Bearer {self.token}"}

    def at(self, server: Server) -> Person:
        """The same person at another server."""
        other = object.__new__(Person)
        other.server, other.token, other.headers = server, self.token, self.headers
        return other

    def post(
        self, agent: str, given: dict[str, Any], path: str = "/agui", **headers: str
    ) -> Reader:
        """Post a run input and read the stream."""
        url = self.server.url(f"{path}/agents/{agent}/")
        return Reader("POST", url, json=given, headers={**self.headers, **headers})

    def run(self, agent: str, text: str = "", thread: str = "", **forwarded: Any) -> Reader:
        """A new run."""
        return self.post(agent, demo.run_input(thread or new_id(), text, forwarded))

    def play(self, *script: Any, thread: str = "") -> Reader:
        """A new run of the scripted agent."""
        return self.run("scripted", "play", thread, script=list(script))

    def watch(self, thread: str, last_event_id: str = "", **parameters: str) -> Reader:
        """The thread's stream."""
        headers = {**self.headers}
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        if "resume" in parameters:
            headers["AGUI-Resume"] = parameters.pop("resume")
        url = self.server.url(f"/agui/threads/{thread}/stream")
        return Reader("GET", url, params=parameters, headers=headers)

    def get(self, path: str, **options: Any) -> httpx.Response:
        headers = {**self.headers, **options.pop("headers", {})}
        return httpx.get(self.server.url(path), headers=headers, timeout=30, **options)

    def cancel(self, reader: Reader) -> httpx.Response:
        """Stop the run that the reader reads."""
        return httpx.post(self.server.url(reader.cancel_path), headers=self.headers, timeout=30)

    def snapshot(self, thread: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/agui/threads/{thread}/snapshot").json()
        return found


def new_id() -> str:
    return str(uuid.uuid4())


# -- scripts -----------------------------------------------------------------------


def said(*middle: Any, message: str = "m1") -> list[dict[str, Any]]:
    """A message with something in its middle."""
    return [
        {"type": "TEXT_MESSAGE_START", "messageId": message, "role": "assistant"},
        *middle,
        {"type": "TEXT_MESSAGE_END", "messageId": message},
    ]


def delta(text: str = "$i ", message: str = "m1") -> dict[str, Any]:
    """A piece of that message."""
    return {"type": "TEXT_MESSAGE_CONTENT", "messageId": message, "delta": text}


def trickle(count: int, seconds: float) -> dict[str, Any]:
    """Many pieces, some time apart."""
    return {"$repeat": count, "events": [delta(), {"$sleep": seconds}]}


# -- what is stored ----------------------------------------------------------------


def stored(run: str) -> list[str]:
    """The payloads of a run, in order; gapless from 1."""
    rows = list(RunEvent.objects.filter(run__key=run).order_by("seq").values_list("seq", "payload"))
    assert [seq for seq, _ in rows] == list(range(1, len(rows) + 1))
    return [payload for _, payload in rows]


def ended(run: str, timeout: float = DEADLINE) -> Run:
    """The run, once it has ended."""

    def look() -> Run | None:
        found = Run.objects.get(key=run)
        return found if found.ended else None

    found = until(look, timeout, f"run {run} ends")
    assert found is not None
    return found


def legal(payloads: Sequence[str]) -> None:
    """Assert that one run's events are legal for an official client."""
    verdict = protocol.check([json.loads(payload) for payload in payloads])
    assert verdict.accepts, verdict


def gapless(reader: Reader) -> None:
    """Assert that the reader's cursors are consecutive."""
    positions = [int(cursor.rpartition("-")[2]) for cursor in reader.ids]
    assert positions == list(range(positions[0], positions[0] + len(positions)))


# -- fixtures ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_servers(
    django_db_setup: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """Every server of a module's tests; they end with it, or they would take every connection."""
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture
def servers(all_servers: Servers, database_url: str) -> Iterator[Servers]:
    """Starts servers; no run and no server of a test outlives it, except shared ones."""
    yield all_servers
    for server in all_servers.started:
        if server not in all_servers.kept.values():
            server.kill()
    running = Run.objects.filter(status=Run.Status.RUNNING)
    for run in running:
        owner = next(iter(all_servers.kept.values()), None)
        if owner is not None and run.user is not None and owner.process.poll() is None:
            path = f"/agui/threads/{run.thread.key}/runs/{run.key}/cancel"
            Person(owner, run.user)
            headers = {"Authorization": f"Bearer {access.make_token(run.user)}"}
            httpx.post(owner.url(path), headers=headers, timeout=30)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each server that the app is made for."""
    return str(request.param)


@pytest.fixture
def server(servers: Servers, kind: str, database_url: str) -> Server:
    """A server with the example's settings, shared with other tests."""
    return servers.shared(kind, database_url)


@pytest.fixture
def impatient(servers: Servers, kind: str, database_url: str) -> Server:
    """A shared server with small limits."""
    limits = {"STALL_SECONDS": 1, "HEARTBEAT_SECONDS": 0.3, "INPUT_BYTES": 100_000}
    return servers.shared(kind, database_url, "impatient", overrides={"AGUIAPP": limits})


@pytest.fixture
def own_server(servers: Servers, kind: str, database_url: str) -> Server:
    """A server of this test's own, to be ended by it."""
    return servers.start(kind, database_url)


@pytest.fixture
def ada(server: Server, user: User) -> Person:
    """A person at the shared server."""
    return Person(server, user)
