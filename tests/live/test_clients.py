"""What others wrote reads our streams: the official JavaScript client, and a validator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from project import agents
from project.management.commands import demo
from project.models import Order
from tests.live.servers import Person, stored

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "echo": ("one two", {}),
    "counter": ("go", {"n": 3}),
    "support": ("Where is order 1001?", {}),
    "tokens": ("go", {"n": 20, "delay": 0.001}),
}


@pytest.fixture
def orders(transactional_db: None) -> None:
    """What `support` looks up."""
    Order.objects.create(number=1001, status="shipped", items=["tea", "kettle"])
    Order.objects.create(number=1002, status="paid", items=["bell"])


def play(node: str, js: Path, script: str, ada: Person, **options: Any) -> dict[str, Any]:
    """What a script of the official client prints: one JSON document."""
    given = {"url": ada.server.url("/agui"), "token": ada.token, **options}
    done = subprocess.run(
        [node, str(js / script), json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def equal_to_snapshot(view: dict[str, Any], snapshot: dict[str, Any]) -> None:
    assert view["messages"] == snapshot["messages"]
    assert view["state"] == snapshot["state"]


@pytest.mark.node
def test_the_official_client_runs_support_twice(
    ada: Person, node: str, js: Path, orders: None
) -> None:
    found = play(node, js, "twice.mjs", ada, agent="support")
    assert found["errors"] == []
    (thread,) = found["threads"]
    snapshot = ada.snapshot(thread)
    equal_to_snapshot(found, snapshot)
    roles = [message["role"] for message in snapshot["messages"]]
    assert roles == ["user", "reasoning", "assistant", "tool", "assistant"] * 2
    assert snapshot["state"]["order"]["number"] == 1002
    assert found["unlogged"] == 0


@pytest.mark.node
@pytest.mark.parametrize("agent", ["echo", "counter", "support"])
def test_two_viewers_end_equal(ada: Person, node: str, js: Path, orders: None, agent: str) -> None:
    found = play(node, js, "viewers.mjs", ada, agent=agent)
    assert found["errors"] == []
    snapshot = ada.snapshot(found["thread"])
    equal_to_snapshot(found["b"], found["snapshotAfterB"])
    equal_to_snapshot(found["a"], snapshot)


@pytest.mark.node
@pytest.mark.parametrize("agent", ["echo", "support"])
def test_a_regenerated_answer_replaces_the_old_one(
    ada: Person, node: str, js: Path, orders: None, agent: str
) -> None:
    found = play(node, js, "regenerate.mjs", ada, agent=agent)
    assert found["errors"] == []
    snapshot = ada.snapshot(found["thread"])
    equal_to_snapshot(found, snapshot)
    assert [m["content"] for m in snapshot["messages"] if m["role"] == "user"] == [
        "first 1001",
        "second 1002",
    ]
    assert found["dropped"] not in [m["id"] for m in snapshot["messages"]]


@pytest.mark.node
def test_an_aborted_stream_is_an_error_for_the_official_client(
    own_server, user: User, node: str, js: Path
) -> None:
    given = {"url": own_server.url("/agui"), "token": Person(own_server, user).token}
    client = subprocess.Popen(
        [node, str(js / "aborted.mjs"), json.dumps(given)], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "reading\n"
    own_server.kill()
    printed, _ = client.communicate(timeout=30)
    assert json.loads(printed)["outcome"] == "rejected"


@pytest.mark.parametrize("agent", ASKED)
def test_the_validator_finds_nothing(ada: Person, orders: None, agent: str) -> None:
    text, forwarded = ASKED[agent]
    for turn in range(2):
        given = demo.run_input("validated", f"{text} {turn}", forwarded)
        reader = ada.post(agent, given).done()
        assert reader.logged == stored(reader.run)
        done = subprocess.run(
            [sys.executable, "-m", "ag_ui_validate.cli", "-", "--max-warnings", "0"],
            input=bytes(reader.raw),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_every_shown_agent_is_validated() -> None:
    assert set(agents.SHOWN) == set(ASKED)
