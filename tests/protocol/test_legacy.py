import copy
from itertools import count
from typing import Any

import pytest

from aguiapp import protocol
from tests.protocol import cases

CASES = [case for case in cases.family("legacy") if case["kind"] == "inbound"]


def upgrader() -> protocol.Upgrader:
    minted = count(1)
    return protocol.Upgrader(lambda: f"$minted-{next(minted)}")


def with_defaults(event: Any) -> Any:
    """The official schema writes absent tools and context as empty lists; we leave them out."""
    if event.get("type") != "RUN_STARTED" or "input" not in event:
        return event
    return {**event, "input": {"tools": [], "context": [], **event["input"]}}


@cases.each(CASES, lambda case: case["group"])
def test_retired_shapes_become_what_the_official_client_makes_of_them(case: cases.Case) -> None:
    before = copy.deepcopy(case["events"])
    stage = upgrader()
    upgraded = [modern for event in case["events"] for modern in stage.feed(event)]
    assert case["events"] == before
    assert cases.same(upgraded, case["boundary"])
    assert len(stage.drain()) == case["compat_warnings"]
    enforced: list[Any] = []
    noted: list[str] = []
    refused = None
    for index, event in enumerate(upgraded):
        try:
            kept = protocol.enforce(event)
        except protocol.ProtocolError:
            refused = index
            break
        noted += [
            cases.slashed(finding.path) if finding.kind == "strip" else finding.kind
            for finding in kept.warnings
        ]
        enforced += [] if kept.event is None else [with_defaults(kept.event)]
    assert refused == case.get("enforce_error_index")
    assert cases.same(enforced, [with_defaults(event) for event in case["enforced"]])
    # A refused event is refused for all its faults; what else was odd about it is not listed.
    if refused is None:
        assert noted == case["stripped"]


@cases.each(CASES, lambda case: case["group"])
def test_an_old_stream_ends_in_the_official_messages(case: cases.Case) -> None:
    client = cases.Client()
    assert client.run(case["events"]) == case["client"]["error_index"]
    messages = client.fold.snapshot().messages
    expected = case["client"]["messages"]
    # Ids are minted in another order by the client, which mints some more.
    assert len(messages) == len(expected)
    for mine, theirs in zip(messages, expected, strict=True):
        minted = str(theirs["id"]).startswith("$minted")
        assert cases.same(mine, {**theirs, "id": mine["id"]} if minted else theirs)


def test_a_modern_event_passes_as_the_same_object() -> None:
    event = {"type": "RUN_FINISHED", "threadId": "t", "runId": "r", "result": {"a": None}}
    (passed,) = upgrader().feed(event)
    assert passed is event


@pytest.mark.parametrize("odd", [None, 5, "x", [], {}, {"type": 5}, {"type": []}])
def test_what_is_no_event_passes_for_enforcement_to_judge(odd: Any) -> None:
    assert upgrader().feed(odd) == [odd]
