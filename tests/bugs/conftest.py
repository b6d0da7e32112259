"""The world a case is played in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User

from tests.bugs.world import World, open_world


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
