"""The example's addresses, and a look into the serving process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading

from django.http import HttpRequest, JsonResponse
from django.urls import path

from project.urls import urlpatterns as example


async def inside(request: HttpRequest) -> JsonResponse:
    """What this process holds right now."""
    gc.collect()
    tasks = [task.get_name() for task in asyncio.all_tasks()]
    threads = [thread.name for thread in threading.enumerate()]
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    # SQLite keeps descriptors of closed connections for the next ones: not ours to count.
    fds = sum("sqlite3" not in link for link in links)
    return JsonResponse({"tasks": sorted(tasks), "threads": sorted(threads), "fds": fds})


urlpatterns = [*example, path("inside/", inside)]
