"""The messages of ag_ui.proto as classes of the protobuf package, loaded at the first use.

The compiled descriptor is loaded instead of generated Python, which refuses to run with
another version of the package than it was generated for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aguiapp.protocol.events import ProtocolError
from aguiapp.protocol.proto.wire import LENGTH, varint

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import (
        DescriptorProto,
        FieldDescriptorProto,
        FileDescriptorProto,
    )

# Written and read by code of their own: their JSON form is another.
_BY_HAND: Final = {
    "BaseEvent": {"type"},
    "Message": {"content", "content_parts", "activity_content"},
    "ToolCallResultEvent": {"content", "content_parts"},
    "RunFinishedEvent": {"outcome", "interrupts", "pending_tool_call_ids"},
    "SubagentFinishedEvent": {"outcome", "interrupt_ids"},
}
_TYPES_BY_HAND: Final = {"BaseEvent", "InputContentSource"}
# Arrays that may be missing in JSON: empty and missing are the same on this wire.
_ABSENT_WHEN_EMPTY: Final = {"toolCalls", "usage"}


# What a member holds in JSON, in the words of an error.
TEXT: Final = "a string"
INTEGER: Final = "an integer"
FLAG: Final = "true or false"
OPERATION: Final = "the name of a patch operation"
VALUE: Final = "JSON"
STRUCT: Final = "an object"
MESSAGE: Final = "an object of known members"


class Member(NamedTuple):
    """A field of a message: where it is on the wire, its key in JSON, and what it holds."""

    number: int
    attr: str
    key: str
    kind: str
    many: bool
    optional: bool
    message: str


@dataclass(frozen=True, slots=True)
class Layout:
    """One message: its class, and its fields by JSON key and by descriptor."""

    name: str
    make: Any
    by_key: dict[str, Member]
    by_descriptor: dict[Any, Member]
    texts: dict[str, str]
    needed: frozenset[str]
    defaults: dict[str, str]
    lists: tuple[str, ...]


class Arm(NamedTuple):
    """One field of the envelope: the event type it carries and the layout of its payload."""

    type: str
    code: int
    tag: bytes
    layout: Layout


class Schema(NamedTuple):
    """All messages, the arms of the envelope, the patch operations, the error of the package."""

    layouts: dict[str, Layout]
    base: tuple[Member, ...]
    by_number: dict[int, Arm]
    by_type: dict[str, Arm]
    codes: dict[str, int]
    operations: dict[int, str]
    error: type[Exception]


@cache
def available() -> bool:
    """Tell whether the protobuf package is installed."""
    try:
        schema()
    except ProtocolError:
        return False
    return True


@cache
def schema() -> Schema:
    """Load the messages; raise ProtocolError when the protobuf package is missing."""
    try:
        from google.protobuf.descriptor_pb2 import FileDescriptorSet
        from google.protobuf.descriptor_pool import DescriptorPool
        from google.protobuf.message import DecodeError
        from google.protobuf.message_factory import GetMessageClass
    except ImportError:
        raise ProtocolError(
            "proto_unavailable",
            "the binary representation needs the protobuf package: install aguiapp[binary]",
        ) from None
    compiled = files(__package__).joinpath("ag_ui.pb").read_bytes()
    (file,) = FileDescriptorSet.FromString(compiled).file
    members = {name: [*map(_member, found.field)] for name, found in _messages(file)}
    codes = {value.name: value.number for value in file.enum_type[0].value}
    operations = {value.number: value.name.lower() for value in file.enum_type[1].value}
    for _, message in _messages(file):
        _substitute(message)
    file.ClearField("dependency")
    # A pool of our own: another library may have loaded a file of this name.
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    layouts = {}
    for name, found in members.items():
        make = GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}"))
        layouts[name] = _layout(name, make, found, operations[0])
    arms = {member.number: _arm(member, codes, layouts) for member in members["Event"]}
    return Schema(
        layouts=layouts,
        base=tuple(layouts["BaseEvent"].by_key.values()),
        by_number=arms,
        by_type={arm.type: arm for arm in arms.values()},
        codes={name: number for number, name in operations.items()},
        operations=operations,
        error=DecodeError,
    )


def _messages(file: "FileDescriptorProto") -> Iterator[tuple[str, "DescriptorProto"]]:
    for message in file.message_type:
        yield message.name, message
        for inner in message.nested_type:
            yield f"{message.name}.{inner.name}", inner


def _member(field: "FieldDescriptorProto") -> Member:
    by_name = {".google.protobuf.Value": VALUE, ".google.protobuf.Struct": STRUCT}
    by_type = {
        field.TYPE_STRING: TEXT,
        field.TYPE_INT64: INTEGER,
        field.TYPE_BOOL: FLAG,
        field.TYPE_ENUM: OPERATION,
        field.TYPE_MESSAGE: MESSAGE,
    }
    return Member(
        number=field.number,
        attr=field.name,
        key=field.json_name,
        kind=by_name.get(field.type_name, by_type[field.type]),
        many=field.label == field.LABEL_REPEATED,
        optional=field.proto3_optional,
        message=field.type_name.removeprefix(".ag_ui."),
    )


def _substitute(message: "DescriptorProto") -> None:
    """Take the types the codec wants instead, as the head of ag_ui.proto explains."""
    for field in message.field:
        if field.type == field.TYPE_STRING:
            field.type = field.TYPE_BYTES
        elif field.type_name.startswith(".google.protobuf."):
            field.type = field.TYPE_BYTES
            field.label = field.LABEL_REPEATED
            field.ClearField("type_name")
        elif field.type_name == ".ag_ui.InputContentSource":
            field.label = field.LABEL_REPEATED
        if not field.proto3_optional:
            field.ClearField("oneof_index")
    if not any(field.proto3_optional for field in message.field):
        message.ClearField("oneof_decl")


def _layout(name: str, make: Any, members: list[Member], first_operation: str) -> Layout:
    by_hand = _BY_HAND.get(name, ())
    members = [
        member
        for member in members
        if member.attr not in by_hand and member.message not in _TYPES_BY_HAND
    ]
    needed = [member for member in members if _is_needed(member)]
    return Layout(
        name=name,
        make=make,
        by_key={member.key: member for member in members},
        # The package makes the descriptors anew at every message unless somebody holds them.
        by_descriptor={
            make.DESCRIPTOR.fields_by_number[member.number]: member for member in members
        },
        texts={member.key: member.attr for member in members if member.kind is TEXT},
        needed=frozenset(member.key for member in needed),
        defaults={member.key: "" if member.kind is TEXT else first_operation for member in needed},
        lists=tuple(
            member.key for member in members if member.many and member.key not in _ABSENT_WHEN_EMPTY
        ),
    )


def _is_needed(member: Member) -> bool:
    if member.many or member.optional:
        return False
    return member.kind in {TEXT, OPERATION}


def _arm(member: Member, codes: dict[str, int], layouts: dict[str, Layout]) -> Arm:
    kind = member.attr.upper()
    tag = varint(member.number << 3 | LENGTH)
    return Arm(kind, codes[kind], tag, layouts[member.message])
