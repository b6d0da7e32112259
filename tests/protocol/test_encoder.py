"""What we write, beside the official encoder: the same events are the same JSON."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from ag_ui.core.events import Event as AnyEvent
from ag_ui.encoder import EventEncoder
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from aguiapp import protocol
from aguiapp.protocol import jsontext
from tests.protocol import cases

ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyEvent)
OFFICIAL = EventEncoder()

# The official model leaves out the `state: null` of an echoed input; a state may be null.
NULL_STATE: protocol.Event = {
    "type": "RUN_STARTED",
    "threadId": "t1",
    "runId": "r1",
    "input": {"threadId": "t1", "runId": "r1", "messages": [], "state": None},
}
# Every writer has its own exponents, of equal value: 1e22, 1e+22, 1e-7, 1e-07.
EXPONENT = re.compile(r"(?<=\d)e\+?(-?)0*(?=\d)")
# CUSTOM values that both texts say with other characters: ours, theirs. Other readers split lines
# at the first three, and the fast encoder writes exponents without a plus.
SPELLED: dict[str, tuple[Any, str, str]] = {
    "line ends": ("\u0085\u2028\u2029", r'"\u0085\u2028\u2029"', '"\u0085\u2028\u2029"'),
    "exponent": (1e22, "1e22", "1e+22"),
}
# CUSTOM values that only one side writes, or both differently: our text (None: refused, with a
# reason) and theirs (None: it raises).
APART: dict[str, tuple[Any, str | None, str | None]] = {
    "a lone half": ("\ud83d", r'"\ud83d"', None),  # legal in JSON, and in JavaScript's strings
    "two halves": ("\ud83d\ude00", '"\U0001f600"', None),  # one character, as JavaScript reads it
    "not a number": (float("nan"), None, "null"),  # null would be other data than was meant
    "infinity": (float("inf"), None, "null"),
}


def text_of(frame: bytes | str) -> str:
    """The JSON of one frame."""
    whole = frame if isinstance(frame, str) else frame.decode()
    assert whole.startswith("data: ")
    assert whole.endswith("\n\n")
    return whole[6:-2]


def written(event: protocol.Event) -> str:
    return text_of(protocol.encode_sse(protocol.dumps(event)))


def official(model: Any) -> str:
    return text_of(OFFICIAL.encode(model))


def vectors() -> Iterator[protocol.Event]:
    """Every different event of the vectors, alone and from streams."""
    events = [case["event"] for case in cases.family("event_schema")]
    for family in ("verify", "fold", "chunks"):
        events += [event for case in cases.family(family) for event in case["events"]]
    yield from {json.dumps(event): event for event in events}.values()


def shared() -> Iterator[tuple[protocol.Event, Any]]:
    """Events that we pass unchanged and the official side takes and writes, with the model."""
    for event in vectors():
        try:
            enforced = protocol.enforce(event)
            model = ADAPTER.validate_python(event)
            official(model)
        except (protocol.ProtocolError, ValidationError, PydanticSerializationError):
            continue
        if enforced.event == event != NULL_STATE and not enforced.warnings:
            yield event, model


SHARED = list(shared())


@pytest.fixture(params=["fast", "plain"])
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything holds with and without the fast encoder."""
    if request.param == "plain":
        monkeypatch.setattr(jsontext, "_fast", None)
    elif jsontext._fast is None:
        pytest.skip("the fast encoder is not installed")
    return str(request.param)


def test_every_type_is_compared() -> None:
    assert {event["type"] for event, _ in SHARED} == set(protocol.TYPES)
    assert len(SHARED) >= 1500


@pytest.mark.usefixtures("writer")
def test_a_dict_has_the_official_values_and_in_the_official_order_the_official_bytes() -> None:
    in_order = 0
    for event, model in SHARED:
        ours, theirs = written(event), official(model)
        assert cases.same(json.loads(ours), json.loads(theirs)), event
        if pairs(ours) == pairs(theirs):
            in_order += 1
            assert evened(ours) == evened(theirs)
    assert in_order >= 1000


@pytest.mark.usefixtures("writer")
def test_a_model_has_the_official_bytes() -> None:
    for event, model in SHARED:
        assert evened(written(protocol.to_wire(model))) == evened(official(model)), event


@pytest.mark.usefixtures("writer")
def test_events_without_parts_that_need_a_look_take_the_short_way_to_the_same_bytes() -> None:
    plain = [(event, model) for event, model in SHARED if protocol.conforms(event)]
    assert len(plain) >= 400
    for event, model in plain:
        assert protocol.dumps(event, plain=True) == protocol.dumps(event)
        wire = protocol.to_wire(model)
        assert protocol.conforms(wire)
        assert protocol.dumps(wire, plain=True) == official(model)


@pytest.mark.parametrize(("value", "ours", "theirs"), SPELLED.values(), ids=SPELLED)
def test_the_same_value_in_other_characters(value: Any, ours: str, theirs: str) -> None:
    event = {"type": "CUSTOM", "name": "n", "value": value}
    assert written(event) == custom(ours)
    assert official(ADAPTER.validate_python(event)) == custom(theirs)
    assert json.loads(custom(ours)) == json.loads(custom(theirs)) == event


@pytest.mark.parametrize(("value", "ours", "theirs"), APART.values(), ids=APART)
def test_what_only_one_side_can_write(value: Any, ours: str | None, theirs: str | None) -> None:
    event = {"type": "CUSTOM", "name": "n", "value": value}
    model = ADAPTER.validate_python(event)
    if ours is None:
        with pytest.raises(protocol.ProtocolError):
            written(event)
    else:
        assert written(event) == custom(ours)
    if theirs is None:
        with pytest.raises(PydanticSerializationError):
            OFFICIAL.encode(model)
    else:
        assert official(model) == custom(theirs)


def test_null_for_an_optional_field_is_left_out_by_models_and_refused_in_a_dict() -> None:
    event = {"type": "RUN_FINISHED", "threadId": "t", "runId": "r", "result": None}
    model = ADAPTER.validate_python(event)
    assert "result" not in json.loads(official(model))
    assert written(protocol.to_wire(model)) == official(model)
    with pytest.raises(protocol.ProtocolError, match="left out"):
        protocol.enforce(event)


def test_a_state_of_null_in_an_echoed_input_is_kept() -> None:
    assert NULL_STATE in vectors()
    assert protocol.enforce(NULL_STATE).event == NULL_STATE
    assert json.loads(written(NULL_STATE)) == NULL_STATE
    assert '"state"' not in official(ADAPTER.validate_python(NULL_STATE))


def test_unknown_fields_are_stripped_where_the_official_encoder_passes_them_on() -> None:
    event = {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m", "delta": "x", "vendor": 1}
    enforced = protocol.enforce(event)
    assert [found.kind for found in enforced.warnings] == ["strip"]
    assert enforced.event == {key: event[key] for key in event if key != "vendor"}
    assert json.loads(official(ADAPTER.validate_python(event))) == event


def custom(value: str) -> str:
    return f'{{"type":"CUSTOM","name":"n","value":{value}}}'


def evened(text: str) -> str:
    return EXPONENT.sub(r"e\1", text)


def pairs(text: str) -> Any:
    """The document with its objects as lists of members, so that their order counts."""
    return json.loads(text, object_pairs_hook=lambda members: members)
