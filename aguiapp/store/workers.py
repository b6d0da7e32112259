"""The store's threads, each with a connection of its own that it keeps: a waiting run holds none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError, connections

from aguiapp import conf
from aguiapp.store import sql

P = ParamSpec("P")
T = TypeVar("T")

#: Threads for everything but appends: openings, endings, reads.
POOL_THREADS = 2

_executors: dict[tuple[int, str], ThreadPoolExecutor] = {}


def executor(name: str, threads: int = 1) -> ThreadPoolExecutor:
    """The named pool of this process (a fork gets its own)."""
    found = _executors.get((os.getpid(), name))
    if found is None:
        found = ThreadPoolExecutor(threads, thread_name_prefix=f"aguiapp-{name}")
        _executors[os.getpid(), name] = found
    return found


def _guarded(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run `function`; a connection that failed is closed, so that the next call opens a new one.

    One that may have died in the meantime, with a restart of the database, is looked at first.
    """
    sql.discard_if_dead()
    try:
        return function(*args, **kwargs)
    except (DatabaseError, InterfaceError):
        sql.discard_if_broken()
        raise


def submit(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run `function` in the single thread called `name`."""
    return executor(name).submit(lambda: _guarded(function, *args, **kwargs))


async def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a store function off the loop; with the inline writer in the caller's own thread."""
    if conf.get().WRITER == "inline":
        return await sync_to_async(function, thread_sensitive=True)(*args, **kwargs)
    loop = asyncio.get_running_loop()
    pool = executor("store", POOL_THREADS)
    return await loop.run_in_executor(pool, lambda: _guarded(function, *args, **kwargs))


def close() -> None:
    """End the threads of this process and close their connections."""
    for (pid, name), pool in list(_executors.items()):
        if pid == os.getpid():
            together = threading.Barrier(pool._max_workers)
            for done in [pool.submit(_let_go, together) for _ in range(together.parties)]:
                done.result()
            pool.shutdown(wait=True)
        _executors.pop((pid, name), None)


def _let_go(together: threading.Barrier) -> None:
    """Close this thread's connections; nobody goes on before every thread of the pool came."""
    together.wait(timeout=10)
    connections.close_all()
