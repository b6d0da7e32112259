"""The wire format below the messages: varints, text, and the fields of a message one by one."""

from collections.abc import Iterator
from typing import Final

from aguiapp.protocol.sse import FrameError

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
GROUP: Final = 3
GROUP_END: Final = 4
FIXED32: Final = 5

_FIXED: Final = {FIXED64: 8, FIXED32: 4}
_MAX_GROUPS: Final = 100
_ONE_BYTE: Final = [bytes((number,)) for number in range(0x80)]


# A field as it lies in the bytes: its tag, and where its value starts and stops.
Field = tuple[int, int, int]


def bad(message: str) -> FrameError:
    """Make the error for bytes that cannot be read."""
    return FrameError("proto", message, [])


def varint(number: int) -> bytes:
    """Write a non-negative number."""
    if number < 0x80:
        return _ONE_BYTE[number]
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number (64 bits at most) and the position after it."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
        shift += 7
        if shift > 63:
            break
    raise bad("a number is cut off or longer than 64 bits")


def utf8(text: str) -> bytes:
    """Encode as JavaScript does: halves of a pair are joined, a lone one becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        units = text.encode("utf-16-le", "surrogatepass")
        return units.decode("utf-16-le", "replace").encode()


def fields(data: bytes, at: int, end: int) -> Iterator[Field]:
    """Walk one message, groups as a whole; raise FrameError where it is not well-formed.

    A tag is `number << 3 | wire type`.
    """
    while at < end:
        tag = data[at]
        # Nearly every tag and every length is one byte.
        if 8 <= tag < 0x80:
            at += 1
        else:
            tag, at = _tag(data, at, end)
        if tag & 7 == LENGTH and at < end and data[at] < 0x80:
            start = at + 1
            stop = start + data[at]
        else:
            start, stop = _span(data, at, end, tag)
        if stop > end:
            raise bad("a field is longer than its message")
        yield tag, start, stop
        at = stop


def _tag(data: bytes, at: int, end: int) -> tuple[int, int]:
    tag, at = read_varint(data, at, end)
    if tag >> 32 or tag < 8:
        raise bad("a field number is out of range")
    return tag, at


def _span(data: bytes, at: int, end: int, tag: int) -> tuple[int, int]:
    wire = tag & 7
    if wire == LENGTH:
        size, start = read_varint(data, at, end)
        return start, start + size
    if wire == VARINT:
        return at, read_varint(data, at, end)[1]
    if wire == GROUP:
        return at, _group(data, at, end, tag)
    if wire in _FIXED:
        return at, at + _FIXED[wire]
    raise bad("a group ends that was not opened" if wire == GROUP_END else "unknown wire type")


def _group(data: bytes, at: int, end: int, tag: int) -> int:
    opened = [tag]
    while opened:
        tag, at = _tag(data, at, end)
        if tag & 7 == GROUP:
            opened.append(tag)
        elif tag & 7 == GROUP_END:
            if opened.pop() != tag - GROUP_END + GROUP:
                raise bad("a group ends that was not opened")
        else:
            at = _span(data, at, end, tag)[1]
        if len(opened) > _MAX_GROUPS:
            raise bad(f"groups nested deeper than {_MAX_GROUPS}")
    return at
