"""Streams over HTTP: one pump task per request, which ends with the connection or the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from channels.consumer import AsyncConsumer
from channels.exceptions import StopConsumer
from django.http.response import HttpResponseBase

from aguiapp import conf
from aguiapp.errors import StreamAborted
from aguiapp.eventstream import EventStream, Later
from aguiapp.transports import gate
from aguiapp.transports.outlet import Outlet

logger = logging.getLogger("aguiapp.stream")

#: Nobody sends to a stream through the layer, so it must not cost a subscription: an alias that
#: is never configured gives a consumer without a channel.
NO_LAYER = "aguiapp has no channel here"


class HttpConsumer(AsyncConsumer):
    """Runs middleware and view once, then pumps the view's own generator.

    A consumer handles one message at a time, so the stream is a task of its own and the consumer
    keeps listening: that is how a reader who leaves is noticed.
    """

    channel_layer_alias = NO_LAYER

    def __init__(self) -> None:
        self._body = bytearray()
        self._pump: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def receive_or_fail() -> Any:
            message = asyncio.ensure_future(receive())
            try:
                await asyncio.wait({message, self._failed}, return_when=asyncio.FIRST_COMPLETED)
                if self._failed.done():
                    self._failed.result()
                return message.result()
            finally:
                message.cancel()

        try:
            await super().__call__(scope, receive_or_fail, send)
        finally:
            await self._stop()
            self._failed.cancel()

    async def http_request(self, message: dict[str, Any]) -> None:
        """Collect the body, no more of it than the limit, and start the pump."""
        limit = conf.get().INPUT_BYTES
        room = limit + 1 - len(self._body)
        self._body += message.get("body", b"")[:room]
        full = len(self._body) > limit or _announced(self.scope) > limit
        if (message.get("more_body") and not full) or self._pump is not None:
            return
        self._pump = asyncio.create_task(self._serve())
        self._pump.add_done_callback(self._ended)

    async def http_disconnect(self, message: dict[str, Any]) -> None:
        """The reader left, or the response is complete."""
        await self._stop()
        raise StopConsumer

    async def _stop(self) -> None:
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError, StreamAborted):
                await self._pump

    def _ended(self, pump: asyncio.Task[None]) -> None:
        """A pump that failed fails the consumer: the server then closes the connection."""
        if not pump.cancelled() and (error := pump.exception()) and not self._failed.done():
            self._failed.set_exception(error)

    async def _serve(self) -> None:
        send: Any = self.base_send
        response = await gate.respond(dict(self.scope), bytes(self._body))
        self._body.clear()
        try:
            if isinstance(response, EventStream):
                await self._stream(response)
            else:
                if isinstance(response, Later):
                    await response.finish()
                await gate.handler().send_response(response, send)
        finally:
            # Receivers of request_finished may use the ORM.
            async with ThreadSensitiveContext():
                await sync_to_async(response.close, thread_sensitive=True)()

    async def _stream(self, response: EventStream) -> None:
        async with Outlet(self.base_send) as outlet:
            await outlet(_start(response))
            try:
                async with contextlib.aclosing(response.source) as source:
                    async for chunk in source:
                        await outlet(
                            {"type": "http.response.body", "body": chunk, "more_body": True}
                        )
            except Exception as error:
                if not isinstance(error, StreamAborted):
                    logger.exception("stream failed")
                if outlet.cut(error):
                    return
                raise
            outlet.release()
            await outlet({"type": "http.response.body", "body": b""})


def _announced(scope: Any) -> int:
    for name, value in scope.get("headers", ()):
        if name.lower() == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _start(response: HttpResponseBase) -> Any:
    headers = [(name.lower().encode(), value.encode("latin1")) for name, value in response.items()]
    headers += [
        (b"set-cookie", cookie.output(header="").strip().encode())
        for cookie in response.cookies.values()
    ]
    return {"type": "http.response.start", "status": response.status_code, "headers": headers}
