"""The host's middleware and our view, run once, before a consumer streams or accepts."""

from __future__ import annotations

import asyncio
import io
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.core.signals import request_started
from django.db import connections
from django.http.response import HttpResponseBase
from django.urls import set_script_prefix


@cache
def handler() -> ASGIHandler:
    """Django's handler with the project's middleware, loaded once."""
    return ASGIHandler()


#: Requests inside the host's middleware at a time. Each may take a thread and a connection, and
#: after a restart every reader comes back at once.
AT_A_TIME = 16

_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _turns() -> asyncio.Semaphore:
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_A_TIME))


async def respond(scope: dict[str, Any], body: bytes) -> HttpResponseBase:
    """The project's answer to a request, as Django itself would give it.

    The thread and the connection that the middleware used are given back before this returns:
    a stream that lasts for hours holds neither.
    """
    django = handler()
    async with _turns(), ThreadSensitiveContext():
        set_script_prefix(get_script_prefix(scope))
        await request_started.asend(sender=type(django), scope=scope)
        try:
            request, refused = django.create_request(scope, io.BytesIO(body))
            if request is None:
                return cast(HttpResponseBase, refused)
            return await django.get_response_async(request)
        finally:
            await sync_to_async(connections.close_all, thread_sensitive=True)()
