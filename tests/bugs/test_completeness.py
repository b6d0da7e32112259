"""Every case of the kinds that are built has its test."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path

from tests.bugs.world import CASES, KINDS, TESTED


def test_every_case_has_its_test() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        import_module(f"{__package__}.{path.stem}")
    assert set(CASES) == TESTED


def test_no_case_was_lost() -> None:
    assert Counter(case["kind"] for case in CASES.values()) == KINDS
