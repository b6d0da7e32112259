"""What agents patch: the state and the activities, within their limits and the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aguiapp import conf, protocol
from aguiapp.engine.limits import LimitExceeded
from aguiapp.protocol import Event
from aguiapp.protocol.portable import attempt

Find = Callable[[str, str], None]
_STATE = ""  # no activity of an own agent has an empty id


class Documents:
    """Judges the deltas of one run before they are recorded.

    A document is measured only when what was added could pass a limit: by the sum of the
    patches, by a `copy` or `move`, which add more than they weigh, or by nesting deeply.
    """

    def __init__(self, folder: protocol.Fold, find: Find) -> None:
        self._fold = folder
        self._find = find
        self._limits = conf.get()
        #: At least the characters of each document that was measured.
        self._bounds: dict[str, int] = {}

    def stated(self, event: Event, size: int) -> None:
        """A snapshot of that many bytes replaces a document; raises LimitExceeded."""
        if size > self._limits.STATE_BYTES:
            raise self._too_large()
        self._bounds[event.get("messageId", _STATE)] = size

    def restated(self) -> None:
        """A snapshot of the messages brought activities that nobody measured."""
        self._bounds = {key: size for key, size in self._bounds.items() if key == _STATE}

    def settled(self, event: Event) -> Event:
        """What is recorded for a delta: itself, or a snapshot that stands for it.

        A patch that other engines read otherwise is replaced by the document it makes by
        RFC 6902, which is the old one when it fails. Raises LimitExceeded when the document would
        grow too large or too deep, ProtocolError when an activity would be no object.
        """
        operations = event.get("delta", event.get("patch"))
        key, document = self._document(event)
        if key is None or operations is None:
            return event  # nothing is patched, which the fold notes
        try:
            outcome = attempt(document, operations)
        except protocol.PatchLimit:
            raise LimitExceeded("state_too_large", "One patch does more than is allowed.") from None
        if outcome.problem is None:
            if key != _STATE and not isinstance(outcome.document, dict):
                said = f"the content of activity {key!r} would be no object"
                raise protocol.ProtocolError("activity_not_object", said)
            self._grow(key, document, operations, outcome.document)
        if outcome.portable:
            return event
        if outcome.problem is None:
            self._find("patch_replaced", "a snapshot stands for a patch that clients differ on")
            return self._snapshot(event, outcome.document)
        kind = "state_patch_failed" if key == _STATE else "activity_patch_failed"
        self._find(kind, f"a snapshot stands for it, as clients differ: {outcome.problem}")
        return self._snapshot(event, document)

    def _document(self, event: Event) -> tuple[str | None, Any]:
        if event["type"] == "STATE_DELTA":
            return _STATE, self._fold.state
        held = self._fold.activity(event["messageId"])
        return (None, None) if held is None else (held["id"], held["content"])

    def _snapshot(self, event: Event, document: Any) -> Event:
        kept = {k: v for k, v in event.items() if k in ("timestamp", "metadata", "rawEvent")}
        if event["type"] == "STATE_DELTA":
            owner = event.get("subagentRunId")
            snapshot = {**kept, "type": "STATE_SNAPSHOT", "snapshot": document}
        else:
            name = event["messageId"]
            held = self._fold.activity(name) or {}
            owner = held.get("subagentRunId")
            snapshot = {
                **kept,
                "type": "ACTIVITY_SNAPSHOT",
                "messageId": name,
                "activityType": event["activityType"],
                "content": document,
            }
        return snapshot if owner is None else {**snapshot, "subagentRunId": owner}

    # -- limits ----------------------------------------------------------------

    def _grow(self, key: str, before: Any, operations: Any, after: Any) -> None:
        limits = self._limits
        if key not in self._bounds:
            self._bounds[key] = len(protocol.dumps(before))
        added = protocol.dumps(operations, max_depth=limits.JSON_DEPTH - 1)
        bound = self._bounds[key] + len(added)
        if bound > limits.STATE_BYTES or _multiplies(operations, added, limits.JSON_DEPTH):
            bound = self._measured(after)
        self._bounds[key] = bound

    def _measured(self, document: Any) -> int:
        """The characters of a document as JSON, judged before they are written down."""
        limits = self._limits
        if _outweighs(document, limits.STATE_BYTES):
            raise self._too_large()
        try:
            size = len(protocol.dumps(document, max_depth=limits.JSON_DEPTH - 1))
        except protocol.JSONTextError as error:
            raise LimitExceeded("state_too_large", f"It cannot be kept: {error.message}.") from None
        if size > limits.STATE_BYTES:
            raise self._too_large()
        return size

    def _too_large(self) -> LimitExceeded:
        most = self._limits.STATE_BYTES
        return LimitExceeded("state_too_large", f"The state grew beyond {most} bytes.")


def _multiplies(operations: Any, text: str, depth: int) -> bool:
    """Whether a patch can add more characters or levels than it has itself."""
    levels = text.count("{") + text.count("[")
    return any(
        op["op"] in ("copy", "move") or op["path"].count("/") + levels > depth - 1
        for op in operations
    )


def _outweighs(document: Any, most: int) -> bool:
    """Whether the texts of a document alone have more characters; looks no further than that."""
    pending, weight = [document], 0
    while pending and weight <= most:
        item = pending.pop()
        if isinstance(item, dict):
            weight += sum(map(len, item))
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        weight += len(item) if isinstance(item, str) else 1
    return weight > most
