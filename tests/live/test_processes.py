"""Two processes on one database: either serves what the other runs."""

from __future__ import annotations

import json
import statistics
import time

from django.contrib.auth.models import User

from tests.live.servers import Person, Reader, Servers, delta, ended, said, stored, trickle


def pair(
    servers: Servers, database_url: str, user: User, **options: object
) -> tuple[Person, Person]:
    name = "redis" if options else ""
    here = Person(servers.shared("daphne", database_url, name, **options), user)
    return here, here.at(servers.shared("uvicorn", database_url, name, **options))


def delays(here: Reader, there: Reader) -> list[float]:
    """How much later each event came there, in seconds."""
    return [late - early for early, late in zip(here.times, there.times, strict=False)]


def test_a_follower_elsewhere_sees_every_event_by_polling(
    servers: Servers, database_url: str, user: User
) -> None:
    for here, there in (pair(servers, database_url, user), pair(servers, database_url, user)[::-1]):
        reader = here.play(*said(trickle(60, 0.03))).events(2)
        watcher = there.watch(reader.thread, run=reader.run)
        reader.done()
        watcher.done()
        assert watcher.logged == reader.logged == stored(reader.run)
        assert watcher.ids == reader.ids
        assert watcher.times[-1] - reader.times[-1] < 2


def test_with_redis_the_other_process_is_told_at_once(
    servers: Servers, database_url: str, user: User, redis_url: str
) -> None:
    options = {"environment": {"REDIS_URL": redis_url}}
    here, there = pair(servers, database_url, user, **options)
    quiet = here.run("echo", "warm", "told").done()
    watcher = there.watch(quiet.thread, quiet.ids[-1]).wait(lambda r: r.comments)
    time.sleep(0.5)  # the group is joined behind the reader's back
    reader = here.play(*said(trickle(30, 0.05)), thread="told").done()
    watcher.wait(lambda r: r.payloads and r.types[-1] == "RUN_FINISHED")
    assert watcher.logged == reader.logged == stored(reader.run)
    first = {f.id: t for f, t in zip(reader.frames, reader.times, strict=True) if f.id}
    late = [t - first[f.id] for f, t in zip(watcher.frames, watcher.times, strict=True) if f.id]
    print(f"hint: median {statistics.median(late) * 1000:.0f} ms, worst {max(late) * 1000:.0f} ms")  # noqa: T201
    assert statistics.median(late) < 0.25
    watcher.drop()


def test_a_resume_at_the_other_process_completes_the_stream(
    servers: Servers, database_url: str, user: User
) -> None:
    here, there = pair(servers, database_url, user)
    reader = here.play(*said(trickle(60, 0.02))).events(10)
    reader.drop()
    head = list(reader.frames)[:7]
    resumed = there.watch(reader.thread, head[-1].id, run=reader.run).done()
    run = ended(reader.run)
    rows = stored(reader.run)
    assert [f.data for f in head if f.id] + resumed.logged == rows
    assert run.last_seq == len(rows)


def test_a_post_to_the_other_process_is_told_that_the_thread_is_busy(
    servers: Servers, database_url: str, user: User
) -> None:
    here, there = pair(servers, database_url, user)
    reader = here.play(*said(delta(), {"$hang": True}), thread="one at a time").events(3)
    refused = there.run("echo", "me too", "one at a time").done()
    assert refused.status == 409
    assert json.loads(bytes(refused.raw))["error"]["code"] == "thread_busy"
    there.cancel(reader)
    reader.done()
