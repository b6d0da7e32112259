"""The stream of the HTTP binding: every message behind its length, four bytes big-endian."""

from typing import Final, Literal

from aguiapp.protocol.events import Event, Finding, ProtocolError
from aguiapp.protocol.proto.decode import decode_proto
from aguiapp.protocol.proto.encode import encode_proto
from aguiapp.protocol.proto.wire import bad
from aguiapp.protocol.sse import MAX_FRAME, FrameError

_PREFIX: Final = 4


def encode_proto_frame(event: Event, findings: list[Finding] | None = None) -> bytes:
    """Return one frame of the stream; as encode_proto() otherwise."""
    message = encode_proto(event, findings)
    return len(message).to_bytes(_PREFIX, "big") + message


class ProtoDecoder:
    """Bytes in, however they are cut; events out, and findings about what was dropped.

    With `on_bad_frame="skip"` a frame that cannot be read is counted in `skipped` and left
    out. A frame too large or cut off is never skipped: nothing after it can be found.
    """

    def __init__(
        self, *, on_bad_frame: Literal["raise", "skip"] = "raise", max_frame: int = MAX_FRAME
    ) -> None:
        self.skipped = 0
        self.warnings: list[Finding] = []
        self._skip = on_bad_frame == "skip"
        self._max_frame = max_frame
        self._buffer = bytearray()

    def drain(self) -> list[Finding]:
        """Hand over the findings and forget them."""
        found, self.warnings = self.warnings, []
        return found

    def feed(self, data: bytes) -> list[Event]:
        """Return the events completed by these bytes; raise FrameError at a bad frame."""
        self._buffer += data
        events: list[Event] = []
        start = 0
        try:
            while (stop := self._end(start)) is not None:
                frame = bytes(self._buffer[start + _PREFIX : stop])
                start = stop
                self._frame(frame, events)
        except ProtocolError as problem:
            raise FrameError(problem.rule, problem.message, events) from None
        finally:
            del self._buffer[:start]
        return events

    def close(self) -> list[Event]:
        """Return nothing more; raise FrameError when the body ended inside a frame."""
        if self._buffer:
            raise bad("the body ends inside a frame")
        return []

    def _end(self, start: int) -> int | None:
        """Tell where the frame ends that starts here, None while it is not complete."""
        held = len(self._buffer) - start
        if held < _PREFIX:
            return None
        size = _PREFIX + int.from_bytes(self._buffer[start : start + _PREFIX], "big")
        if size > self._max_frame:
            raise bad(f"a frame is larger than {self._max_frame} bytes")
        return None if held < size else start + size

    def _frame(self, frame: bytes, events: list[Event]) -> None:
        try:
            event = decode_proto(frame, self.warnings)
        except FrameError:
            if not self._skip:
                raise
            self.skipped += 1
            return
        if event is not None:
            events.append(event)
