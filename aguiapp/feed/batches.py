"""What readers get: committed events with their positions, and the cursors that name them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property

from aguiapp import protocol
from aguiapp.errors import BadCursor, CursorForeign
from aguiapp.models import Thread

TERMINAL_CODES = frozenset(protocol.TYPE_CODES[name] for name in protocol.TERMINAL)


def cursor(epoch: str, position: int) -> str:
    """A place in a thread's history as it goes over the wire."""
    return f"{epoch}-{position}"


def parse_cursor(thread: Thread, text: str) -> int:
    """The position of a cursor of this thread; raises BadCursor or CursorForeign."""
    epoch, _, digits = text.strip().rpartition("-")
    if not epoch or not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise BadCursor(details={"cursor": text[:64]})
    if epoch != thread.epoch:
        raise CursorForeign
    return int(digits)


# An event with one unknown field: every decoder drops it as one from a later version, and those
# who count frames go on counting right.
_UNWRITABLE = bytes.fromhex("00000003c23e00")


def _proto_frame(payload: str) -> bytes:
    try:
        return protocol.encode_proto_frame(json.loads(payload))
    except protocol.ProtocolError:
        return _UNWRITABLE


class Batch:
    """Events that were committed together: `first` and `last` are positions."""

    def __init__(self, epoch: str, first: int, types: Sequence[int], payloads: list[str]) -> None:
        self.epoch = epoch
        self.first = first
        self.last = first + len(payloads) - 1
        self.payloads = payloads
        self.types = types

    @property
    def ends(self) -> bool:
        """Whether the run's terminal event is the last one here."""
        return self.types[-1] in TERMINAL_CODES

    @cached_property
    def sse(self) -> bytes:
        """The SSE frames of the batch, encoded once for all readers."""
        head = f"id: {self.epoch}-"
        frames = [
            f"{head}{position}\ndata: {payload}\n\n"
            for position, payload in enumerate(self.payloads, self.first)
        ]
        return "".join(frames).encode()

    @cached_property
    def proto(self) -> bytes:
        """The protobuf frames of the batch, encoded once for all readers."""
        return b"".join(map(_proto_frame, self.payloads))

    def behind(self, position: int) -> Batch:
        """The part of the batch behind a position."""
        skip = position + 1 - self.first
        if skip <= 0:
            return self
        return Batch(self.epoch, position + 1, self.types[skip:], self.payloads[skip:])
