"""A host's own middleware: marks every response, and closes the shop on demand."""

from __future__ import annotations

from typing import Any

from django.conf import settings
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


@async_only_middleware
def cors(get_response: Any) -> Any:
    """Lets `CORS_ALLOWED_ORIGINS` in, with what they may send and read, as hosts do."""

    chosen: Any = settings  # which the example's do not have

    async def respond(request: HttpRequest) -> HttpResponseBase:
        preflight = request.method == "OPTIONS"
        response = HttpResponse() if preflight else await get_response(request)
        if (origin := request.headers.get("Origin", "")) in chosen.CORS_ALLOWED_ORIGINS:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Allow-Headers"] = (
                "accept, authorization, content-type, user-agent, x-csrftoken, x-requested-with"
            )
            response.headers["Access-Control-Expose-Headers"] = ", ".join(
                chosen.CORS_EXPOSE_HEADERS
            )
        return response

    return respond
