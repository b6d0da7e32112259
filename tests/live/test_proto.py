"""The binary representation over a live server: what was negotiated is what is sent."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from django.contrib.auth.models import User

from aguiapp import protocol
from project.management.commands import demo
from tests.live.servers import Person, Server, delta, new_id, said, stored, trickle
from tests.live.test_clients import ASKED, equal_to_snapshot, orders, play
from tests.protocol.cases import family

__all__ = ["orders"]

ACCEPTS = [case["accept"] for case in family("negotiate")]
CONTENT_TYPES = {
    "sse": "text/event-stream; charset=utf-8",
    "proto": "application/vnd.ag-ui.event+proto",
    "json": "application/json",
}


def read(kind: str, body: bytes) -> list[protocol.Event]:
    """A whole body by the decoder of its kind."""
    if kind == "json":
        return list(json.loads(body)["events"])
    decoder = protocol.ProtoDecoder() if kind == "proto" else protocol.SSEDecoder()
    return decoder.feed(body) + decoder.close()


def logged(kind: str, run: str) -> list[protocol.Event]:
    """The stored events as that representation has them."""
    events = [json.loads(payload) for payload in stored(run)]
    if kind == "proto":  # absent and empty lists of an input are one there
        lists: dict[str, list[str]] = {"tools": [], "context": [], "resume": []}
        events[0]["input"] = {**lists, **events[0]["input"]}
    return events


def test_header_and_body_agree_whatever_is_accepted(ada: Person) -> None:
    address = urlsplit(ada.server.url("/agui/agents/echo/"))
    for accept in ACCEPTS:
        given = json.dumps(demo.run_input(new_id(), "hi", {}))
        headers = {**ada.headers, "Content-Type": "application/json"}
        if accept is not None:
            headers["Accept"] = accept
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
        connection.request("POST", address.path, given, headers)
        response = connection.getresponse()
        kind = protocol.negotiate(accept)
        body = response.read()
        connection.close()
        assert (response.status, response.headers["Content-Type"]) == (200, CONTENT_TYPES[kind])
        assert read(kind, body) == logged(kind, response.headers["AGUI-Run"])


def test_headers_come_first_and_frames_one_by_one(ada: Person) -> None:
    given = demo.run_input(new_id(), "play", {"script": [{"$sleep": 0.7}, *said(trickle(5, 0.05))]})
    headers = {**ada.headers, "Accept": protocol.PROTO}
    url = ada.server.url("/agui/agents/scripted/")
    with httpx.stream("POST", url, json=given, headers=headers, timeout=30) as response:
        started = time.monotonic()
        assert response.headers["Content-Type"] == protocol.PROTO
        assert response.headers["Content-Encoding"] == "identity"
        decoder, events, times = protocol.ProtoDecoder(), [], []
        for chunk in response.iter_raw():
            found = decoder.feed(chunk)
            events += found
            times += [time.monotonic() - started] * len(found)
        assert decoder.close() == []
    assert events == logged("proto", response.headers["AGUI-Run"])
    assert times[events.index(next(e for e in events if "delta" in e))] > 0.5
    assert len(set(times)) >= 5


def test_a_stream_that_ends_early_is_cut(own_server: Server, user: User) -> None:
    """There is no mark in this form, so also readers who resume are aborted."""
    person = Person(own_server, user)
    reader = person.play(*said(delta("a"), {"$sleep": 30}, delta("b"))).events(3)
    url = own_server.url(f"/agui/threads/{reader.thread}/stream")
    headers = {**person.headers, "Accept": protocol.PROTO, "AGUI-Resume": "1"}
    with httpx.stream("GET", url, headers=headers, timeout=30) as response:
        own_server.terminate()
        with pytest.raises(httpx.RemoteProtocolError):
            response.read()
    reader.drop()


@pytest.mark.node
@pytest.mark.parametrize("agent", ["support", "tokens"])
def test_the_official_client_ends_as_over_sse(
    ada: Person, node: str, js: Path, orders: None, agent: str
) -> None:
    text, forwarded = ASKED[agent]
    given = {"agent": agent, "threadId": new_id(), "text": text, "forwardedProps": forwarded}
    found = play(node, js, "proto.mjs", ada, **given)
    assert found["errors"] == []
    assert found["types"] == [protocol.PROTO]
    assert found["frames"] > 20
    snapshot = ada.snapshot(found["thread"])
    equal_to_snapshot(found, snapshot)
    assert len(found["resumed"]) == -(-found["frames"] // 10)
    for view in found["resumed"]:
        equal_to_snapshot(view, snapshot)
