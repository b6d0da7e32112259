"""Which patches mean the same to every engine: held against what fast-json-patch did."""

from __future__ import annotations

from typing import Any

import pytest

from aguiapp import protocol
from aguiapp.protocol.portable import attempt
from tests.protocol import cases

ROWS = cases.read(cases.VECTORS / "patch" / "extra.jsonl")
PUBLIC = cases.SHARED / "patch" / "results.jsonl"
if PUBLIC.exists():
    ROWS += [row for row in cases.read(PUBLIC) if row["source"] != "extra"]

DOCUMENT = {"a": {"x": 1}, "l": [1, 2], "s": "str", "n": 5, "z": None}


def well_formed(row: cases.Case) -> bool:
    event = {"type": "STATE_DELTA", "delta": row["patch"]}
    try:
        return protocol.enforce(event).event == event
    except protocol.ProtocolError:
        return False


@cases.each(ROWS, lambda row: row["source"])
def test_what_is_portable_did_the_same_there(row: cases.Case) -> None:
    if not well_formed(row):
        return  # enforcement does not let it get this far
    try:
        outcome = attempt(row["doc"], row["patch"])
    except protocol.PatchLimit:
        return
    theirs = row["fast_json_patch"]
    if outcome.portable:
        assert (outcome.problem is None) == theirs["ok"]
        assert not theirs["ok"] or cases.same(outcome.document, theirs["result"])
    if outcome.problem is None:
        assert cases.same(outcome.document, protocol.patch(row["doc"], row["patch"]))


def test_most_patches_are_portable() -> None:
    ordinary = [row for row in ROWS if not row.get("fast_json_patch_differs_from_rfc")]
    judged = [row for row in ordinary if well_formed(row)]
    judged = [row for row in judged if len(row["patch"]) < 100]
    portable = [row for row in judged if attempt(row["doc"], row["patch"]).portable]
    assert len(portable) > 0.8 * len(judged)


def op(name: str, path: str, **more: Any) -> dict[str, Any]:
    return {"op": name, "path": path, **more}


@pytest.mark.parametrize(
    ("operations", "portable", "applies"),
    [
        ([op("add", "/k", value=1)], True, True),
        ([op("add", "/l/-", value=1)], True, True),
        ([op("add", "/l/2", value=1)], True, True),
        ([op("add", "/l/3", value=1)], True, False),
        ([op("add", "/l/x", value=1)], True, False),
        ([op("add", "/l/01", value=1)], False, False),
        ([op("add", "/l/", value=1)], False, False),
        ([op("add", "/s/0", value=1)], True, False),
        ([op("add", "/z/0", value=1)], True, False),
        ([op("add", "/toString", value=1)], False, True),
        ([op("add", "/__proto__", value=1)], False, False),
        ([op("add", "", value=1)], True, True),
        ([op("add", "", value=[]), op("add", "/-", value=1)], True, True),
        ([op("replace", "", value=5), op("add", "/k", value=1)], False, False),
        ([op("test", "", value=DOCUMENT), op("remove", "/n")], True, True),
        ([op("remove", "")], False, True),
        ([op("remove", "/l/0")], True, True),
        ([op("remove", "/l/2")], True, False),
        ([op("remove", "/missing/x")], True, False),
        ([op("replace", "/a/valueOf", value=1)], False, False),
        ([op("move", "/l/1", **{"from": "/l/0"})], True, True),
        ([op("move", "/l/2", **{"from": "/l/0"})], False, False),
        ([op("move", "/l/-", **{"from": "/a"})], True, True),
        ([op("move", "/l/x", **{"from": "/a"})], False, False),
        ([op("move", "/a/x/y", **{"from": "/a"})], False, False),
        ([op("move", "", **{"from": "/a"})], True, True),
        ([op("move", "", **{"from": "/n"}), op("add", "/k", value=1)], False, False),
        ([op("copy", "", **{"from": "/missing"})], False, False),
        ([op("copy", "/k", **{"from": "/missing"})], True, False),
        ([op("copy", "/k", **{"from": "/l/length"})], False, False),
        ([op("copy", "/k", **{"from": "/s/0"})], False, False),
        ([op("copy", "/a/y", **{"from": "/l/1"})], True, True),
    ],
    ids=str,
)
def test_what_engines_agree_on(operations: Any, portable: bool, applies: bool) -> None:
    outcome = attempt(DOCUMENT, operations)
    assert (outcome.portable, outcome.problem is None) == (portable, applies)


def test_limits_are_limits_here_as_well() -> None:
    with pytest.raises(protocol.PatchLimit, match="operations"):
        attempt({}, [op("add", "/k", value=1)] * 10_001)
    with pytest.raises(protocol.PatchLimit, match="copies"):
        attempt({"s": "x" * 1_000_000}, [op("copy", f"/{n}", **{"from": "/s"}) for n in range(99)])
