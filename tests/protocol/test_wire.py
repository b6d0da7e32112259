import json
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import pytest
from ag_ui.core import (
    AssistantMessage,
    CustomEvent,
    EventType,
    MessagesSnapshotEvent,
    RunFinishedEvent,
    StateSnapshotEvent,
    TextMessageContentEvent,
    TextMessageStartEvent,
    ToolCall,
    UserMessage,
)
from ag_ui.core.events import Event as AnyEvent
from pydantic import BaseModel, TypeAdapter, ValidationError

from aguiapp import protocol
from tests.protocol import cases

ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyEvent)


@cases.each(cases.family("event_schema"), lambda case: str(case["event"].get("type")))
def test_models_become_what_their_own_json_says(case: cases.Case) -> None:
    try:
        model = ADAPTER.validate_python(case["event"])
    except ValidationError:
        return
    expected = json.loads(model.model_dump_json(by_alias=True))
    assert cases.same(protocol.to_wire(model), expected)


class Cart(BaseModel):
    total: float
    note: str | None = None


def test_models_dates_and_calls_below_an_event_become_json() -> None:
    call = ToolCall.model_validate({"id": "c", "function": {"name": "f", "arguments": "{}"}})
    messages = MessagesSnapshotEvent(
        messages=[UserMessage(id="u", content="hi"), AssistantMessage(id="a", tool_calls=[call])]
    )
    at = datetime(2026, 1, 2, tzinfo=UTC)
    state = StateSnapshotEvent(snapshot={"cart": Cart(total=1), "at": at, "items": [Cart(total=2)]})
    for event in (messages, state):
        expected = json.loads(event.model_dump_json(by_alias=True))
        wire = protocol.to_wire(event)
        assert wire == expected
        assert json.loads(protocol.dumps(wire)) == expected


def test_null_is_data_where_it_is_required_and_left_out_elsewhere() -> None:
    assert protocol.to_wire(CustomEvent(name="n", value=None)) == {
        "type": "CUSTOM",
        "name": "n",
        "value": None,
    }
    finished = RunFinishedEvent(thread_id="t", run_id="r")
    assert protocol.to_wire(finished) == {"type": "RUN_FINISHED", "threadId": "t", "runId": "r"}


def test_dicts_pass_as_they_are_and_text_is_parsed() -> None:
    event = {"type": "CUSTOM", "name": "n", "value": 1}
    assert protocol.to_wire(event) is event
    assert protocol.to_wire(MappingProxyType(event)) == event
    assert protocol.to_wire(json.dumps(event)) == event
    assert protocol.to_wire(json.dumps(event).encode()) == event
    assert protocol.to_wire({**event, "type": EventType.CUSTOM}) == event


def test_a_model_with_a_lone_half_or_a_field_of_its_own_passes() -> None:
    delta = TextMessageContentEvent(message_id="m", delta="cut \ud83d")
    assert protocol.to_wire(delta)["delta"] == "cut \ud83d"
    opened = TextMessageStartEvent.model_validate({"messageId": "m", "vendor": {"k": None}})
    assert protocol.to_wire(opened) == json.loads(opened.model_dump_json(by_alias=True))


def test_nan_in_a_model_is_refused_by_name_when_written() -> None:
    wire = protocol.to_wire(StateSnapshotEvent(snapshot={"a": [float("nan")]}))
    with pytest.raises(protocol.ProtocolError, match="NaN"):
        protocol.dumps(wire)


@pytest.mark.parametrize(
    "odd",
    [None, 5, [], {}, {"type": 5}, {"type": ""}, "[]", "null", "{", b"\xff", object(), '{"a":NaN}'],
)
def test_what_is_no_event_is_refused(odd: object) -> None:
    with pytest.raises(protocol.ProtocolError):
        protocol.to_wire(odd)


def test_what_cannot_become_json_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["circle"] = circle
    for value in (object(), circle):
        with pytest.raises(protocol.ProtocolError):
            protocol.to_wire(CustomEvent(name="n", value=value))
