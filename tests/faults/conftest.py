"""Faults on demand. `FAULTS=long` breaks things for an hour, `FAULTS_SEED` repeats a draw."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import settings
from django.contrib.auth.models import User

from tests.faults import breakable, proxy
from tests.live.servers import Servers, all_servers, kind, servers

__all__ = ["all_servers", "kind", "servers"]

HERE = Path(__file__).parent
SEED = os.environ.get("FAULTS_SEED") or secrets.token_hex(4)

_figures: list[str] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark them as live; what breaks one database only is left out on the other."""
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.live)
    on_sqlite = settings.DATABASES["default"]["ENGINE"].endswith("sqlite3")
    other = "postgres" if on_sqlite else "sqlite"
    foreign = [item for item in ours if item.get_closest_marker(other)]
    items[:] = [item for item in items if item not in foreign]
    config.hook.pytest_deselected(items=foreign)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was measured."""
    if _figures:
        terminalreporter.section(f"figures under faults (FAULTS_SEED={SEED})")
        for line in _figures:
            terminalreporter.write_line(line)


@pytest.fixture
def figure() -> Callable[[str], None]:
    """Notes a line for the end of the tests' output."""
    return _figures.append


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Chance, the same again for the same `FAULTS_SEED`."""
    print(f"FAULTS_SEED={SEED}")  # noqa: T201
    return random.Random(f"{SEED} {request.node.nodeid}")


@pytest.fixture(scope="session")
def cutting(django_db_setup: None) -> Iterator[proxy.PostgresProxy]:
    """A proxy in front of the tests' PostgreSQL."""
    found = proxy.PostgresProxy(proxy.target_of(breakable.url_of(settings.DATABASES["default"])))
    yield found
    found.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[breakable.Postgres]:
    """A PostgreSQL of our own, to be stopped and started."""
    with breakable.own_postgres() as found:
        yield found


@pytest.fixture
def own_postgres(
    cluster: breakable.Postgres, servers: Servers, database_url: str
) -> Iterator[breakable.Postgres]:
    """That PostgreSQL, up, with our tables; the tests' own queries go there too."""
    cluster.start()
    with breakable.instead_of_default(cluster.url):
        yield cluster
        cluster.start()


@pytest.fixture
def owner(own_postgres: breakable.Postgres) -> User:
    """A person in that PostgreSQL."""
    return User.objects.get_or_create(username="ada")[0]


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[breakable.Redis]:
    """A Redis of our own, to be stopped and started."""
    with breakable.own_redis(tmp_path) as found:
        yield found


@pytest.fixture(scope="session")
def pgbouncer(django_db_setup: None) -> Iterator[int]:
    """The port of a PgBouncer in transaction mode in front of the tests' PostgreSQL."""
    with breakable.own_pgbouncer(settings.DATABASES["default"]) as port:
        yield port
