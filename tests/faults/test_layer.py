"""A Redis that goes away and forgets: readers elsewhere get everything, and it holds no content."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from tests.faults import breakable, invariants
from tests.faults.crowd import crowd, options, rounds, watched
from tests.live.servers import KINDS, Person, Reader, Servers, delta, said
from tests.services import LONG

#: Stands in every event of these runs, and must stand in no message of the layer.
SECRET = "whisky-tango-7731"


class Monitor:
    """Everything a Redis was told, as it was told."""

    def __init__(self, found: breakable.Redis) -> None:
        self.lines: list[str] = []
        self._client = found.client()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            with self._client.monitor() as monitor:  # type: ignore[no-untyped-call]
                for command in monitor.listen():
                    self.lines.append(str(command["command"]))
        except Exception as error:  # it was stopped
            self.lines.append(repr(error))


def restarted(found: breakable.Redis) -> None:
    found.stop()
    time.sleep(0.5)
    found.start()


def forgetful(found: breakable.Redis) -> None:
    for _ in range(5):
        found.client().flushall()
        time.sleep(0.1)


def silent(found: breakable.Redis) -> None:
    found.client().client_pause(1500, all=True)


def gone(found: breakable.Redis) -> None:
    found.stop()


FAULTS: list[Callable[[breakable.Redis], Any]] = [restarted, forgetful, silent, gone]


def lateness(here: Reader, there: Reader) -> list[float]:
    """How much later each event came there."""
    first = {frame.id: time for frame, time in zip(here.frames, here.times, strict=True)}
    return [
        time - first[frame.id]
        for frame, time in zip(there.frames, there.times, strict=True)
        if frame.id
    ]


@pytest.mark.postgres  # several processes on SQLite have no use for a layer
@pytest.mark.parametrize("kind", KINDS if LONG else KINDS[:1])
def test_watchers_elsewhere_get_everything_whatever_the_layer_loses(
    servers: Servers,
    database_url: str,
    user: User,
    own_redis: breakable.Redis,
    figure: Callable[[str], None],
    kind: str,
) -> None:
    given = options()
    given["environment"]["REDIS_URL"] = own_redis.url
    here = Person(servers.start(kind, database_url, **given), user)
    there = here.at(servers.start("uvicorn", database_url, **given))
    for turn in rounds(len(FAULTS), 5 * len(FAULTS)):
        fault = FAULTS[turn % len(FAULTS)]
        own_redis.start()
        monitor = Monitor(own_redis)
        events = [delta(f"{SECRET} $i"), {"$sleep": 0.02}]
        talks = crowd(here, [said({"$repeat": 60, "events": events}) for _ in range(2)])
        watched(talks, there)
        for talk in talks:
            talk.readers[1].events(10)
        fault(own_redis)
        late = 0.0
        for talk in talks:
            for reader in talk.readers:
                reader.done()
                assert (reader.end, reader.last["type"]) == ("clean", "RUN_FINISHED")
            assert talk.readers[0].logged == talk.readers[1].logged
            invariants.hold(talk.thread, *talk.readers, by=there)
            late = max(late, *lateness(*talk.readers))
        figure(
            f"Redis {fault.__name__} under {kind}: a watcher elsewhere was {late:.2f} s late at most"
        )
        assert late < 3
        assert any("aguiapp" in line for line in monitor.lines)
        assert not any(SECRET in line for line in monitor.lines)
