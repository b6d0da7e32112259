"""The example's own middleware."""

from __future__ import annotations

from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none';"
    " form-action 'self'; frame-ancestors 'none'"
)


@sync_and_async_middleware
def content_security_policy(get_response: Any) -> Any:
    """Every page under a strict policy: nothing inline, nothing from elsewhere."""
    if iscoroutinefunction(get_response):

        async def respond_async(request: HttpRequest) -> HttpResponseBase:
            return _with_policy(await get_response(request))

        return respond_async

    def respond(request: HttpRequest) -> HttpResponseBase:
        return _with_policy(get_response(request))

    return respond


def _with_policy(response: HttpResponseBase) -> HttpResponseBase:
    response.headers.setdefault("Content-Security-Policy", POLICY)
    return response
