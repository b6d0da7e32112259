"""Any JSON value as google.protobuf.Value and Struct, both ways.

`room` is how many levels of objects and arrays may still open. Written by hand because the
package stops at 100 messages, which are 33 objects, and forgets the order of keys.
"""

import math
import re
import struct
from collections.abc import Iterable
from typing import Any, Final

from aguiapp.protocol.events import ProtocolError, text_of
from aguiapp.protocol.proto.wire import bad, fields, read_varint, utf8, varint

UNSET: Final = object()

# The tags of a Value: what kind it is of.
_NULL: Final = 0x08
_NUMBER: Final = 0x11
_TEXT: Final = 0x1A
_BOOL: Final = 0x20
_STRUCT: Final = 0x2A
_LIST: Final = 0x32
# The tags of an entry, and that of the entries themselves and of the elements of a list.
_KEY: Final = 0x0A
_MEMBER: Final = 0x12
_ITEM: Final = 0x0A

_DOUBLE: Final = struct.Struct("<d")
_SAFE: Final = 2**53
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_INDEX: Final = 2**32 - 2


# -- writing ------------------------------------------------------------------------------------


def write_value(value: Any, room: int) -> bytes:
    """Return the bytes of a Value; raise ProtocolError for what is not JSON or too deep."""
    if isinstance(value, str):
        text = utf8(value)
        return b"\x1a" + varint(len(text)) + text
    if value is None:
        return b"\x08\x00"
    if isinstance(value, bool):
        return b"\x20\x01" if value else b"\x20\x00"
    if isinstance(value, int | float):
        return b"\x11" + _DOUBLE.pack(_finite(value))
    if isinstance(value, dict):
        body = write_struct(value, room)
        return b"\x2a" + varint(len(body)) + body
    if isinstance(value, list | tuple):
        body = _write_list(value, room)
        return b"\x32" + varint(len(body)) + body
    raise ProtocolError("proto", f"{type(value).__name__} is not a JSON type")


def write_struct(value: dict[str, Any], room: int) -> bytes:
    """Return the bytes of a Struct."""
    _enter(room)
    pieces: list[bytes] = []
    for key in _script_order(value):
        name = utf8(key)
        member = write_value(value[key], room - 1)
        entry = b"\x12" + varint(len(member)) + member
        if name:
            entry = b"\x0a" + varint(len(name)) + name + entry
        pieces += (b"\x0a", varint(len(entry)), entry)
    return b"".join(pieces)


def _write_list(value: Iterable[Any], room: int) -> bytes:
    _enter(room)
    pieces: list[bytes] = []
    for element in value:
        member = write_value(element, room - 1)
        pieces += (b"\x0a", varint(len(member)), member)
    return b"".join(pieces)


def _enter(room: int) -> None:
    if room <= 0:
        raise ProtocolError("proto", "nested too deep, or in a circle")


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ProtocolError("proto", f"{text_of(value)} is beyond the range of a number")
    return number


def _script_order(value: dict[str, Any]) -> Iterable[str]:
    """JavaScript's order of keys: array indexes ascending, then the others as they came."""
    indexes = []
    for key in value:
        if not isinstance(key, str):
            raise ProtocolError("proto", f"a key must be a string, not {text_of(key)}")
        if key[:1].isdecimal() and _INDEX.fullmatch(key) and int(key) <= _MAX_INDEX:
            indexes.append(key)
    if not indexes:
        return value
    first = dict.fromkeys(sorted(indexes, key=int))
    return [*first, *(key for key in value if key not in first)]


# -- reading ------------------------------------------------------------------------------------


def read_value(data: bytes, at: int, end: int, room: int) -> Any:
    """Return what a Value says, UNSET when it says nothing; the last kind in it counts."""
    value: Any = UNSET
    active = 0
    for tag, start, stop in fields(data, at, end):
        if tag == _TEXT:
            value = data[start:stop].decode("utf-8", "replace")
        elif tag == _NUMBER:
            value = _number(_DOUBLE.unpack_from(data, start)[0])
        elif tag == _STRUCT:
            value = read_struct(data, start, stop, room, value if active == _STRUCT else None)
        elif tag == _LIST:
            value = _read_list(data, start, stop, room, value if active == _LIST else [])
        elif tag == _BOOL:
            value = read_varint(data, start, stop)[0] != 0
        elif tag == _NULL:
            value = None
        else:
            continue
        active = tag
    return value


def read_struct(
    data: bytes, at: int, end: int, room: int, into: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a Struct holds; a key that comes twice has its last value."""
    _room(room)
    found = {} if into is None else into
    for tag, start, stop in fields(data, at, end):
        if tag == _ITEM:
            key, value = _read_entry(data, start, stop, room - 1)
            if value is not UNSET:
                found[key] = value
    return found


def _read_entry(data: bytes, at: int, end: int, room: int) -> tuple[str, Any]:
    key = ""
    spans = []
    for tag, start, stop in fields(data, at, end):
        if tag == _KEY:
            key = data[start:stop].decode("utf-8", "replace")
        elif tag == _MEMBER:
            spans.append((start, stop))
    if len(spans) == 1:
        return key, read_value(data, *spans[0], room)
    # A message that comes in pieces is the pieces joined.
    joined = b"".join([data[start:stop] for start, stop in spans])
    return key, read_value(joined, 0, len(joined), room)


def _read_list(data: bytes, at: int, end: int, room: int, into: list[Any]) -> list[Any]:
    _room(room)
    for tag, start, stop in fields(data, at, end):
        if tag == _ITEM:
            value = read_value(data, start, stop, room - 1)
            into.append(None if value is UNSET else value)
    return into


def _number(value: float) -> float:
    if not math.isfinite(value):
        raise bad(f"{text_of(value)} is not JSON")
    # 5 and 5.0 are one number in JSON; the sign of -0.0 is kept.
    if value.is_integer() and -_SAFE < value < _SAFE and (value or math.copysign(1, value) > 0):
        return int(value)
    return value


def _room(room: int) -> None:
    if room <= 0:
        raise bad("nested too deep")
