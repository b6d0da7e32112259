"""The whole consumer pipeline as one verdict."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from aguiapp.protocol.chunks import Expander
from aguiapp.protocol.enforce import enforce
from aguiapp.protocol.events import Finding, ProtocolError
from aguiapp.protocol.fold import Fold
from aguiapp.protocol.legacy import Upgrader
from aguiapp.protocol.verify import Verifier


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a stream is legal; if not, which event broke which rule."""

    accepts: bool
    error_index: int | None = None
    rule: str | None = None
    message: str | None = None
    warnings: list[Finding] = field(default_factory=list)


def check(events: Iterable[Any]) -> Verdict:
    """Judge a stream as a conforming client would; never raises for what the events hold."""
    minted = count(1)
    pipeline = _Pipeline(lambda: f"minted-{next(minted)}")
    warnings: list[Finding] = []
    for index, event in enumerate(events):
        try:
            found = pipeline.feed(event)
        except ProtocolError as problem:
            return Verdict(False, index, problem.rule, problem.message, warnings)
        except (RecursionError, TypeError, ValueError, KeyError, AttributeError) as problem:
            said = f"the event cannot be read: {type(problem).__name__}"
            return Verdict(False, index, "malformed", said, warnings)
        warnings += [finding.at(index) for finding in found]
    return Verdict(True, warnings=warnings)


class _Pipeline:
    """Upgrade, enforce, expand, verify, fold: in the order the specification gives."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._upgrader = Upgrader(new_id)
        self._expander = Expander()
        self._verifier = Verifier()
        self._fold = Fold()

    def feed(self, event: Any) -> list[Finding]:
        warnings: list[Finding] = []
        for modern in self._upgrader.feed(event):
            enforced = enforce(modern)
            warnings += enforced.warnings
            if enforced.event is None:
                continue
            for explicit in self._expander.feed(enforced.event):
                self._verifier.feed(explicit)
                self._fold.feed(explicit)
        return [
            *self._upgrader.drain(),
            *warnings,
            *self._verifier.drain(),
            *self._fold.drain(),
        ]
