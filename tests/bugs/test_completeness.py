"""Every case of the kinds that are built has its test, or says what it waits for."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from aguiapp import urls
from tests.bugs.world import CASES, KINDS, LATER, TESTED


def test_every_case_has_its_test() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        import_module(f"{__package__}.{path.stem}")
    assert set(CASES) == TESTED | set(LATER)


def test_no_case_was_lost() -> None:
    assert Counter(case["kind"] for case in CASES.values()) == KINDS


@pytest.mark.parametrize("name", LATER)
def test_what_comes_later_is_not_there_yet(name: str) -> None:
    later = LATER[name]
    mounted = {pattern.name: str(pattern.pattern) for pattern in urls.urlpatterns}
    assert later.left
    assert later.route not in mounted, f"{later.route} is mounted: test {name}, {later.left}"
    paths = {"tool-result": "/tools/", "thread-socket": "threads/<uuid:key>/ws"}
    assert not [path for path in mounted.values() if paths[later.route] in path]
