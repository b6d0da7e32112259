"""The plain WebSocket: one RunAgentInput text frame in, one bare event per frame out."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import Iterable
from typing import Any

from channels.consumer import AsyncConsumer
from channels.exceptions import StopConsumer
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse

from aguiapp import (
    access,
    conf,
    engine,
    eventstream,
    parameters,
    protocol,
    replies,
    store,
    views,
)
from aguiapp.errors import (
    AguiError,
    StreamAborted,
    StreamRefused,
    TooLarge,
    Unauthenticated,
    Unparsable,
)
from aguiapp.transports import gate
from aguiapp.transports.http import NO_LAYER
from aguiapp.transports.outlet import Outlet, Stalled, close_socket

logger = logging.getLogger("aguiapp.stream")

NORMAL, FAILED, RESTART, OVERLOAD = 1000, 1011, 1012, 1013
BAD_FRAME, IDLE, TOO_LARGE = 4400, 4408, 4413
#: Close codes by HTTP status; everything else is a bad frame.
CLOSE_CODES = {
    401: 4401,
    403: 4403,
    404: 4404,
    413: TOO_LARGE,
    500: FAILED,
    503: OVERLOAD,
}


class RunConsumer(AsyncConsumer):
    """One run per socket: after the run's terminal event the socket is closed with 1000.

    A refusal before the run is one frame `{"type": "aguiapp.error", …}`, then the close code.
    """

    channel_layer_alias = NO_LAYER

    def __init__(self) -> None:
        self._handshake: views.Handshake | None = None
        self._pump: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stop()

    async def websocket_connect(self, message: dict[str, Any]) -> None:
        """Pass the gate as a GET would; a foreign Origin is refused before anything else."""
        scope = {**self.scope, "type": "http", "method": "GET", "aguiapp": True}
        scope["scheme"] = "https" if self.scope.get("scheme") == "wss" else "http"
        if not access.origin_allowed(ASGIRequest(scope, io.BytesIO())):
            await self.send({"type": "websocket.close"})
            raise StopConsumer
        response = await gate.respond(scope, b"")
        await self.send({"type": "websocket.accept"})
        if isinstance(response, views.Handshake):
            self._handshake = response
            loop = asyncio.get_running_loop()
            self._silence = loop.call_later(conf.get().STALL_SECONDS, self._expire)
        else:
            await self._refuse(_refusal(response), response.status_code)

    async def websocket_receive(self, message: dict[str, Any]) -> None:
        """The first text frame starts the run; there is no second."""
        if self._silence is not None:
            self._silence.cancel()
        text = message.get("text")
        if self._pump is not None or self._handshake is None:
            await self._refuse(Unparsable("One frame, one run: open another socket."))
        elif text is None:
            await self._refuse(Unparsable("Send the run input as a text frame."))
        elif len(text.encode("utf-8", "surrogatepass")) > (limit := conf.get().INPUT_BYTES):
            await self._refuse(TooLarge(details={"limit": limit}))
        else:
            self._pump = asyncio.create_task(self._run(self._handshake, text))

    async def websocket_disconnect(self, message: dict[str, Any]) -> None:
        """The reader left; the run goes on."""
        await self._stop()
        raise StopConsumer

    def _expire(self) -> None:
        """A socket on which nobody asks for a run is closed."""
        self._pump = asyncio.ensure_future(self.send({"type": "websocket.close", "code": IDLE}))

    async def _stop(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump

    async def _refuse(self, error: AguiError, status: int | None = None) -> None:
        frame = {"type": "aguiapp.error", **error.as_dict()["error"]}
        await self.send({"type": "websocket.send", "text": json.dumps(frame)})
        code = CLOSE_CODES.get(status or error.status, BAD_FRAME)
        await close_socket(self.base_send, code)

    async def _run(self, handshake: views.Handshake, text: str) -> None:
        try:
            reading = await self._start(handshake, text)
        except AguiError as error:
            await self._refuse(error)
            return
        except Exception:
            logger.exception("socket failed before its run")
            await self._refuse(AguiError())
            return
        async with Outlet(self.base_send) as outlet:
            try:
                code = await self._events(reading, outlet)
            except Stalled as stalled:
                outlet.cut(stalled)
                return
            except StreamRefused as refused:
                code = CLOSE_CODES.get(refused.error.status, RESTART)
            except StreamAborted:
                code = RESTART
            except Exception:
                logger.exception("socket failed")
                code = FAILED
            await outlet.close_socket(code)

    async def _start(self, handshake: views.Handshake, text: str) -> eventstream.Reading:
        """Start the run; how it is read."""
        if not await store.call(access.still_valid, handshake.identity):
            raise Unauthenticated
        request = await parameters.parsed(
            handshake.request,
            handshake.identity,
            handshake.agent,
            mode="ws",
            transport="websocket",
            text=text,
        )
        started = await engine.start(request)
        return await replies.read_run(handshake.identity, request, started)

    async def _events(self, reading: eventstream.Reading, outlet: Outlet) -> int:
        async with contextlib.aclosing(reading.items()) as items:
            async for item in items:
                texts: Iterable[str] = ()
                if isinstance(item, eventstream.Unlogged):
                    texts = map(protocol.dumps, item.events)
                elif item is not None:
                    texts = item.payloads
                for text in texts:
                    await outlet({"type": "websocket.send", "text": text})
        return NORMAL if reading.follower.finished else RESTART


def _refusal(response: Any) -> AguiError:
    """What the gate said, in the words of a frame."""
    if isinstance(response, HttpResponse) and response.get("Content-Type") == "application/json":
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(response.content)["error"]
            return AguiError(said["message"], code=said["code"], details=said["details"])
    return AguiError("The handshake was refused.", code=f"http_{response.status_code}")
