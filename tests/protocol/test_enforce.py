import copy

import pytest

from aguiapp import protocol
from tests.protocol import cases

# Where the stripped event differs from the official one, and why.
DEPARTURES = {
    "evs-1155": "absent tools and context of an echoed input stay absent: absent means empty",
}


@cases.each(cases.family("event_schema"), lambda case: str(case["event"].get("type")))
def test_every_event_gets_the_official_verdict(case: cases.Case) -> None:
    event, expected = case["event"], case["ts_client"]
    before = copy.deepcopy(event)
    try:
        enforced = protocol.enforce(event)
    except protocol.ProtocolError:
        assert expected["verdict"] == "fatal"
        return
    finally:
        assert event == before
    assert expected["verdict"] == ("dropped" if enforced.event is None else "passed")
    if enforced.event is not None:
        stripped = [cases.slashed(finding.path) for finding in enforced.warnings]
        assert sorted(stripped) == sorted(expected.get("stripped") or [])
        assert (enforced.event is event) == (not stripped)
        if "event" in expected and case["id"] not in DEPARTURES:
            assert cases.same(enforced.event, expected["event"])


def test_the_type_of_a_later_protocol_version_is_kept_and_never_a_reason_to_refuse() -> None:
    event = {
        "type": "REASONING_ENCRYPTED_VALUE",
        "subtype": "message",
        "entityId": "m",
        "encryptedValue": "e",
        "encryptedValueType": "vendor/1",
    }
    assert protocol.enforce(event).event is event
    unusable = protocol.enforce({**event, "encryptedValueType": 5})
    assert unusable.event is not None
    assert "encryptedValueType" not in unusable.event
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
        "encryptedValue": "e",
        "encryptedValueType": "v",
    }
    message = {"id": "m", "role": "assistant", "toolCalls": [call], "encryptedValueType": "v"}
    snapshot = {"type": "MESSAGES_SNAPSHOT", "messages": [message]}
    assert protocol.enforce(snapshot).event is snapshot


@pytest.mark.parametrize("stamp", [5, 5.0, -1, 2**53 - 1, -(2**53 - 1)])
def test_integral_timestamps_pass(stamp: float) -> None:
    event = {"type": "CUSTOM", "name": "n", "value": None, "timestamp": stamp}
    assert protocol.enforce(event).event is event


@pytest.mark.parametrize("stamp", [True, "5", 5.5, 2**53, None, float("nan"), float("inf")])
def test_other_timestamps_are_refused_by_name(stamp: object) -> None:
    event = {"type": "CUSTOM", "name": "n", "value": None, "timestamp": stamp}
    with pytest.raises(protocol.ProtocolError, match="timestamp") as caught:
        protocol.enforce(event)
    assert caught.value.rule == "malformed"


@pytest.mark.parametrize("event", [None, 5, "x", [], [{}]])
def test_what_is_no_object_is_refused(event: object) -> None:
    with pytest.raises(protocol.ProtocolError):
        protocol.enforce(event)  # type: ignore[arg-type]


def test_every_type_has_a_code_that_never_changes() -> None:
    assert sorted(protocol.TYPE_NAMES) == list(range(1, 32))
    assert protocol.TYPE_CODES["RUN_STARTED"] == 1
    assert protocol.TYPE_CODES["TEXT_MESSAGE_CONTENT"] == 7
    assert protocol.TYPE_CODES["SUBAGENT_ERROR"] == 31
    assert {protocol.TYPE_NAMES[code] for code in protocol.TYPE_CODES.values()} == protocol.TYPES
