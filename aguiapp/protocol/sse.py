"""Server-sent events: one event per frame, both ways.

The decoder is the official client's, which departs from the WHATWG algorithm twice: the rest
of a stream that ends without a blank line is still read, and only `data` matters. It goes
further than that client in taking CRLF and CR as line ends.
"""

import codecs
from typing import Any, Final, Literal

from aguiapp.protocol.events import Event, ProtocolError, text_of
from aguiapp.protocol.jsontext import MAX_DEPTH, dumps, loads

# The official client gives up at the same size.
MAX_FRAME: Final = 10 * 1024 * 1024


def encode_sse(event: Event | str, cursor: str | None = None) -> bytes:
    """Frame an event, or its JSON text, with the cursor that resumes after it."""
    text = event if isinstance(event, str) else dumps(event)
    if "\n" in text or "\r" in text:
        raise ProtocolError("sse", "a frame holds one line of JSON")
    if cursor is None:
        return f"data: {text}\n\n".encode()
    if not cursor.isprintable():
        raise ProtocolError("sse", f"not a cursor: {text_of(cursor)}")
    return f"id: {cursor}\ndata: {text}\n\n".encode()


class FrameError(ProtocolError):
    """A frame that cannot be read; `events` are the good ones before it in the same bytes."""

    code = "bad_frame"

    def __init__(self, rule: str, message: str, events: list[Event]) -> None:
        super().__init__(rule, message)
        self.events = events


class SSEDecoder:
    """Bytes in, however they are cut; events out.

    A bad frame ends the stream, unless `on_bad_frame` is "skip": then it is counted in `skipped`.
    One that is too large always ends it.
    """

    def __init__(
        self,
        *,
        max_depth: int = MAX_DEPTH,
        max_frame: int = MAX_FRAME,
        on_bad_frame: Literal["raise", "skip"] = "raise",
    ) -> None:
        self.skipped = 0
        self._skips = on_bad_frame == "skip"
        # A byte order mark counts only at the very start, and bad bytes become U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._max_depth = max_depth
        self._max_frame = max_frame
        self._line: list[str] = []
        self._data: list[str] = []
        self._size = 0
        self._after_cr = False

    def feed(self, data: bytes) -> list[Event]:
        """Return the events completed by these bytes; raise ProtocolError at a bad frame."""
        return self._text(self._decoder.decode(data))

    def close(self) -> list[Event]:
        """Read what is left as a last frame, as the official client does."""
        events = self._text(self._decoder.decode(b"", final=True))
        if self._line:
            self._field("".join(self._line))
            self._line = []
        try:
            return events + self._dispatch()
        except ProtocolError as problem:
            raise FrameError(problem.rule, problem.message, events) from None

    def _text(self, text: str) -> list[Event]:
        if self._after_cr and text:
            self._after_cr = False
            text = text.removeprefix("\n")
        if "\r" in text:
            self._after_cr = text.endswith("\r")
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        first, *rest = text.split("\n")
        events: list[Event] = []
        try:
            self._grow(first)
            for piece in rest:
                self._end_line(events)
                self._grow(piece)
        except ProtocolError as problem:
            raise FrameError(problem.rule, problem.message, events) from None
        return events

    def _grow(self, piece: str) -> None:
        if piece:
            self._line.append(piece)
            self._size += len(piece)
            if self._size > self._max_frame:
                raise ProtocolError("sse", f"a frame is larger than {self._max_frame} characters")

    def _end_line(self, events: list[Event]) -> None:
        line = "".join(self._line)
        self._line = []
        if line:
            self._field(line)
        else:
            events.extend(self._dispatch())

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))

    def _dispatch(self) -> list[Event]:
        data, self._data, self._size = self._data, [], 0
        if not data:
            return []
        try:
            return [self._event("\n".join(data))]
        except ProtocolError:
            if not self._skips:
                raise
            self.skipped += 1
            return []

    def _event(self, data: str) -> Event:
        # Repeated keys: the last one counts, as for every JavaScript reader of this stream.
        event: Any = loads(data, max_depth=self._max_depth, unique_keys=False)
        if not isinstance(event, dict):
            raise ProtocolError("sse", "the frame is not a JSON object")
        if not isinstance(event.get("type"), str) or not event["type"]:
            raise ProtocolError("sse", "the frame carries no event type")
        return event
