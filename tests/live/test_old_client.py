"""A client from before 1.0 reads our streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from aguiapp.models import Thread
from tests.live.servers import Person, Servers
from tests.live.test_clients import ASKED, equal_to_snapshot, orders, play

__all__ = ["orders"]

pytestmark = pytest.mark.node


@pytest.fixture
def old_client(node: str, js: Path) -> str:
    """Node with the client 0.0.48, or the test is skipped."""
    if not (js / "node_modules" / "ag-ui-client-0-0-48").is_dir():
        pytest.skip("no client 0.0.48")
    return node


@pytest.fixture
def older(servers: Servers, kind: str, database_url: str, user: User) -> Person:
    """A person at a server that expects such clients."""
    overrides = {"AGUIAPP": {"LEGACY_ECHO": True}}
    return Person(servers.shared(kind, database_url, "older", overrides=overrides), user)


def two_turns(person: Person, node: str, js: Path, agent: str) -> dict[str, Any]:
    text, forwarded = ASKED[agent]
    return play(node, js, "old.mjs", person, agent=agent, text=text, forwarded=forwarded)


@pytest.mark.parametrize("agent", ASKED)
def test_the_client_0_0_48_reads_two_turns(
    older: Person, old_client: str, js: Path, orders: None, agent: str
) -> None:
    found = two_turns(older, old_client, js, agent)
    assert found["errors"] == []
    snapshot = older.snapshot(str(Thread.objects.get().key))
    equal_to_snapshot(found, snapshot)
    assert sum(message["role"] == "user" for message in found["messages"]) == 2


@pytest.mark.parametrize("agent", ASKED)
def test_it_refuses_the_short_echo_of_run_started_and_nothing_else(
    ada: Person, old_client: str, js: Path, orders: None, agent: str
) -> None:
    found = two_turns(ada, old_client, js, agent)
    (error,) = found["errors"]
    problems = json.loads(error)
    assert [problem["path"] for problem in problems] == [["input", "tools"], ["input", "context"]]
    assert {problem["message"] for problem in problems} == {"Required"}
