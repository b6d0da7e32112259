"""The outermost message: one arm of many, read on the bytes because the package is lenient.

It would take the last of two arms, and could not tell an event of a later version from noise.
"""

from collections.abc import Iterable

from aguiapp.protocol.proto.descriptor import Arm
from aguiapp.protocol.proto.wire import GROUP, LENGTH, Field, bad, fields


def open_envelope(data: bytes, arms: dict[int, Arm]) -> tuple[Arm, bytes] | None:
    """Find the one known arm of the envelope; None when there are only unknown ones."""
    payloads = []
    later = []
    number = 0
    broken = False
    for field in fields(data, 0, len(data)):
        tag, start, stop = field
        wire = tag & 7
        if wire == GROUP:
            broken = broken or tag >> 3 in arms
        elif tag >> 3 in arms:
            if number and tag >> 3 != number:
                raise bad("the envelope carries two kinds of event")
            number = tag >> 3
            if wire == LENGTH:
                payloads.append(data[start:stop])
        elif wire == LENGTH:
            later.append(field)
    if payloads:
        # A message that comes in pieces is the pieces joined.
        return arms[number], payloads[0] if len(payloads) == 1 else b"".join(payloads)
    if broken or number or not later:
        raise bad("the envelope carries no event")
    _walk(data, later)
    return None


def _walk(data: bytes, spans: Iterable[Field]) -> None:
    """Make sure that what is not known could at least be a message."""
    for _, start, stop in spans:
        for _ in fields(data, start, stop):
            pass
