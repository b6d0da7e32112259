"""The official client joins a run at every position, with every kind of history."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.contrib.auth.models import User

from tests.live.recordings import SCRIPTS
from tests.live.servers import KINDS, Servers, new_id
from tests.live.test_clients import play
from tests.live.test_resume import places

RUNS = [(name, KINDS[number % 2]) for number, name in enumerate(SCRIPTS, 1)]


@pytest.mark.node
@pytest.mark.parametrize(("name", "here"), RUNS)
def test_who_joins_anywhere_ends_as_who_watched_from_the_start(
    servers: Servers,
    database_url: str,
    user: User,
    node: str,
    js: Path,
    tmp_path: Path,
    name: str,
    here: str,
) -> None:
    persons = places(here, servers, database_url, user)
    gate = tmp_path / "gate"
    gate.touch()
    script = SCRIPTS[name]
    found = play(
        node,
        js,
        "join.mjs",
        persons[0],
        urls=[person.server.url("/agui") for person in persons],
        threadId=new_id(),
        played=script,
        gate=str(gate),
        events=sum("type" in item for item in script),
    )
    snapshot = persons[0].snapshot(found["thread"])
    assert (found["messages"], found["state"]) == (snapshot["messages"], snapshot["state"])
    assert found["early"] == 0
    last = max(joiner["position"] for joiner in found["joiners"])
    wrong = [
        (joiner["position"], joiner["name"], joiner["errors"])
        for joiner in found["joiners"]
        if joiner["errors"] != ([] if joiner["position"] == last else found["watcherErrors"])
        or (joiner["messages"], joiner["state"]) != (found["messages"], found["state"])
    ]
    print(f"{name}, {here}: {len(found['joiners'])} joined, {len(wrong)} wrong")  # noqa: T201
    assert wrong == []
