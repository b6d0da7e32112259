"""`make bench`: ours on both databases and both servers, beside the peer, in shuffled rounds.

Before that the protocol layer alone, as `python -m bench.ground` does.
Every server has one core, the client another. Reported are medians of the rounds, and ratios
to the peer of the same round: machines are noisy, ratios carry over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from bench import ground
from tests import services

ROOT = Path(__file__).resolve().parent.parent
PEER = "FastAPI + official encoder, nothing kept / uvicorn"


@dataclass
class Server:
    """One server process, and what was measured of it."""

    name: str
    command: list[str]
    environment: dict[str, str]
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    token: str = ""
    results: list[dict[str, float]] = field(default_factory=list)

    def start(self) -> None:
        """Start it on a core of its own and wait until it listens."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [part.replace("PORT", str(self.port)) for part in self.command]
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
            os.sched_setaffinity(self.process.pid, {0})
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} did not start")
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 0.2).close()
                return
            time.sleep(0.05)
        raise SystemExit(f"{self.name} does not listen")

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def cpu(self) -> float:
        """Seconds of CPU the process has used."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def measure(self, count: int, streams: int) -> dict[str, float]:
        """Stream a run `streams` times, one after the other; figures per event."""
        before, total, wall, firsts = self.cpu(), 0, 0.0, []
        for _ in range(streams):
            events, seconds, first = self._stream(count)
            if events < count:
                raise SystemExit(f"{self.name}: {events} of {count} events arrived")
            total, wall = total + events, wall + seconds
            firsts.append(first)
        found = {
            "events/s": total / wall,
            "cpu": (self.cpu() - before) / total * 1e6,
            "first": statistics.median(firsts) * 1e3,
        }
        self.results.append(found)
        return found

    def _stream(self, count: int) -> tuple[int, float, float]:
        body = json.dumps(
            {
                "threadId": str(uuid.uuid4()),
                "runId": "r1",
                "messages": [{"id": "u1", "role": "user", "content": "hi"}],
                "state": {},
                "tools": [],
                "context": [],
                "forwardedProps": {"n": count},
            }
        ).encode()
        head = (
            "POST /agui/agents/bench/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Authorization: Bearer {self.token}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            started = time.perf_counter()
            connection.sendall(head + body)
            events, first, tail = 0, 0.0, b""
            while data := connection.recv(1 << 18):
                text = tail + data
                events += text.count(b"data: {")
                if events and not first:
                    first = time.perf_counter() - started
                tail = text[-6:]
            return events, time.perf_counter() - started, first


def ours(server: str, database: str, url: str) -> Server:
    """Our app on a server and a database."""
    application = "project.asgi:application"
    commands = {
        "uvicorn": ["uvicorn", application, "--port", "PORT", "--log-level", "warning"],
        "daphne": ["daphne", "-b", "127.0.0.1", "-p", "PORT", "-v", "0", application],
    }
    environment = {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "bench.settings"}
    return Server(
        f"aguiapp, every event committed to {database} / {server}", commands[server], environment
    )


def prepare(url: str) -> str:
    """Make the tables and a user; returns the bearer token."""
    script = (
        "from django.contrib.auth import get_user_model as g; from aguiapp import access;"
        "u, _ = g().objects.get_or_create(username='bench'); print(access.make_token(u))"
    )
    environment = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "bench.settings"}
    for command in (["migrate", "-v0"], ["shell", "-v0", "-c", script]):
        done = subprocess.run(
            [sys.executable, "manage.py", *command],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
    return done.stdout.strip().splitlines()[-1]


@contextlib.contextmanager
def scratch_database(server_url: str):  # type: ignore[no-untyped-def]
    """A PostgreSQL database of this benchmark alone."""
    name = f"aguiapp_bench_{os.getpid()}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield server_url.rpartition("/")[0] + "/" + name
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def report(servers: list[Server], peer: Server) -> None:
    """Medians, and ratios to the peer of the same round."""
    print(f"{'server':62} {'events/s':>9} {'ratio':>18} {'CPU µs/event':>13} {'first event':>12}")
    for server in servers:
        ratios = [
            mine["events/s"] / theirs["events/s"]
            for mine, theirs in zip(server.results, peer.results, strict=True)
        ]
        rate, cpu, first = (
            statistics.median(r[key] for r in server.results)
            for key in ("events/s", "cpu", "first")
        )
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]"
        print(f"{server.name:62} {rate:9.0f} {ratio:>18} {cpu:13.1f} {first:9.1f} ms")


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--events", type=int, default=5000)
    parser.add_argument("--streams", type=int, default=3, help="streams per round and server")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ground.main()
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {1})
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {"SQLite": f"sqlite:///{folder / 'bench.sqlite3'}"}
        running = services.running_postgres() or stack.enter_context(services.embedded_postgres())
        urls["PostgreSQL"] = stack.enter_context(scratch_database(running))
        peer = Server(
            PEER, ["uvicorn", "bench.peer:app", "--port", "PORT", "--log-level", "warning"], {}
        )
        servers = [peer]
        for database, url in urls.items():
            token = prepare(url)
            for name in ("uvicorn", "daphne"):
                servers.append(ours(name, database, url))
                servers[-1].token = token
        for server in servers:
            stack.callback(server.stop)
            server.start()
            server.measure(options.events, 1)
            server.results.clear()
        for _ in range(options.rounds):
            for server in random.sample(servers, len(servers)):
                server.measure(options.events, options.streams)
        print(
            f"{options.events} events per stream, {options.streams} streams, {options.rounds} rounds"
        )
        report(servers, peer)


if __name__ == "__main__":
    main()
