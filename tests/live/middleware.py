"""A host's own middleware: marks every response, and closes the shop on demand."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import async_only_middleware


@async_only_middleware
def host(get_response: Any) -> Any:
    """Adds a header and a cookie; answers 503 to a request that says `X-Maintenance`."""

    async def respond(request: HttpRequest) -> HttpResponseBase:
        response: HttpResponseBase
        if "X-Maintenance" in request.headers:
            response = HttpResponse("closed", status=503, headers={"Retry-After": "60"})
        else:
            response = await get_response(request)
        response.headers["X-Host"] = "seen"
        response.set_cookie("visited", "yes", max_age=60, httponly=True)
        return response

    return respond
