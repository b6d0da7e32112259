"""Every case of our own, and of the folder AGUI_CONFORMANCE_DIR names."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import corpus, expectation, relaxed, runner

RULES: dict[str, str] = json.loads(Path(__file__).with_name("rules.json").read_bytes())
FOLDER = os.environ.get("AGUI_CONFORMANCE_DIR")


def parameters(folder: Path) -> list[Any]:
    """One parameter per case file; what is known to be broken has to fail."""
    found = []
    if not (paths := corpus.files(folder)):
        raise pytest.UsageError(f"no case files below {folder}")
    for path in paths:
        known = relaxed.KNOWN.get(path.stem)
        marks = [pytest.mark.xfail(reason=known, raises=AssertionError)] if known else []
        name = path.relative_to(folder).with_suffix("").as_posix()
        found.append(pytest.param(path, id=name, marks=marks))
    return found


@pytest.mark.parametrize(
    "path", [*parameters(corpus.OWN), *(parameters(Path(FOLDER)) if FOLDER else [])]
)
def test_case(path: Path) -> None:
    case = relaxed.relax(corpus.read(path))
    assert expectation.mismatches(case.expect, runner.run(case)) == {}


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    table: dict[str, list[str]] = {rule: [] for rule in RULES}
    unknown: dict[str, set[str]] = {}
    for case in corpus.own_cases():
        for rule in case.rules:
            table.get(rule, []).append(case.name)
        if not case.rules or not set(case.rules) <= RULES.keys():
            unknown[case.name] = set(case.rules) - RULES.keys()
    assert unknown == {}
    assert [rule for rule, names in table.items() if not names] == []


def test_every_order_rule_of_the_reference_is_in_the_table() -> None:
    assert {f"VERIFY-{number:02}" for number in range(1, 46)} <= RULES.keys()


def test_own_names_are_unique_and_folders_are_areas() -> None:
    paths = corpus.files(corpus.OWN)
    assert [name for name, n in Counter(path.stem for path in paths).items() if n > 1] == []
    for path in paths:
        assert json.loads(path.read_bytes())["area"] == path.parent.name, path


def test_whatever_is_known_to_be_broken_or_relaxed_is_one_of_ours_or_of_upstream() -> None:
    own = {path.stem for path in corpus.files(corpus.OWN)}
    upstream = {name for name in relaxed.KNOWN if name.startswith("producer-declares-")}
    assert relaxed.KNOWN.keys() - upstream <= own
    assert not own & (relaxed.MAY.keys() | relaxed.GAPS.keys() | upstream)
