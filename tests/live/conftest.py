"""Every test here starts server processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.servers import ada, all_servers, impatient, kind, own_server, server, servers

__all__ = ["ada", "all_servers", "impatient", "kind", "own_server", "server", "servers"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, so that `-m "not live"` leaves them out."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.live)
