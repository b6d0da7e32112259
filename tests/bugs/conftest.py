"""The world a case is played in; tests that start server processes are marked `live`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from tests.bugs.world import World, open_world
from tests.live.servers import KINDS, ada, all_servers, impatient, own_server, server, servers
from tests.services import LONG

__all__ = ["ada", "all_servers", "impatient", "own_server", "server", "servers"]

HERE = Path(__file__).parent


@pytest.fixture
def w(
    request: pytest.FixtureRequest,
    user: User,
    other: User,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    """The world of the case that the test is marked with."""
    yield from open_world(request.param, user, other, settings, monkeypatch)


@pytest.fixture(params=KINDS if LONG else ["either"])
def kind(request: pytest.FixtureRequest) -> str:
    """A server: both of them with `FAULTS=long`, else one or the other by the test's name."""
    if request.param in KINDS:
        return str(request.param)
    return KINDS[zlib.crc32(request.node.name.encode()) % len(KINDS)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs servers, so that `-m "not live"` leaves it out."""
    for item in items:
        if HERE in item.path.parents and "all_servers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.live)
