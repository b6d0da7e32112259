"""Who reads a thread, by process: one row for all connections of people who may speak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db.models.functions import Now

from aguiapp.models import Thread, Watcher
from aguiapp.store import lease, sql

#: How long a row counts without being renewed. A process whose loop an agent blocks renews
#: nothing meanwhile, and one that died on this host is known at once.
WATCH_SECONDS = 60.0


def note(process: str, counts: Mapping[int, int]) -> None:
    """Say how many connections a process (by its name, see `lease.owner`) holds on each thread."""
    found = sql.connection()
    expires: Any = Now() + timedelta(seconds=WATCH_SECONDS)
    with sql.writing(found):
        table = Watcher.objects.using(found.alias)
        gone = [thread_id for thread_id, count in counts.items() if not count]
        table.filter(process=process, thread_id__in=gone).delete()
        # One that was deleted meanwhile must not hide the readers of the others.
        standing = Thread.objects.using(found.alias).filter(pk__in=counts).order_by("pk")
        rows = [
            Watcher(thread_id=pk, process=process, count=counts[pk], expires=expires)
            for pk in standing.values_list("pk", flat=True)
            if counts[pk]
        ]
        table.bulk_create(
            rows,
            update_conflicts=True,
            unique_fields=["thread", "process"],
            update_fields=["count", "expires"],
        )


def watched(thread_ids: Sequence[int], besides: str) -> set[int]:
    """Those of the threads that somebody reads besides that process."""
    rows = Watcher.objects.using(sql.database()).filter(
        thread_id__in=thread_ids, expires__gte=Now(), count__gt=0
    )
    found = rows.exclude(process=besides).values_list("thread_id", "process")
    return {thread_id for thread_id, process in found if not lease.is_dead(process)}


def forget() -> None:
    """Delete the rows of processes that are gone."""
    found = sql.connection()
    with sql.writing(found):
        Watcher.objects.using(found.alias).filter(expires__lt=Now()).delete()
