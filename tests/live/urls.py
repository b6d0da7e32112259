"""The example's addresses, and a look into the serving process."""

from __future__ import annotations

import asyncio
import os
import threading

from django.http import HttpRequest, JsonResponse
from django.urls import path

from project.urls import urlpatterns as example


async def inside(request: HttpRequest) -> JsonResponse:
    """What this process holds right now."""
    tasks = [task.get_name() for task in asyncio.all_tasks()]
    threads = [thread.name for thread in threading.enumerate()]
    fds = len(os.listdir("/proc/self/fd"))
    return JsonResponse({"tasks": sorted(tasks), "threads": sorted(threads), "fds": fds})


urlpatterns = [*example, path("inside/", inside)]
