"""What a request says: its body, its query string, the way it wants to be answered."""

from __future__ import annotations

import uuid
from typing import Any

from django.http import HttpRequest

from aguiapp import access, agents, conf, engine, feed, protocol, store
from aguiapp.errors import (
    BadParameter,
    CursorForeign,
    InvalidInput,
    NotFound,
    TooLarge,
    Unparsable,
    UnsupportedMediaType,
)
from aguiapp.models import Run, Thread

#: Spellings of `?stream=` and `?sse=` that ask for one JSON document.
OFF = frozenset({"0", "false", "no", "off", "json"})


def mode(request: HttpRequest) -> str:
    """How the run is answered: "sse", "proto", "json", or "async" for not at all (RFC 7240)."""
    if "respond-async" in map(_token, request.headers.get("Prefer", "").split(",")):
        return "async"
    return stream_mode(request)


def _token(preference: str) -> str:
    return preference.partition(";")[0].strip().lower()


def stream_mode(request: HttpRequest) -> str:
    """How a stream that ends is answered: "sse", "proto" or "json"."""
    for switch in ("stream", "sse"):
        if request.GET.get(switch, "").lower() in OFF:
            return "json"
    return protocol.negotiate(request.headers.get("Accept"), binary=protocol.proto_available())


def streaming(request: HttpRequest) -> str:
    """How a stream is answered that cannot be a document: "sse" or "proto"."""
    binary = protocol.proto_available()
    wants = protocol.negotiate(request.headers.get("Accept"), binary=binary)
    return "sse" if wants == "json" else wants


def resumes(request: HttpRequest, wants: str, cursor: str = "") -> bool:
    """Whether the reader says that it comes back, on a stream whose early end can be marked."""
    declared = bool(cursor) or request.headers.get("AGUI-Resume") == "1"
    return wants == "sse" and declared


async def parsed(
    request: HttpRequest,
    identity: access.Identity,
    agent: str,
    *,
    mode: str,
    transport: str,
    text: str | None = None,
) -> engine.Request:
    """A run's request, judged before anything is stored; `text` is given by a socket's frame."""
    if text is None:
        text = body(request)
    given = parse_input(text)
    key = request.GET.get("thread")
    thread = None
    if key is not None:
        found = await store.call(access.find, identity, thread_key(key), "speak")
        thread = _same_id(found, given)
    may_cancel = True
    if agents.get(agent).settings.BUSY == "interrupt":
        may_cancel = await store.call(_may_cancel, identity, thread, given["threadId"])
    return engine.Request(
        agent=agent,
        input=given,
        text=text,
        scope=identity.scope,
        actor=identity.actor,
        user=identity.user,
        thread_key=None if thread is None else thread.key,
        may_cancel=may_cancel,
        mode=mode,
        transport=transport,
    )


def _may_cancel(identity: access.Identity, shared: Thread | None, thread_id: str) -> bool:
    """Whether they may stop what runs on the shared thread, or on their own where there is one."""
    thread = shared or access.own(identity, thread_id)
    return thread is None or access.may(identity, thread, "cancel")


def joined_thread(
    request: HttpRequest, identity: access.Identity, given: dict[str, Any]
) -> Thread | None:
    """The thread somebody joins: a shared one by `?thread=`, else their own of the input's id."""
    key = request.GET.get("thread")
    if key is None:
        return access.own(identity, given["threadId"])
    return _same_id(access.find(identity, thread_key(key), "see"), given)


def _same_id(thread: Thread, given: dict[str, Any]) -> Thread:
    if thread.thread_id != given["threadId"]:
        problem = {"path": "threadId", "message": "differs from the thread's own id"}
        raise InvalidInput(details=[problem])
    return thread


def parse_input(text: str) -> dict[str, Any]:
    """The RunAgentInput; raises Unparsable (400) or InvalidInput (422) with every place."""
    try:
        return protocol.parse_input(text, max_depth=conf.get().JSON_DEPTH)
    except protocol.InputError as error:
        kind = Unparsable if error.status == 400 else InvalidInput
        raise kind(error.message, code=error.code, details=error.problems) from error


def body(request: HttpRequest) -> str:
    """The request's JSON text: type and length are checked before anything is read."""
    limit = conf.get().INPUT_BYTES
    if request.content_type != "application/json":
        raise UnsupportedMediaType
    try:
        announced = int(request.META.get("CONTENT_LENGTH") or 0)
    except ValueError:
        announced = 0
    if announced > limit:
        raise TooLarge(details={"limit": limit})
    raw = request.read(limit + 1)
    if len(raw) > limit:
        raise TooLarge(details={"limit": limit})
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unparsable("The body is not UTF-8.") from error


def thread_key(text: str) -> uuid.UUID:
    """A key from the query string; raises BadParameter."""
    try:
        return uuid.UUID(text)
    except ValueError:
        raise BadParameter("A key is a UUID.", details={"value": text[:64]}) from None


def number(request: HttpRequest, name: str, default: int, low: int, high: int) -> int:
    """A whole number of the query string within bounds; raises BadParameter."""
    text = request.GET.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not low <= int(text[:10]) <= high:
        raise BadParameter(f"{name} is a number from {low} to {high}.", details={"parameter": name})
    return int(text[:10])


def seconds(request: HttpRequest, name: str, high: float) -> float:
    """A number of seconds of the query string, at most `high`; raises BadParameter."""
    try:
        value = float(request.GET.get(name, "0") or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise BadParameter(f"{name} is a number of seconds.", details={"parameter": name})
    return min(value, high)


def position(thread: Thread, cursor: str) -> int:
    """The position a cursor names in this thread, which must have got there; "" is the start."""
    if not cursor:
        return 0
    found = feed.parse_cursor(thread, cursor)
    if found > store.end_position(thread.pk):
        raise CursorForeign
    return found


def at(thread: Thread, text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text[:18])
    return position(thread, text)


def run(request: HttpRequest, thread: Thread) -> Run | None:
    key = request.GET.get("run")
    if key is None:
        return None
    found = store.run_by_key(thread.pk, thread_key(key))
    if found is None:
        raise NotFound
    return found
