import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from aguiapp import protocol
from aguiapp.protocol.patch import MAX_OPERATIONS, same
from tests.protocol import cases

EXTRA = cases.read(cases.VECTORS / "patch" / "extra.jsonl")
PUBLIC = cases.SHARED / "patch" / "results.jsonl"
SUITE = (
    [case for case in cases.read(PUBLIC) if case["source"] != "extra"] if PUBLIC.exists() else []
)

# Documents where the official client's state differs from ours.
DEPARTURES = {
    "patch-0332": "fast-json-patch makes a circle of a move into its own child; RFC 6902 forbids it",
    "patch-0382": "JavaScript finds the inherited name hasOwnProperty in every object",
    "patch-0385": "JavaScript finds the inherited name valueOf in every object",
}


def apply(case: cases.Case, *, official: bool = False) -> tuple[bool, Any]:
    before = json.dumps(case["doc"])
    try:
        return True, protocol.patch(case["doc"], case["patch"], official=official)
    except protocol.PatchError:
        return False, None
    finally:
        assert json.dumps(case["doc"]) == before


@cases.each(EXTRA + SUITE, lambda case: case["source"])
def test_patches_follow_the_rfc(case: cases.Case) -> None:
    expected = case["strict_rfc6902"]
    ok, result = apply(case)
    assert ok == expected["ok"]
    if ok:
        assert cases.same(result, expected["result"])


@cases.each(EXTRA + SUITE, lambda case: case["source"])
def test_a_state_delta_ends_in_the_official_state(case: cases.Case) -> None:
    event = {"type": "STATE_DELTA", "delta": case["patch"]}
    try:
        enforced = protocol.enforce(event).event
    except protocol.ProtocolError:
        assert case["client"]["verdict"] == "fatal"
        return
    assert case["client"]["verdict"] != "fatal"
    assert enforced is not None
    fold = protocol.Fold(state=case["doc"])
    fold.feed(enforced)
    assert cases.same(fold.state, case["client"]["state"]) == (case["id"] not in DEPARTURES)


@pytest.mark.parametrize(
    "operation",
    [
        None,
        5,
        {},
        {"op": 5, "path": ""},
        {"op": "add", "path": "/b"},
        {"op": "add", "path": 5, "value": 1},
        {"op": "add", "path": "b", "value": 1},
        {"op": "merge", "path": "/b", "value": 1},
        {"op": "move", "path": "/b"},
        {"op": "copy", "path": "/b", "from": None},
        {"op": "add", "path": "/a~2b", "value": 1},
        {"op": "add", "path": "/a~", "value": 1},
        {"op": "add", "path": "/__proto__/x", "value": 1},
        {"op": "remove", "path": "/l/" + "9" * 5000},
    ],
)
def test_malformed_operations_raise_the_one_error(operation: Any) -> None:
    with pytest.raises(protocol.PatchError):
        protocol.patch({"a": 1, "l": [1]}, [operation])


@pytest.mark.parametrize("patch", [None, {}, "[]", 5])
def test_a_patch_is_an_array(patch: Any) -> None:
    with pytest.raises(protocol.PatchError):
        protocol.patch({}, patch)


def test_true_and_one_are_different_and_one_and_one_point_zero_are_not() -> None:
    assert not same(True, 1)
    assert not same([0], [False])
    assert same({"a": [1]}, {"a": [1.0]})
    assert not same({"a": 1}, {"b": 1})
    with pytest.raises(protocol.PatchError):
        protocol.patch({"paid": 1}, [{"op": "test", "path": "/paid", "value": True}])


def test_too_many_operations_and_too_much_copying_are_limits() -> None:
    many = [{"op": "add", "path": "/k", "value": 1}] * (MAX_OPERATIONS + 1)
    with pytest.raises(protocol.PatchLimit):
        protocol.patch({}, many)
    with pytest.raises(protocol.PatchLimit):
        protocol.patch({"a": [0]}, [{"op": "copy", "from": "/a", "path": "/a/-"}] * 40)


def test_what_the_patch_does_not_touch_is_shared_not_copied() -> None:
    document = {"big": {"x": [1]}, "n": 1}
    patched = protocol.patch(document, [{"op": "replace", "path": "/n", "value": 2}])
    assert patched["big"] is document["big"]
    assert patched is not document


def test_two_copies_of_one_value_grow_apart() -> None:
    patched = protocol.patch(
        {"a": {"l": []}},
        [
            {"op": "add", "path": "/a/l/-", "value": 1},
            {"op": "copy", "from": "/a", "path": "/b"},
            {"op": "add", "path": "/b/l/-", "value": 2},
            {"op": "add", "path": "/a/l/-", "value": 3},
        ],
    )
    assert patched == {"a": {"l": [1, 3]}, "b": {"l": [1, 2]}}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "0"]), inner, max_size=3)
    ),
    max_leaves=6,
)
PATHS = st.lists(st.sampled_from(["a", "b", "0", "1", "-"]), max_size=3).map(
    lambda tokens: "".join(f"/{token}" for token in tokens)
)
OPERATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "op": st.sampled_from(["add", "remove", "replace", "move", "copy", "test"]),
            "path": PATHS,
            "from": PATHS,
            "value": JSON,
        }
    ),
    max_size=4,
)


@settings(max_examples=120, deadline=None)
@given(JSON, OPERATIONS)
def test_a_patch_applies_whole_or_not_and_never_touches_its_arguments(
    document: Any, operations: list[Any]
) -> None:
    before = copy.deepcopy((document, operations))
    try:
        result = protocol.patch(document, operations)
    except protocol.PatchError:
        pass
    else:
        stepwise = copy.deepcopy(document)
        for operation in operations:
            stepwise = copy.deepcopy(protocol.patch(stepwise, [operation]))
        assert same(stepwise, result)
    assert (document, operations) == before


@pytest.mark.parametrize("value", [[1], [1, 2, 3], {"0": 1}, [2, 1], [1, True], [1, 2.5]])
def test_a_test_compares_arrays_whole(value: object) -> None:
    document = {"l": [1, 2]}
    with pytest.raises(protocol.PatchError, match="test failed"):
        protocol.patch(document, [{"op": "test", "path": "/l", "value": value}])
    same = [{"op": "test", "path": "/l", "value": [1.0, 2]}]
    assert protocol.patch(document, same) == document
