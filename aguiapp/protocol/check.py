"""The whole consumer pipeline as one verdict."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from aguiapp.protocol.chunks import Expander
from aguiapp.protocol.enforce import enforce
from aguiapp.protocol.events import Event, Finding, ProtocolError
from aguiapp.protocol.fold import Fold
from aguiapp.protocol.legacy import Upgrader
from aguiapp.protocol.verify import Verifier


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a stream is legal; if not, which event broke which rule.

    A stream that just stops is legal as far as it goes; the warning VERIFY-40 says so.
    """

    accepts: bool
    error_index: int | None = None
    rule: str | None = None
    message: str | None = None
    warnings: list[Finding] = field(default_factory=list)


def check(events: Iterable[Any]) -> Verdict:
    """Judge a stream as a conforming client would; never raises for what the events hold."""
    pipeline = Pipeline()
    for event in events:
        try:
            pipeline.feed(event)
        except ProtocolError as problem:
            at = pipeline.index
            return Verdict(False, at, problem.rule, problem.message, pipeline.warnings)
    pipeline.close()
    return Verdict(True, warnings=pipeline.warnings)


class Pipeline:
    """Upgrade, enforce, expand, verify, fold: in the order the specification gives."""

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        minted = count(1)
        self.fold = Fold()
        self.warnings: list[Finding] = []
        #: The event fed last, counted from 0.
        self.index = -1
        self._upgrader = Upgrader(new_id or (lambda: f"minted-{next(minted)}"))
        self._expander = Expander()
        self._verifier = Verifier()

    def feed(self, event: Any) -> list[Event]:
        """Return the explicit events one received event stands for; raise ProtocolError."""
        self.index += 1
        explicit: list[Event] = []
        try:
            self._stages(event, explicit)
        except (RecursionError, TypeError, ValueError, KeyError, AttributeError) as problem:
            said = f"the event cannot be read: {type(problem).__name__}"
            raise ProtocolError("malformed", said) from None
        finally:
            for stage in (self._upgrader, self._verifier, self.fold):
                self._note(stage.drain())
        return explicit

    def close(self) -> None:
        """Note what is missing at the end of the stream."""
        if self._verifier.phase not in ("finished", "failed"):
            self.index += 1
            self._note([Finding("VERIFY-40", "the stream ends without a terminal event")])

    def _stages(self, event: Any, explicit: list[Event]) -> None:
        for modern in self._upgrader.feed(event):
            enforced = enforce(modern)
            self._note(enforced.warnings)
            if enforced.event is None:
                continue
            for expanded in self._expander.feed(enforced.event):
                self._verifier.feed(expanded)
                self.fold.feed(expanded)
                explicit.append(expanded)

    def _note(self, found: Sequence[Finding]) -> None:
        if found:
            self.warnings += [finding.at(self.index) for finding in found]
