"""Several runs at once, of every shape, and who reads them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.live.servers import Person, Reader, delta, new_id, said, trickle
from tests.services import LONG

#: Settings of servers that notice soon that another one is gone.
QUICK: dict[str, Any] = {"LEASE_SECONDS": 2, "SWEEP_SECONDS": 0.3}
#: As quick as it gets: for what has to outlast a lease.
QUICKEST: dict[str, Any] = {"LEASE_SECONDS": 1, "SWEEP_SECONDS": 0.2}
#: Servers that read what tests.faults.settings describes.
ENVIRONMENT = {"DJANGO_SETTINGS_MODULE": "tests.faults.settings"}


def rounds(short: int, long: int) -> range:
    """How often to do it; `FAULTS_ROUNDS` says otherwise."""
    wanted = os.environ.get("FAULTS_ROUNDS")
    return range(int(wanted) if wanted else long if LONG else short)


def options(host: str = "", clock: float = 0, **settings: Any) -> dict[str, Any]:
    """How to start a server with these settings of ours, on that host, with its clock off."""
    environment = {**ENVIRONMENT, "FAULT_HOST": host, "FAULT_CLOCK": str(clock)}
    return {"environment": environment, "overrides": {"AGUIAPP": settings}}


def half_a_call() -> list[dict[str, Any]]:
    """A step with an open tool call in it."""
    return [
        {"type": "STEP_STARTED", "stepName": "work"},
        {"type": "TOOL_CALL_START", "toolCallId": "c1", "toolCallName": "look"},
        {"type": "TOOL_CALL_ARGS", "toolCallId": "c1", "delta": '{"half": '},
    ]


def counting(count: int, seconds: float) -> list[dict[str, Any]]:
    """A state that changes."""
    change = {
        "type": "STATE_DELTA",
        "delta": [{"op": "replace", "path": "/count", "value": "$i"}],
    }
    return [
        {"type": "STATE_SNAPSHOT", "snapshot": {"count": "none"}},
        {"$repeat": count, "events": [change, {"$sleep": seconds}]},
    ]


def scripts(seconds: float) -> list[list[dict[str, Any]]]:
    """Runs that take about so long: words, a call that stays open, a state, bursts."""
    turns = max(1, int(seconds / 0.01))
    burst = [{"$repeat": 40, "event": delta("$i\u2028\\ ")}, {"$sleep": 0.02}]
    return [
        said(trickle(turns, 0.01)),
        [*half_a_call(), *said(trickle(turns // 2, 0.02)), {"$return": True}],
        counting(turns, 0.01),
        said({"$repeat": turns // 2, "events": burst}),
    ]


@dataclass
class Talk:
    """A thread with a run in it, and everybody who reads that."""

    thread: str
    readers: list[Reader] = field(default_factory=list)


def crowd(person: Person, scripts: Sequence[list[dict[str, Any]]]) -> list[Talk]:
    """One run of each script, each in a thread of its own."""
    talks = []
    for script in scripts:
        thread = new_id()
        talks.append(Talk(thread, [person.play(*script, thread=thread)]))
    return talks


def watched(talks: Iterable[Talk], watchers: Person) -> None:
    """Let somebody watch each of these runs from another server as well."""
    for talk in talks:
        reader = talk.readers[0].opened()
        if reader.status == 200:
            talk.readers.append(watchers.watch(reader.thread, run=reader.run))


def pause(rng: random.Random, least: float, most: float) -> float:
    """A moment of chance."""
    return rng.uniform(least, most)
