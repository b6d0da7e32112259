"""A shorter stream with the same fold.

Deltas of one item are joined into the first of them, as long as nothing in between speaks of
that item or of the whole conversation; the state events of a run become one snapshot where the
last of them stood, if a snapshot is among them. Everything else stays where it is, so a legal
stream stays legal. Lost are the times and raw events of what was joined.

The official client's `compactEvents` also gathers each message in one place, which moves
snapshots behind what they replaced and open messages behind the terminal event; this does not.
"""

from collections.abc import Iterable
from typing import Any, Final

from aguiapp.protocol.events import Event
from aguiapp.protocol.fold import Fold
from aguiapp.protocol.transcript import join_halves

_DELTAS: Final = {
    "TEXT_MESSAGE_CONTENT": "messageId",
    "REASONING_MESSAGE_CONTENT": "messageId",
    "TOOL_CALL_ARGS": "toolCallId",
}
# Between two deltas these matter to none but the items they name.
_NAMING: Final = ("messageId", "toolCallId", "parentMessageId", "entityId")
_LOCAL: Final = frozenset(
    {
        "TEXT_MESSAGE_START",
        "TEXT_MESSAGE_END",
        "TOOL_CALL_START",
        "TOOL_CALL_END",
        "TOOL_CALL_RESULT",
        "REASONING_START",
        "REASONING_END",
        "REASONING_MESSAGE_START",
        "REASONING_MESSAGE_END",
        "REASONING_ENCRYPTED_VALUE",
        "ACTIVITY_SNAPSHOT",
        "ACTIVITY_DELTA",
        "STATE_SNAPSHOT",
        "STATE_DELTA",
        "STEP_STARTED",
        "STEP_FINISHED",
        "SUBAGENT_STARTED",
        "SUBAGENT_FINISHED",
        "SUBAGENT_ERROR",
        "RAW",
        "CUSTOM",
    }
)
_RUNS: Final = frozenset({"RUN_STARTED", "RUN_FINISHED", "RUN_ERROR"})


def compact(events: Iterable[Event]) -> list[Event]:
    """Return the stream in fewer events; `fold(compact(s)) == fold(s)` for enforced events."""
    compaction = _Compaction()
    for event in events:
        compaction.feed(event)
    return compaction.close()


class _Compaction:
    def __init__(self) -> None:
        self._kept: list[Event | None] = []
        # Which delta takes more: item -> (event type, place in kept).
        self._growing: dict[str, tuple[str, int]] = {}
        self._joined: dict[int, list[Event]] = {}
        self._states: list[int] = []

    def feed(self, event: Event) -> None:
        kind = event["type"]
        if kind in _DELTAS:
            self._delta(kind, event[_DELTAS[kind]], event)
            return
        if kind in _LOCAL:
            for field in _NAMING:
                if field in event:
                    self._growing.pop(event[field], None)
        else:
            self._growing.clear()
        if kind in _RUNS:
            self._settle_state()
        elif kind in ("STATE_SNAPSHOT", "STATE_DELTA"):
            self._states.append(len(self._kept))
        self._kept.append(event)

    def close(self) -> list[Event]:
        self._settle_state()
        for place, events in self._joined.items():
            self._kept[place] = _joined(events)
        return [event for event in self._kept if event is not None]

    def _delta(self, kind: str, name: str, event: Event) -> None:
        grown, place = self._growing.get(name, ("", -1))
        if grown == kind:
            self._joined.setdefault(place, [self._at(place)]).append(event)
            return
        self._growing[name] = (kind, len(self._kept))
        self._kept.append(event)

    def _at(self, place: int) -> Event:
        event = self._kept[place]
        assert event is not None  # noqa: S101  (only state events are taken out)
        return event

    def _settle_state(self) -> None:
        """Replace a run's state events by the state they end in, once it is known."""
        places, self._states = self._states, []
        events = [self._at(place) for place in places]
        known = [at for at, event in enumerate(events) if event["type"] == "STATE_SNAPSHOT"]
        if not known or len(events) == 1:
            return
        folded = Fold()
        for event in events[known[-1] :]:
            folded.feed(event)
        for place in places[:-1]:
            self._kept[place] = None
        self._kept[places[-1]] = _merged(
            {"type": "STATE_SNAPSHOT", "snapshot": folded.state}, events
        )


def _joined(events: list[Event]) -> Event:
    first = {name: value for name, value in events[0].items() if name != "rawEvent"}
    first["delta"] = join_halves("".join(event["delta"] for event in events))
    return _merged(first, events)


def _merged(event: Event, sources: list[Event]) -> Event:
    """Give an event what its sources agree on or add to: metadata, owner."""
    metadata: dict[str, Any] = {}
    for source in sources:
        metadata.update(source.get("metadata", {}))
    if any("metadata" in source for source in sources):
        event["metadata"] = metadata
    owners = {source["subagentRunId"] for source in sources if "subagentRunId" in source}
    if len(owners) == 1:
        event["subagentRunId"] = owners.pop()
    return event
