"""Many readers in many processes whose connections drop again and again."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable

import pytest
from django.contrib.auth.models import User

from tests.faults import invariants
from tests.faults.crowd import options, rounds
from tests.live.servers import (
    Frame,
    Person,
    Reader,
    Servers,
    delta,
    new_id,
    said,
    stored,
    trickle,
)

READERS, DROPS = 10, 5


def has_read(count: int, reader: Reader) -> bool:
    """Whether so many events came, or no more will."""
    return bool(reader.end) or len(reader.ids) >= count


class Resuming(threading.Thread):
    """Reads a run; drops its connection at chance moments, and resumes with its cursor."""

    def __init__(self, person: Person, thread: str, run: str, stops: list[int]) -> None:
        super().__init__(daemon=True)
        self.frames: list[Frame] = []
        self.readers: list[Reader] = []
        self.end = ""
        self._person, self._thread_key, self._run, self._stops = person, thread, run, stops

    def run(self) -> None:
        for stop in [*self._stops, 10**9]:
            last = self.frames[-1].id if self.frames else ""
            reader = self._person.watch(self._thread_key, last, run=self._run)
            self.readers.append(reader)
            enough = stop - len(self.frames)
            reader.opened().wait(functools.partial(has_read, enough))
            reader.drop()  # or it has ended already
            self.frames += [frame for frame in reader.frames if frame.id]
            self.end = reader.end


@pytest.mark.postgres
def test_readers_that_drop_and_resume_all_get_the_same_once(
    servers: Servers,
    database_url: str,
    user: User,
    redis_url: str,
    rng: random.Random,
    figure: Callable[[str], None],
) -> None:
    given = options()
    given["environment"]["REDIS_URL"] = redis_url
    people = [
        Person(servers.shared(kind, database_url, name, **given), user)
        for kind, name in (("uvicorn", "first"), ("daphne", "second"), ("uvicorn", "third"))
    ]
    for turn in rounds(1, 20):
        count = 400
        thread = new_id()
        script = said(trickle(count // 2, 0.01), {"$repeat": count // 2, "event": delta()})
        poster = people[turn % 3].play(*script, thread=thread).events(1)
        all_readers = [
            Resuming(person, poster.thread, poster.run, sorted(rng.sample(range(1, count), DROPS)))
            for person in people
            for _ in range(READERS)
        ]
        for reader in all_readers:
            reader.start()
        for reader in all_readers:
            reader.join(60)
            assert reader.end == "clean"
        rows = stored(poster.done().run)
        wanted = poster.ids
        for reader in all_readers:
            assert [frame.id for frame in reader.frames] == wanted
            assert [frame.data for frame in reader.frames] == rows
        parts = [part for reader in all_readers for part in reader.readers]
        invariants.hold(thread, poster, *parts, by=people[0])
        figure(
            f"{len(all_readers)} readers of {len(rows)} events in 3 processes, {len(parts)}"
            " connections: the same sequence for all"
        )
