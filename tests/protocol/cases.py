"""Readers for the conformance vectors, and the pipeline the official client runs."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from aguiapp import protocol

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "data" / "vectors"
SHARED = ROOT.parent / "shared" / "vectors"

Case = dict[str, Any]


def read(path: Path) -> list[Case]:
    """Read JSON Lines by LF only: some strings hold other line ends."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def family(name: str) -> list[Case]:
    return read(VECTORS / f"{name}.jsonl")


def each(
    rows: list[Case], key: Callable[[Case], object]
) -> Callable[[Callable[[Case], None]], Callable[[list[Case]], None]]:
    """Run a test over all cases, one pytest item per group: thousands would cost seconds."""
    groups: dict[str, list[Case]] = {}
    for row in rows:
        groups.setdefault(str(key(row)), []).append(row)

    def decorate(test: Callable[[Case], None]) -> Callable[[list[Case]], None]:
        @pytest.mark.parametrize("group", groups.values(), ids=groups)
        def run(group: list[Case]) -> None:
            for case in group:
                with named(case):
                    test(case)

        run.__name__ = test.__name__
        return run

    return decorate


@contextmanager
def named(case: Case) -> Iterator[None]:
    """Say which case of a group it was."""
    try:
        yield
    except BaseException as problem:
        problem.add_note(f"case {case['id']}: {case.get('note', '')}")
        raise


def same(left: object, right: object) -> bool:
    """Compare by JSON value: 1 is 1.0, true is not 1, key order is nothing."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, int | float) and isinstance(right, int | float):
        return float(left) == float(right)
    return left == right


def slashed(path: str) -> str:
    return "/" + path.replace(".", "/")


class Client:
    """All stages of a consumer with its fold: what a stock client does with a stream."""

    def __init__(self, case: Case | None = None) -> None:
        minted = count(1)
        initial = (case or {}).get("initial", {"messages": [], "state": {}})
        self.upgrader = protocol.Upgrader(lambda: f"$minted-{next(minted)}")
        self.expander = protocol.Expander()
        self.verifier = protocol.Verifier()
        self.fold = protocol.Fold(messages=initial["messages"], state=initial["state"])
        self.runs: list[Case] = []
        self.kinds: list[str] = []

    def feed(self, event: Any) -> None:
        for modern in self.upgrader.feed(event):
            enforced = protocol.enforce(modern)
            self.kinds += [finding.kind for finding in enforced.warnings]
            if enforced.event is None:
                continue
            for explicit in self.expander.feed(enforced.event):
                self.verifier.feed(explicit)
                self.fold.feed(explicit)
                self._terminal(explicit)

    def run(self, events: list[Any]) -> int | None:
        """Feed until an event is refused; return its index."""
        for index, event in enumerate(events):
            try:
                self.feed(event)
            except protocol.ProtocolError:
                return index
        return None

    def _terminal(self, event: Case) -> None:
        if event["type"] == "RUN_ERROR":
            self.runs.append({"outcome": "error"})
        elif event["type"] == "RUN_FINISHED":
            run: Case = {"outcome": event.get("outcome", {}).get("type", "success")}
            if run["outcome"] == "success":
                run["pendingToolCallIds"] = self.fold.snapshot().pending_tool_calls
            self.runs.append(run)
