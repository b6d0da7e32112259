"""Middleware of other people's making."""

from __future__ import annotations

import contextvars
from collections.abc import Callable

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_only_middleware

#: What a request leaves in its context; a run must not find it there.
tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody's")


@sync_only_middleware
def sync_only(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Knows nothing of async, as much middleware does not; sets a context variable."""

    def respond(request: HttpRequest) -> HttpResponseBase:
        token = tenant.set("the request's")
        try:
            response = get_response(request)
        finally:
            tenant.reset(token)
        response.headers["X-Sync"] = "seen"
        return response

    return respond
