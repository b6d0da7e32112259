"""Our expectations, held against the unmodified official client."""

import json
import subprocess
from collections.abc import Iterable
from typing import Any

import pytest

from tests import services
from tests.conformance import corpus, expectation, runner

pytestmark = pytest.mark.node
AREAS = sorted(path.name for path in corpus.OWN.iterdir())
# Our rule ids and wordings are ours; of warnings counts whether there were any.
OURS = {"rule", "errorContains", "warnings"}


@pytest.fixture(scope="module")
def official() -> dict[str, Any]:
    """What the official client saw in every case: one process for all."""
    node = services.node() or pytest.skip("no Node with @ag-ui/client")
    given = [
        {"name": case.name, "stream": case.stream, "input": case.input, **case.first_run()}
        for case in corpus.own_cases()
    ]
    done = subprocess.run(
        [node, str(corpus.OWN.with_name("official.mjs"))],
        cwd=services.JS,
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def differences(case: corpus.Case, seen: runner.Seen) -> dict[str, str]:
    """Return what the client saw otherwise, of all that does not hang on our own words."""
    expect = {key: value for key, value in case.expect.items() if key not in OURS}
    found = expectation.mismatches(expect, seen)
    if case.expect.get("warnings") and not seen.warnings:
        found["warnings"] = "wanted some, saw none"
    return found


def stated(case: corpus.Case) -> Iterable[str]:
    return case.official["in"] if case.official else ()


@pytest.mark.parametrize("area", AREAS)
def test_the_official_client_agrees_or_differs_as_stated(
    area: str, official: dict[str, Any]
) -> None:
    cases = [corpus.read(path) for path in corpus.files(corpus.OWN / area)]
    wrong = {}
    for case in cases:
        found = differences(case, runner.Seen(**official[case.name]))
        if found.keys() != set(stated(case)):
            wrong[case.name] = found or f"no longer differs in {stated(case)}"
    assert cases
    assert wrong == {}
