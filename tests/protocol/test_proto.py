import base64
import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings, strategies as st

from aguiapp import protocol
from aguiapp.protocol import proto
from aguiapp.protocol.proto import descriptor, values, wire
from tests.protocol import cases

HOME = Path(proto.__file__).parent
CASES = cases.family("proto")
STREAMS = cases.family("proto_stream")

# Events the official encoder writes and this one refuses, and why.
REFUSED = {
    "proto-0181": "a timestamp that is text",
    "proto-0325": "an unknown event type would be zero bytes, which nobody can read",
    "proto-0327": 'a missing id would be sent as the text "undefined"',
    "proto-0328": 'null for a required text would be sent as "null"',
}
# Bytes where this decoder reads something else than the official one, and why.
DEPARTURES = {
    "proto-d039": "NaN is not JSON and is refused by name, as in the text of an event stream",
    "proto-d040": "nor is Infinity",
    "proto-d051": "__proto__ is a key like any other here",
}


def encoded(case: cases.Case) -> bytes | None:
    try:
        return proto.encode_proto(case["event"])
    except protocol.ProtocolError:
        return None


def decoded(data: bytes) -> protocol.Event | None:
    """Read a message; None when it is refused."""
    try:
        return proto.decode_proto(data)
    except protocol.FrameError:
        return None


# -- the conformance vectors --------------------------------------------------------------------


@cases.each([case for case in CASES if case["kind"] == "encode"], lambda case: case["group"])
def test_events_are_written_byte_for_byte_as_officially(case: cases.Case) -> None:
    written = encoded(case)
    if case["id"] in REFUSED or "error" in case:
        assert written is None
        return
    assert written == base64.b64decode(case["proto_base64"])
    frame = proto.encode_proto_frame(case["event"])
    assert frame == bytes.fromhex(case["framed_prefix_hex"]) + written


@cases.each([case for case in CASES if "proto_base64" in case], lambda case: case["kind"])
def test_messages_are_read_as_officially(case: cases.Case) -> None:
    event = decoded(base64.b64decode(case["proto_base64"]))
    expected = case.get("decoded")
    if case["id"] in DEPARTURES:
        assert not cases.same(event, expected)
        return
    assert cases.same(event, expected)
    if case["kind"] == "encode" and event is not None:
        assert cases.same(event, case["event"]) == case["roundtrip_equal"]


@cases.each([case for case in CASES if "enforced" in case], lambda case: case["kind"])
def test_what_was_read_is_enforced_as_officially(case: cases.Case) -> None:
    event = decoded(base64.b64decode(case["proto_base64"]))
    if case["id"] in DEPARTURES:
        return
    assert event is not None
    expected = case["enforced"]
    if "error" in expected:
        with pytest.raises(protocol.ProtocolError):
            protocol.enforce(event)
    else:
        assert cases.same([protocol.enforce(event).event], expected["events"])


@cases.each(STREAMS, lambda case: "all")
def test_streams_are_read_as_officially(case: cases.Case) -> None:
    decoder = proto.ProtoDecoder()
    events: list[protocol.Event] = []
    failed = False
    try:
        for chunk in case["chunks_base64"]:
            events += decoder.feed(base64.b64decode(chunk))
        events += decoder.close()
    except protocol.FrameError as problem:
        events += problem.events
        failed = True
    assert failed == (case["error"] is not None) == (not case["completed"])
    assert cases.same(events, case["events"])
    assert len(decoder.drain()) == len(case.get("warnings", []))
    assert decoder.drain() == []


# -- the schema ---------------------------------------------------------------------------------


def test_the_compiled_descriptor_is_that_of_the_readable_schema(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    fresh = tmp_path / "ag_ui.pb"
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", f"-I{HOME}"]
    subprocess.run([*command, f"--descriptor_set_out={fresh}", "ag_ui.proto"], check=True)
    kept = (HOME / "ag_ui.pb").read_bytes()
    assert FileDescriptorSet.FromString(fresh.read_bytes()) == FileDescriptorSet.FromString(kept)


def test_the_schema_is_that_of_the_official_package() -> None:
    layout = json.loads((cases.VECTORS / "proto_fields.json").read_text())
    found: dict[str, Any] = {}
    for message in peer_file().message_type:
        for kept in (message, *message.nested_type):
            name = kept.name if kept is message else f"{message.name}_{kept.name}"
            found[name] = {_described(field) for field in kept.field}
    # The slots of protocol 1.1.
    for name, number in (("Message", 14), ("ToolCall", 6), ("ReasoningEncryptedValueEvent", 6)):
        found[name].remove((number, "encryptedValueType", "string", False))
    assert found == {
        name: {(f["number"], f["name"], f["kind"], f.get("repeated", False)) for f in fields}
        for name, fields in layout["messages"].items()
    }
    assert {
        enum.name: {value.name: value.number for value in enum.value}
        for enum in peer_file().enum_type
    } == layout["enums"]


def _described(field: Any) -> tuple[int, str, str, bool]:
    names = {field.TYPE_STRING: "string", field.TYPE_INT64: "int64", field.TYPE_BOOL: "bool"}
    name = field.type_name.removeprefix(".ag_ui.").removeprefix(".google.protobuf.")
    kind = "int32" if field.type == field.TYPE_ENUM else f"message {name.replace('.', '_')}"
    many = field.label == field.LABEL_REPEATED
    return field.number, field.json_name, names.get(field.type, kind), many


def test_every_event_type_has_its_arm() -> None:
    assert descriptor.schema().by_type.keys() == protocol.TYPES
    assert sorted(descriptor.schema().by_number) == list(range(1, 32))


def peer_file() -> Any:
    return FileDescriptorSet.FromString((HOME / "ag_ui.pb").read_bytes()).file[0]


@cache
def peer() -> Any:
    """Make the Event class of a peer that takes the schema as it stands."""
    pool = DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(peer_file().SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName("ag_ui.Event"))


# -- any event ----------------------------------------------------------------------------------

Strategy = st.SearchStrategy[Any]

TEXT = st.text(max_size=6)
INTEGER = st.integers(-(2**53) + 1, 2**53 - 1)
COUNT = st.integers(0, 2**53 - 1)
KEYS = st.one_of(TEXT, st.integers(0, 2**33).map(str))
SCALAR = st.one_of(st.booleans(), INTEGER, st.floats(allow_nan=False, allow_infinity=False), TEXT)
JSON = st.recursive(
    st.none() | SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(KEYS, JSON, max_size=3)
ANY = SCALAR | OBJECT | st.lists(JSON, max_size=3)


def record(optional: dict[str, Strategy] | None = None, /, **required: Strategy) -> Strategy:
    return st.fixed_dictionaries(required, optional=optional or {})


def some(item: Strategy) -> Strategy:
    return st.lists(item, min_size=1, max_size=2)


def few(item: Strategy) -> Strategy:
    return st.lists(item, max_size=2)


SOURCE = st.one_of(
    record(type=st.just("data"), value=TEXT, mimeType=TEXT),
    record({"mimeType": TEXT}, type=st.just("url"), value=TEXT),
    record({"mimeType": TEXT, "provider": TEXT}, type=st.just("file"), value=TEXT),
)
PART = st.one_of(
    record({"id": TEXT, "metadata": ANY}, type=st.just("text"), text=TEXT),
    record(
        {"id": TEXT, "metadata": ANY},
        type=st.sampled_from(["image", "audio", "video", "document"]),
        source=SOURCE,
    ),
)
CONTENT = TEXT | few(PART)
ENCRYPTED = {"encryptedValue": TEXT, "encryptedValueType": TEXT}
OWNED = {"metadata": OBJECT, "subagentRunId": TEXT}
CALL = record(
    {"metadata": OBJECT, **ENCRYPTED},
    id=TEXT,
    type=st.just("function"),
    function=record(name=TEXT, arguments=TEXT),
)
NAMED = {"name": TEXT, **OWNED, **ENCRYPTED}
MESSAGE = st.one_of(
    record(NAMED, id=TEXT, role=st.sampled_from(["developer", "system"]), content=TEXT),
    record(NAMED, id=TEXT, role=st.just("user"), content=CONTENT),
    record({**NAMED, "content": TEXT, "toolCalls": some(CALL)}, id=TEXT, role=st.just("assistant")),
    record(
        {"error": TEXT, **OWNED, **ENCRYPTED},
        id=TEXT,
        role=st.just("tool"),
        content=CONTENT,
        toolCallId=TEXT,
    ),
    record(OWNED, id=TEXT, role=st.just("activity"), activityType=TEXT, content=OBJECT),
    record({**OWNED, **ENCRYPTED}, id=TEXT, role=st.just("reasoning"), content=TEXT),
)
INPUT = record(
    {"protocolVersion": TEXT, "parentRunId": TEXT, "state": ANY, "forwardedProps": ANY},
    threadId=TEXT,
    runId=TEXT,
    messages=few(MESSAGE),
    tools=few(record({"parameters": ANY, "metadata": OBJECT}, name=TEXT, description=TEXT)),
    context=few(record(description=TEXT, value=TEXT)),
    resume=few(
        record(
            {"payload": ANY, "metadata": OBJECT},
            interruptId=TEXT,
            status=st.sampled_from(["resolved", "cancelled"]),
        )
    ),
)
POINTER = st.sampled_from(["", "/a", "/a~1b/0", "/é"])
PATCH = few(
    st.one_of(
        record(op=st.sampled_from(["add", "replace", "test"]), path=POINTER, value=JSON),
        record(op=st.just("remove"), path=POINTER),
        st.fixed_dictionaries(
            {"op": st.sampled_from(["move", "copy"]), "path": POINTER, "from": POINTER}
        ),
    )
)
INTERRUPT = record(
    {"message": TEXT, "toolCallId": TEXT, "responseSchema": OBJECT, "expiresAt": TEXT, **OWNED},
    id=TEXT,
    reason=TEXT,
)
RUN_OUTCOME = st.one_of(
    record({"pendingToolCallIds": some(TEXT)}, type=st.just("success")),
    record(type=st.just("interrupt"), interrupts=some(INTERRUPT)),
    record(type=st.just("cancelled")),
)
SUBAGENT_OUTCOME = st.one_of(
    record(type=st.just("success")),
    record({"interruptIds": some(TEXT)}, type=st.just("suspended")),
)
COUNTS = ("input", "output", "total", "reasoning", "cachedInput", "cacheWriteInput")
USAGE = some(
    record({"provider": TEXT, "model": TEXT, **{f"{name}Tokens": COUNT for name in COUNTS}})
)
SPEAKER = st.sampled_from(["developer", "system", "assistant", "user"])
ID = {"messageId": TEXT}
ON_CALL = {"toolCallId": TEXT}
DELTA = {"delta": TEXT}
SUBAGENT = {"subagentRunId": TEXT}
RUN = {"threadId": TEXT, "runId": TEXT}
ACTIVITY = {**ID, "activityType": TEXT}
# Event type -> what it must have, what it may have.
EVENTS: dict[str, tuple[dict[str, Strategy], dict[str, Strategy]]] = {
    "RUN_STARTED": (RUN, {"protocolVersion": TEXT, "parentRunId": TEXT, "input": INPUT}),
    "RUN_FINISHED": (RUN, {"result": ANY, "outcome": RUN_OUTCOME, "usage": USAGE}),
    "RUN_ERROR": ({"message": TEXT}, {"code": TEXT, "usage": USAGE}),
    "STEP_STARTED": ({"stepName": TEXT}, {}),
    "STEP_FINISHED": ({"stepName": TEXT}, {}),
    "TEXT_MESSAGE_START": (ID, {"role": SPEAKER, "name": TEXT}),
    "TEXT_MESSAGE_CONTENT": ({**ID, **DELTA}, {}),
    "TEXT_MESSAGE_END": (ID, {}),
    "TEXT_MESSAGE_CHUNK": ({}, {**ID, "role": SPEAKER, **DELTA, "name": TEXT}),
    "TOOL_CALL_START": ({**ON_CALL, "toolCallName": TEXT}, {"parentMessageId": TEXT}),
    "TOOL_CALL_ARGS": ({**ON_CALL, **DELTA}, {}),
    "TOOL_CALL_END": (ON_CALL, {}),
    "TOOL_CALL_CHUNK": ({}, {**ON_CALL, "toolCallName": TEXT, "parentMessageId": TEXT, **DELTA}),
    "TOOL_CALL_RESULT": ({**ID, **ON_CALL, "content": CONTENT}, {"role": st.just("tool")}),
    "STATE_SNAPSHOT": ({"snapshot": JSON}, {}),
    "STATE_DELTA": ({"delta": PATCH}, {}),
    "MESSAGES_SNAPSHOT": ({"messages": few(MESSAGE)}, {}),
    "ACTIVITY_SNAPSHOT": ({**ACTIVITY, "content": OBJECT}, {"replace": st.booleans()}),
    "ACTIVITY_DELTA": ({**ACTIVITY, "patch": PATCH}, {}),
    "RAW": ({"event": JSON}, {"source": TEXT}),
    "CUSTOM": ({"name": TEXT, "value": JSON}, {}),
    "REASONING_START": (ID, {}),
    "REASONING_MESSAGE_START": ({**ID, "role": st.just("reasoning")}, {}),
    "REASONING_MESSAGE_CONTENT": ({**ID, **DELTA}, {}),
    "REASONING_MESSAGE_END": (ID, {}),
    "REASONING_MESSAGE_CHUNK": ({}, {**ID, **DELTA}),
    "REASONING_END": (ID, {}),
    "REASONING_ENCRYPTED_VALUE": (
        {
            "subtype": st.sampled_from(["message", "tool-call"]),
            "entityId": TEXT,
            "encryptedValue": TEXT,
        },
        {"encryptedValueType": TEXT},
    ),
    "SUBAGENT_STARTED": (
        {**SUBAGENT, "name": TEXT},
        dict.fromkeys(
            ("description", "parentSubagentRunId", "parentToolCallId", "parentMessageId"), TEXT
        ),
    ),
    "SUBAGENT_FINISHED": (SUBAGENT, {"result": ANY, "outcome": SUBAGENT_OUTCOME}),
    "SUBAGENT_ERROR": ({**SUBAGENT, "message": TEXT}, {"code": TEXT}),
}
COMMON = {"timestamp": INTEGER, "rawEvent": ANY, "metadata": OBJECT}
UNATTRIBUTED = {"RUN_STARTED", "RUN_FINISHED", "RUN_ERROR", "MESSAGES_SNAPSHOT"}


def event_of(name: str) -> Strategy:
    required, optional = EVENTS[name]
    tag = {} if name in UNATTRIBUTED or "subagentRunId" in required else SUBAGENT
    return record({**COMMON, **tag, **optional}, type=st.just(name), **required)


EVENT = st.sampled_from(sorted(EVENTS)).flatmap(event_of)


@pytest.mark.parametrize("name", sorted(protocol.TYPES))
def test_an_event_comes_back_as_it_was(name: str) -> None:
    @settings(max_examples=12, deadline=None)
    @given(event_of(name))
    def check(event: protocol.Event) -> None:
        enforced = protocol.enforce(event)
        assert (enforced.event, list(enforced.warnings)) == (event, [])
        data = proto.encode_proto(event)
        warnings: list[protocol.Finding] = []
        assert cases.same(proto.decode_proto(data, warnings), event)
        assert not warnings
        # A peer that takes the schema as it stands reads it, and is read.
        assert cases.same(decoded(peer().FromString(data).SerializeToString()), event)

    check()


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENT, max_size=4), st.lists(st.integers(0, 300), max_size=8))
def test_any_cut_of_the_bytes_gives_the_same_events(
    events: list[protocol.Event], cuts: list[int]
) -> None:
    stream = b"".join(proto.encode_proto_frame(event) for event in events)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    decoder = proto.ProtoDecoder()
    found = [event for a, b in pairwise(edges) for event in decoder.feed(stream[a:b])]
    assert cases.same(found + decoder.close(), events)


def check_verdict(data: bytes) -> None:
    """Whatever the bytes are: refused as a frame, or an event that JSON can hold."""
    event = decoded(data)
    if event is not None:
        assert protocol.loads(protocol.dumps(event))["type"] in protocol.TYPES


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_get_a_verdict(data: bytes) -> None:
    check_verdict(data)


@settings(max_examples=200, deadline=None)
@given(EVENT, st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=3))
def test_damaged_messages_get_a_verdict(
    event: protocol.Event, damage: list[tuple[int, bytes]]
) -> None:
    data = proto.encode_proto(event)
    for at, bytes_ in damage:
        data = data[:at] + bytes_ + data[at + 1 :]
    check_verdict(data)


# -- what is lost -------------------------------------------------------------------------------


def through(event: protocol.Event) -> protocol.Event:
    back = proto.decode_proto(proto.encode_proto(event))
    assert back is not None
    return back


END = {"type": "TEXT_MESSAGE_END", "messageId": "m"}
RAN = {"type": "RUN_FINISHED", "threadId": "t", "runId": "r"}


def custom(value: Any) -> protocol.Event:
    return {"type": "CUSTOM", "name": "n", "value": value}


def snapshot(**message: Any) -> protocol.Event:
    return {"type": "MESSAGES_SNAPSHOT", "messages": [{"id": "i", **message}]}


LOST: dict[str, tuple[protocol.Event, protocol.Event]] = {
    "an unknown field": ({**END, "future": 1}, END),
    "an unknown field of a message": (
        snapshot(role="user", content="c", contentParts=[], activityContent={}),
        snapshot(role="user", content="c"),
    ),
    "an extra member of a patch operation": (
        {"type": "STATE_DELTA", "delta": [{"op": "remove", "path": "/a", "why": 1}]},
        {"type": "STATE_DELTA", "delta": [{"op": "remove", "path": "/a"}]},
    ),
    "null": ({**RAN, "result": None, "metadata": None, "outcome": None}, RAN),
    "metadata that is no object": ({**END, "metadata": ["m"]}, END),
    "empty usage": ({**RAN, "usage": []}, RAN),
    "empty tool calls": (
        snapshot(role="assistant", toolCalls=[]),
        snapshot(role="assistant"),
    ),
    "empty pending calls": (
        {**RAN, "outcome": {"type": "success", "pendingToolCallIds": []}},
        {**RAN, "outcome": {"type": "success"}},
    ),
    "empty interrupt ids": (
        {
            "type": "SUBAGENT_FINISHED",
            "subagentRunId": "s",
            "outcome": {"type": "suspended", "interruptIds": []},
        },
        {"type": "SUBAGENT_FINISHED", "subagentRunId": "s", "outcome": {"type": "suspended"}},
    ),
    "absent arrays of an input": (
        {
            "type": "RUN_STARTED",
            "threadId": "t",
            "runId": "r",
            "input": {"threadId": "t", "runId": "r", "messages": []},
        },
        {
            "type": "RUN_STARTED",
            "threadId": "t",
            "runId": "r",
            "input": {
                "threadId": "t",
                "runId": "r",
                "messages": [],
                "tools": [],
                "context": [],
                "resume": [],
            },
        },
    ),
    "an integer beyond 2^53": (custom(2**53 + 1), custom(2**53)),
    "a lone half": (custom("a\ud83d"), custom("a\ufffd")),
    "a lone half before text": (custom({"\ude00b": "\ud83dc"}), custom({"\ufffdb": "\ufffdc"})),
    "two halves that meet": (custom("\ud83d\ude00"), custom("\U0001f600")),
    "a source of unknown type": (
        snapshot(role="user", content=[{"type": "image", "source": {"type": "spirit"}}]),
        snapshot(role="user", content=[{"type": "image"}]),
    ),
    "an outcome without a type": ({**RAN, "outcome": {"type": 5}}, RAN),
    "an outcome that is a text": ({**RAN, "outcome": "success"}, RAN),
    "what an unknown outcome holds": (
        {**RAN, "outcome": {"type": "paused", "until": 5}},
        {**RAN, "outcome": {"type": "paused"}},
    ),
    "the content of an activity that is no object": (
        snapshot(role="activity", activityType="a", content="text"),
        snapshot(role="activity", activityType="a", content={}),
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_has_no_place_on_this_wire_is_lost_and_nothing_else(name: str) -> None:
    event, left = LOST[name]
    assert cases.same(through(event), left)


def test_the_difference_between_integers_and_doubles_is_lost() -> None:
    found = through(custom([1.0, 2, -0.0, 2.0**53, 1.5]))["value"]
    assert [repr(number) for number in found] == ["1", "2", "-0.0", "9007199254740992.0", "1.5"]


def test_a_content_part_of_unknown_type_is_left_out_and_named() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "smell"}, "no part", {"type": ["text"]}]
    findings: list[protocol.Finding] = []
    event = snapshot(role="user", content=parts)
    frame = proto.encode_proto_frame(event, findings)
    assert decoded(frame[4:]) == snapshot(role="user", content=parts[:1])
    assert [finding.path for finding in findings] == [
        f"messages.0.content.{position}" for position in (1, 2, 3)
    ]
    assert "'smell'" in findings[0].message
    assert proto.encode_proto(event) == frame[4:]


def test_a_part_of_the_retired_type_travels_as_a_document() -> None:
    part = {"type": "binary", "mimeType": "image/png", "url": "u", "filename": "f"}
    (message,) = through(snapshot(role="user", content=[part, {"type": "binary"}]))["messages"]
    assert message["content"] == [
        {
            "type": "document",
            "source": {"type": "url", "value": "u", "mimeType": "image/png"},
            "metadata": {"legacyBinary": True, "filename": "f"},
        }
    ]


# -- what is refused at writing -----------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"type": "NEW"}, "unknown event type 'NEW'"),
        ({"type": ["CUSTOM"]}, "unknown event type an array"),
        ({}, "unknown event type null"),
        ({"type": "CUSTOM", "value": 1}, "name is required"),
        (custom(math.nan), "nan is beyond"),
        (custom(-math.inf), "-inf is beyond"),
        (custom(10**400), "a big integer is beyond"),
        (custom({1: 2}), "a key must be a string, not 1"),
        (custom({"a": object()}), "object is not a JSON type"),
        (custom(nested(128)), "too deep"),
        (custom(CIRCLE), "in a circle"),
        ({**END, "messageId": None}, "messageId must be a string, not null"),
        ({**END, "subagentRunId": 5}, "subagentRunId must be a string, not 5"),
        ({**END, "timestamp": True}, "timestamp must be an integer, not true"),
        ({**END, "timestamp": 1.5}, "timestamp must be an integer, not 1.5"),
        ({**END, "timestamp": math.nan}, "timestamp must be an integer, not nan"),
        ({**END, "timestamp": 2**63}, "timestamp must be an integer, not a big integer"),
        ({"type": "STATE_DELTA", "delta": {}}, "delta must be an array, not an object"),
        ({"type": "STATE_DELTA", "delta": [5]}, "delta.0 must be an object, not 5"),
        (
            {"type": "STATE_DELTA", "delta": [{"op": "spam", "path": ""}]},
            "delta.0.op must be the name of a patch operation, not 'spam'",
        ),
        ({"type": "STATE_DELTA", "delta": [{"op": "add"}]}, "delta.0.path is required"),
        (
            {
                "type": "ACTIVITY_SNAPSHOT",
                "messageId": "m",
                "activityType": "a",
                "content": {},
                "replace": 1,
            },
            "replace must be true or false, not 1",
        ),
        (
            {"type": "ACTIVITY_SNAPSHOT", "messageId": "m", "activityType": "a", "content": 1},
            "content must be an object, not 1",
        ),
        (snapshot(role="system", content={}), "messages.0.content must be a string"),
        (
            {**RAN, "outcome": {"type": "success", "pendingToolCallIds": [1]}},
            "outcome.pendingToolCallIds must be a string, not 1",
        ),
        (
            {**RAN, "outcome": {"type": "interrupt", "interrupts": [{"id": "i"}]}},
            "outcome.interrupts.0.reason is required",
        ),
        (
            snapshot(
                role="user", content=[{"type": "image", "source": {"type": "url", "value": 1}}]
            ),
            "messages.0.content.0.source.value must be a string, not 1",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(event: protocol.Event, said: str) -> None:
    with pytest.raises(protocol.ProtocolError, match=said):
        proto.encode_proto(event)


def test_what_is_written_in_other_types_of_python_is_written_all_the_same() -> None:
    class Name(str):
        __slots__ = ()

    event = {**END, "messageId": Name("m"), "timestamp": 5.0, "metadata": {Name("k"): (1, 2)}}
    assert through(event) == {**END, "timestamp": 5, "metadata": {"k": [1, 2]}}


def test_keys_are_written_in_the_order_of_javascript() -> None:
    keys = ["b", "10", "a", "2", "01", "", "4294967295", "4294967294", "٣", "0"]
    found = through(custom(dict.fromkeys(keys)))["value"]
    first = ["0", "2", "10", "4294967294"]
    assert list(found) == first + [key for key in keys if key not in first]


# -- what is refused at reading -----------------------------------------------------------------


def field(number: int, payload: bytes) -> bytes:
    return wire.varint(number << 3 | wire.LENGTH) + wire.varint(len(payload)) + payload


def base_of(code: int, rest: bytes = b"") -> bytes:
    return field(1, b"\x08" + bytes((code,)) + rest)


ENDED = field(3, base_of(2) + field(2, b"m"))
GROUP = b"\xa3\x06"  # field 100
GROUP_END = b"\xa4\x06"
NUMBERS = b"\xa0\x06\x05\xa1\x06" + b"\x00" * 8 + b"\xa5\x06" + b"\x00" * 4


def in_custom(value: bytes) -> bytes:
    return field(11, base_of(10) + field(2, b"n") + field(3, value))


def user(*parts: bytes, role: bytes = b"user", rest: bytes = b"") -> bytes:
    message = field(1, b"i") + field(2, role) + b"".join(field(8, part) for part in parts) + rest
    return field(9, base_of(8) + field(2, message))


DATA = field(1, field(1, b"d") + field(2, b"m"))
URL = field(2, field(1, b"u"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no event"),
        (NUMBERS, "no event"),
        (b"\x18\x05", "no event"),
        (b"\x1b\x1c", "no event"),
        (ENDED + field(4, b""), "two kinds of event"),
        (ENDED + b"\x20\x05", "two kinds of event"),
        (field(3, field(2, b"m")), "TEXT_MESSAGE_END without its base event"),
        (field(4, base_of(2)), "carries TOOL_CALL_START but"),
        (field(3, b"\x0a\x05"), "not a message"),
        (field(100, b"\xff"), "cut off"),
        (field(100, b"\x80" * 9 + b"\x02"), "cut off or longer"),
        (b"\x80" * 11, "cut off or longer"),
        (b"\xa0\x06" + b"\xff" * 9 + b"\x7f", "longer than 64 bits"),
        (b"\x1a", "cut off"),
        (b"\x1a\x80", "cut off"),
        (b"\x1a\x05a", "longer than its message"),
        (b"\x1d\x05", "longer than its message"),
        (b"\x02\x00", "number is out of range"),
        (b"\xfa\xff\xff\xff\x7f\x00", "number is out of range"),
        (b"\x1e", "unknown wire type"),
        (GROUP_END, "not opened"),
        (GROUP, "cut off"),
        (GROUP + b"\xac\x06", "not opened"),
        (GROUP * 129, "groups nested deeper"),
        (field(3, base_of(2, b"\x10" + wire.varint(2**53))), "timestamp is beyond"),
        (field(3, base_of(2, b"\x10" + wire.varint(2**64 - 2**53))), "timestamp is beyond"),
        (in_custom(b"\x1a\x05"), "longer than its message"),
        (in_custom(b"\x11" + struct.pack("<d", math.nan)), "nan is not JSON"),
        (user(field(1, b"") + field(2, b"")), "messages.0.content.0 is of two types"),
        (user(field(2, field(1, DATA + URL))), "messages.0.content.0.source is of two types"),
        (user(field(1, b""), rest=field(3, b"text")), "a form that the role"),
        (user(rest=field(13, b"")), "a form that the role"),
        (user(field(1, b""), role=b"system"), "a form that the role"),
        (user(role=b"reasoning", rest=field(13, b"")), "a form that the role"),
        (user(role=b"activity", rest=field(3, b"")), "a form that the role"),
        (user(field(1, b""), role=b"activity"), "a form that the role"),
        (user(field(1, b""), role=b"robot", rest=field(3, b"")), "or two"),
        (field(22, base_of(21) + field(5, b"c") + field(7, field(1, b""))), "both text and parts"),
    ],
)
def test_bytes_that_are_no_message_are_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(protocol.FrameError, match=said) as caught:
        proto.decode_proto(data)
    assert (caught.value.rule, caught.value.events) == ("proto", [])


@pytest.mark.parametrize(
    "later",
    [
        field(100, b""),
        field(100, b"\x0a\x01a") + NUMBERS,
        field(32, GROUP + NUMBERS + GROUP + GROUP_END + GROUP_END),
        GROUP + field(3, b"\xff") + GROUP_END + field(100, b""),
    ],
)
def test_an_event_of_a_later_version_is_dropped_with_a_finding(later: bytes) -> None:
    warnings: list[protocol.Finding] = []
    event = proto.decode_proto(later, warnings)
    assert event is None
    assert [finding.kind for finding in warnings] == ["drop_event"]


@pytest.mark.parametrize(
    "more",
    [field(100, b"\xff"), NUMBERS, GROUP + field(9, b"") + GROUP_END, b"\x23\x24", b"\x18\x01"],
)
def test_unknown_fields_beside_a_known_event_are_ignored(more: bytes) -> None:
    assert decoded(ENDED + more) == decoded(more + ENDED) == END


def test_a_message_in_pieces_is_merged() -> None:
    stamp = field(3, field(1, b"\x10\x07") + field(2, b"x"))
    assert decoded(ENDED + stamp) == {**END, "timestamp": 7, "messageId": "x"}
    one = field(1, field(1, b"a") + field(2, b"\x20\x01"))
    two = field(1, field(1, b"b") + field(2, b"\x08\x00"))
    assert decoded(in_custom(field(5, one) + field(5, two))) == custom({"a": True, "b": None})
    assert decoded(in_custom(field(6, b"") + field(6, field(1, b"\x20\x00")))) == custom([False])
    # A Value in pieces inside an entry, and kinds that replace each other.
    split = field(1, field(2, field(3, b"x")) + field(1, b"k") + field(2, field(5, one)))
    assert decoded(in_custom(field(3, b"y") + field(5, split))) == custom({"k": {"a": True}})
    assert decoded(in_custom(field(6, field(1, b"\x20\x00")) + field(5, b""))) == custom({})
    assert decoded(in_custom(field(5, one) + field(6, b""))) == custom([])


def test_a_source_in_pieces_is_merged_and_its_last_kind_counts() -> None:
    mime = field(1, field(2, b"z"))
    event = decoded(user(field(2, field(1, DATA) + field(1, mime))))
    (part,) = event["messages"][0]["content"] if event else []
    assert part == {"type": "image", "source": {"type": "data", "value": "d", "mimeType": "z"}}
    event = decoded(user(field(2, field(1, DATA) + field(1, URL) + field(1, b""))))
    (part,) = event["messages"][0]["content"] if event else []
    assert part == {"type": "image", "source": {"type": "url", "value": "u"}}


def test_a_value_that_says_nothing_is_absent() -> None:
    nothing = {"type": "CUSTOM", "name": "n"}
    assert decoded(in_custom(b"")) == decoded(in_custom(b"\x48\x05")) == nothing
    entry = field(1, field(1, b"k") + b"\x18\x05")
    assert decoded(in_custom(field(5, entry + b"\x10\x05"))) == custom({})
    assert decoded(in_custom(field(6, field(1, b"") + b"\x10\x05"))) == custom([None])


def test_parts_of_a_later_version_are_removed_with_a_finding() -> None:
    unknown_source = field(2, field(1, field(9, b"")))
    warnings: list[protocol.Finding] = []
    event = proto.decode_proto(user(field(9, b""), field(1, b""), unknown_source), warnings)
    assert event == snapshot(role="user", content=[{"type": "text", "text": ""}])
    assert [(finding.kind, finding.path) for finding in warnings] == [
        ("strip", "messages.0.content.0"),
        ("strip", "messages.0.content.2"),
    ]


def test_unknown_roles_outcomes_and_operations_are_left_to_enforcement() -> None:
    for rest, content in (
        (b"", {}),
        (field(3, b"c"), {"content": "c"}),
        (field(8, field(1, b"")), {"content": [{"type": "text", "text": ""}]}),
        (field(13, b""), {"content": {}}),
    ):
        assert decoded(user(role=b"robot", rest=rest)) == snapshot(role="robot", **content)
    ran = base_of(12) + field(2, b"t") + field(3, b"r")
    interrupt = field(6, field(1, b"i") + field(2, b"w"))
    lists = {"interrupts": [{"id": "i", "reason": "w"}], "pendingToolCallIds": ["c"]}
    beside = interrupt + field(8, b"c")
    assert decoded(field(13, ran + beside)) == {**RAN, **lists}
    for name in ("paused", "success", "cancelled", "interrupt"):
        message = field(13, ran + field(5, name.encode()) + beside)
        assert decoded(message) == {**RAN, "outcome": {"type": name, **lists}}
    assert decoded(field(13, ran + field(5, b"interrupt"))) == {
        **RAN,
        "outcome": {"type": "interrupt", "interrupts": []},
    }
    for number, name in ((b"\x05", "test"), (b"\x06", "6"), (b"\xff" * 9 + b"\x01", "-1")):
        message = field(8, base_of(7) + field(2, b"\x08" + number))
        assert decoded(message) == {"type": "STATE_DELTA", "delta": [{"op": name, "path": ""}]}


def test_as_many_levels_as_json_may_have_go_through() -> None:
    for event in (
        custom(nested(127)),
        {"type": "STATE_DELTA", "delta": [{"op": "add", "path": "", "value": nested(125)}]},
        snapshot(role="user", content=[{"type": "text", "text": "", "metadata": nested(123)}]),
        {**END, "rawEvent": nested(127)},
    ):
        protocol.dumps(event)
        assert through(event) == event


def test_one_level_more_is_refused_both_ways() -> None:
    for event in (
        custom(nested(128)),
        {"type": "STATE_DELTA", "delta": [{"op": "add", "path": "", "value": nested(126)}]},
        snapshot(role="user", content=[{"type": "text", "text": "", "metadata": nested(124)}]),
    ):
        for write in (proto.encode_proto, protocol.dumps):
            with pytest.raises(protocol.ProtocolError, match="deep"):
                write(event)
    deep = values.write_value(nested(128), 128)
    for hostile in (deep, values.write_value(nested(20), 20)):
        for _ in range(120 if hostile is not deep else 1):
            hostile = field(6, field(1, hostile))
        with pytest.raises(protocol.FrameError, match="nested too deep"):
            proto.decode_proto(in_custom(hostile))


def test_nesting_without_end_is_no_way_to_break_the_decoder() -> None:
    value = b""
    for _ in range(3_000):
        value = field(6, field(1, value))
    assert decoded(in_custom(value)) is None
    assert decoded(b"\xa3\x06" * 200_000) is None
    assert decoded(field(3, GROUP * 200_000)) is None


# -- frames -------------------------------------------------------------------------------------


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def test_good_frames_before_a_bad_one_are_not_lost() -> None:
    decoder = proto.ProtoDecoder()
    with pytest.raises(protocol.FrameError, match="no event") as caught:
        decoder.feed(framed(ENDED) + framed(b"") + framed(ENDED))
    assert caught.value.events == [END]
    assert decoder.feed(b"") == [END]


def test_bad_frames_are_skipped_and_counted_on_demand() -> None:
    decoder = proto.ProtoDecoder(on_bad_frame="skip")
    assert decoder.feed(framed(ENDED) + framed(b"\xff\xff") + framed(b"")) == [END]
    assert decoder.feed(framed(field(100, b"")) + framed(ENDED)) == [END]
    assert decoder.skipped == 2
    assert [finding.kind for finding in decoder.drain()] == ["drop_event"]
    assert decoder.close() == []


@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_broken_framing_is_never_skipped(mode: Any) -> None:
    decoder = proto.ProtoDecoder(on_bad_frame=mode, max_frame=100)
    assert len(decoder.feed(framed(b"\x1a\x5e" + base_of(2) + field(2, b"m" * 88)))) == 1
    with pytest.raises(protocol.FrameError, match="larger than 100 bytes") as caught:
        decoder.feed(framed(ENDED) + (97).to_bytes(4, "big"))
    assert caught.value.events == [END]
    assert decoder.skipped == 0
    for cut in range(1, len(framed(ENDED))):
        decoder = proto.ProtoDecoder(on_bad_frame=mode)
        assert decoder.feed(framed(ENDED)[:cut]) == []
        with pytest.raises(protocol.FrameError, match="inside a frame"):
            decoder.close()


def test_the_limit_is_that_of_the_official_client() -> None:
    fits = (10 * 1024 * 1024 - 4).to_bytes(4, "big")
    assert proto.ProtoDecoder().feed(fits) == []
    with pytest.raises(protocol.FrameError, match="larger"):
        proto.ProtoDecoder().feed((10 * 1024 * 1024 - 3).to_bytes(4, "big"))


# -- without the package ------------------------------------------------------------------------


@pytest.fixture
def no_protobuf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "google.protobuf.descriptor_pb2", None)
    for cached in (descriptor.schema, descriptor.available):
        cached.cache_clear()
    yield
    for cached in (descriptor.schema, descriptor.available):
        cached.cache_clear()


@pytest.mark.usefixtures("no_protobuf")
def test_without_the_package_it_says_what_to_install() -> None:
    assert not proto.available()
    for call in (lambda: proto.encode_proto(END), lambda: proto.decode_proto(ENDED)):
        with pytest.raises(protocol.ProtocolError, match=r"install aguiapp\[binary\]"):
            call()
    # It is no fault of the frame: not to be skipped.
    with pytest.raises(protocol.ProtocolError, match=r"install aguiapp\[binary\]"):
        proto.ProtoDecoder(on_bad_frame="skip").feed(framed(ENDED))


def test_with_the_package_it_is_available() -> None:
    assert proto.available()


def test_importing_the_protocol_does_not_import_the_package() -> None:
    code = (
        "import sys, aguiapp.protocol, aguiapp.protocol.proto as proto;"
        "assert 'google.protobuf' not in sys.modules;"
        "assert proto.available() and 'google.protobuf' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=cases.ROOT)
