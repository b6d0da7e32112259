"""How a host mounts the app: streams go through our consumers, all else through Django."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from django.conf import settings
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.urls import Resolver404, resolve
from django.utils import translation

from aguiapp import engine, views
from aguiapp.transports.http import HttpConsumer
from aguiapp.transports.websocket import RunConsumer

Application = Callable[..., Awaitable[Any]]

#: Views whose answer may take long: served by our consumer, which holds no thread meanwhile.
STREAMS = (views.agent_run, views.agent_connect, views.thread_stream, views.thread_events)


def mount(django_application: Application, websocket: Application | None = None) -> Application:
    """Wrap a project's ASGI application.

    Requests for our streams are served by Channels consumers that run the project's middleware
    and the view once; every other request goes to `django_application`. WebSocket paths that are
    not ours go to `websocket`, where one is given.
    """
    http_consumer, run_consumer = HttpConsumer.as_asgi(), RunConsumer.as_asgi()

    async def application(scope: Any, receive: Any, send: Any) -> Any:
        engine.current().wake()  # by whatever comes first, or lost runs would wait for our views
        if scope["type"] == "lifespan" and isinstance(django_application, ASGIHandler):
            return await _live(receive, send)
        if scope["type"] == "http":
            scope = {**scope, "aguiapp": True}
            if _view(scope) in STREAMS:
                return await http_consumer(scope, receive, send)
        elif scope["type"] == "websocket":
            if _view(scope) is views.agent_socket:
                return await run_consumer(scope, receive, send)
            if websocket is not None:
                return await websocket(scope, receive, send)
            return await _no_socket(receive, send)
        return await django_application(scope, receive, send)

    return application


def _view(scope: Any) -> Any:
    """The view behind the path, found as Django finds it; None when there is none."""
    path = scope["path"]
    prefix = get_script_prefix(scope).rstrip("/")
    if prefix and path.startswith(prefix):
        path = path[len(prefix) :]
    try:
        # URLs with a language prefix resolve only in their language.
        with translation.override(translation.get_language_from_path(path)):
            return resolve(path or "/", urlconf=settings.ROOT_URLCONF).func
    except Resolver404:
        return None


async def _live(receive: Any, send: Any) -> None:
    """The server's start and end, where it tells them; Django's own handler knows neither."""
    for moment in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{moment}.complete"})


async def _no_socket(receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.close"})
