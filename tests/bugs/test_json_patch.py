"""JSON Patch: one result in Python and in JavaScript, or the patch is not sent.

What the official client 1.0.0 makes of a patch is in `data/vectors/patch`, and was measured with
it for the tables here.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aguiapp import conf, protocol
from aguiapp.engine.history import state_hash
from aguiapp.engine.limits import LimitExceeded
from aguiapp.engine.recorder import Recorder
from aguiapp.models import RunEvent
from aguiapp.protocol.patch import MAX_OPERATIONS, same
from tests import scripts
from tests.bugs.world import (
    World,
    activity,
    activity_delta,
    case,
    delta,
    recording,
    sibling,
    state,
)
from tests.protocol import cases as vectors
from tests.scripts import Event, run_input

FAILED = "state_patch_failed"


async def states(w: World, reply: scripts.Reply) -> list[Any]:
    """The state behind each event that the agent sent."""
    first = next(at for at, line in enumerate(reply.logged) if "STATE_DELTA" in line)
    ends = range(first + 1, len(reply.logged))
    return [(await w.snapshot(reply, f"?at={at}"))["state"] for at in ends]


async def all_refused(w: World) -> scripts.Reply:
    """A run of which every delta is inapplicable: noted, and the state stays as it came."""
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    deltas = scripts.of(w.input["agent_events"], "STATE_DELTA")
    assert await w.findings(reply) == [FAILED] * len(deltas)
    assert same((await w.snapshot(reply))["state"], w.input["run_input"]["state"])
    return reply


@case("JPA-01")
async def test_true_is_not_one(w: World) -> None:
    await all_refused(w)


@sibling("JPA-01")
@pytest.mark.parametrize(
    ("held", "tested"),
    [
        (True, 1),
        (1, True),
        (False, 0),
        (0, False),
        (None, 0),
        (None, False),
        ("1", 1),
        ([1], [True]),
        ({"a": [{"b": 0}]}, {"a": [{"b": False}]}),
        ({"a": 1}, {"a": 1, "b": None}),
        ([], {}),
        ("", None),
        (2**53, 2**53 + 1),
        ("\u00e9", "e\u0301"),
    ],
)
async def test_a_test_of_another_value_fails(w: World, held: Any, tested: Any) -> None:
    guard = {"op": "test", "path": "/v", "value": tested}
    add = {"op": "add", "path": "/ship", "value": True}
    script = [state({"v": held}), delta(guard, add), activity({"v": held})]
    reply, snapshot = await w.played([*script, activity_delta(guard, add)])
    assert same(snapshot["state"], {"v": held})
    assert same(snapshot["messages"][0]["content"], {"v": held})
    assert await w.findings(reply) == [FAILED, "activity_patch_failed"]


@sibling("JPA-01")
@pytest.mark.parametrize(
    ("held", "tested"),
    [
        (1, 1.0),
        (-0.0, 0),
        (1e22, 10**22),
        ([1, {"a": 2.0}], [1.0, {"a": 2}]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (2**64, 2**64),
        (1e308, 1e308),
        ("\ud83d", "\ud83d"),
    ],
)
async def test_a_test_of_the_same_value_passes(w: World, held: Any, tested: Any) -> None:
    guard = {"op": "test", "path": "/v", "value": tested}
    add = {"op": "add", "path": "/ship", "value": True}
    reply, snapshot = await w.played([state({"v": held}), delta(guard, add)])
    assert same(snapshot["state"], {"v": held, "ship": True})
    assert await w.findings(reply) == []


async def diffed(w: World, before: Any, after: Any) -> tuple[list[Any], Any]:
    """The deltas the helper made of two states, and the state they lead to."""

    async def agent(run: Any) -> None:
        await run.set_state(before)
        await run.update_state(after)

    with scripts.registered("differ", agent):
        reply = await w.run(run_input(), "differ")
    assert reply.types[-1] == "RUN_FINISHED"
    deltas = [event["delta"] for event in scripts.of(reply.events, "STATE_DELTA")]
    return deltas, (await w.snapshot(reply))["state"]


@case("JPA-02")
async def test_the_helper_tells_true_from_one(w: World) -> None:
    wanted = w.input["diff"]["to"]
    ((first, second),), reached = await diffed(w, w.input["diff"]["from"], wanted)
    assert (first["op"], second["op"]) == ("replace", "replace")
    assert same(reached, wanted)


@sibling("JPA-02")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([True, [0]], [1, [False]]),
        ({"a": {"b": [1]}}, {"a": {"b": [True]}}),
        ({"a": None}, {"a": False}),
        ({"a": 1}, [1]),
        ({"a/b": 1, "m~n": [True]}, {"a/b": True, "m~n": [1]}),
        ([1, 2, 3], [3, 1]),
        ({"": 1}, {"": True}),
        ("x", None),
    ],
)
async def test_the_helper_reaches_the_wanted_state(w: World, before: Any, after: Any) -> None:
    deltas, reached = await diffed(w, before, after)
    assert deltas
    assert same(reached, after)


@sibling("JPA-02")
@pytest.mark.parametrize(
    ("before", "after"),
    [({"a": 1}, {"a": 1.0}), ({"a": -0.0}, {"a": 0}), ([1e22], [10**22])],
)
async def test_one_number_in_two_forms_is_no_change(w: World, before: Any, after: Any) -> None:
    assert same((await diffed(w, before, after))[1], after)


@case("JPA-04")
async def test_one_and_one_point_zero_are_one_number(w: World) -> None:
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    reached = (await w.snapshot(reply))["state"]
    assert same(reached, {"v": 1})
    assert state_hash({"v": 1.0}) == state_hash({"v": 1}) == state_hash(reached)
    again = await w.run(run_input(run="r2", state={"v": 1}, script=[]))
    assert not any("STATE_SNAPSHOT" in line for line in again.logged)


@sibling("JPA-04")
@pytest.mark.parametrize("value", [1e22, -0.0, 2**53, 2**64, 5e-324, 0.1, 1e21, -(2**63) - 1])
async def test_numbers_are_what_was_sent_on_every_database(w: World, value: Any) -> None:
    reply, snapshot = await w.played(
        [state({}), delta({"op": "add", "path": "/v", "value": value})]
    )
    assert repr(snapshot["state"]["v"]) == repr(value)
    assert repr(reply.events[2]["delta"][0]["value"]) == repr(value)
    # Posted back as a JavaScript client would say it, it is the thread's state and no edit.
    theirs = {"v": int(value) if float(value).is_integer() else value}
    again = await w.run(run_input(run="r2", state=theirs, script=[]))
    assert not any("STATE_SNAPSHOT" in line for line in again.logged)


@case("JPA-05")
async def test_a_negative_index_is_no_index(w: World) -> None:
    await all_refused(w)


@case("JPA-08")
async def test_an_empty_token_is_a_key_and_no_index(w: World) -> None:
    reply = await w.run()
    assert await w.findings(reply) == [FAILED]
    expected = {"a": [1, 2], "": "e"}
    assert (await w.snapshot(reply))["state"] == expected
    again = await w.run(run_input(run="r2", state=expected, script=[]))
    assert (await w.snapshot(again))["state"] == expected


@case("JPA-09")
async def test_the_end_of_an_array_can_only_be_added_to(w: World) -> None:
    await all_refused(w)


@case("JPA-10")
async def test_nothing_lies_below_a_scalar(w: World) -> None:
    await all_refused(w)


#: (document, operations): inapplicable in Python and in JavaScript alike.
INAPPLICABLE: list[tuple[Any, list[Any]]] = [
    ({"a": [1, 2]}, [{"op": "move", "from": "/a/-1", "path": "/b"}]),
    ({"a": [1, 2]}, [{"op": "add", "path": "/a/3", "value": 9}]),
    ({"a": [1, 2]}, [{"op": "add", "path": "/a/99999999999999999999", "value": 9}]),
    ({"a": [1, 2]}, [{"op": "add", "path": "/a/1e0", "value": 9}]),
    ({"a": [1, 2]}, [{"op": "add", "path": "/a/ 1", "value": 9}]),
    ({"a": [1, 2]}, [{"op": "replace", "path": "/a/01", "value": 9}]),
    ({"a": [1, 2]}, [{"op": "remove", "path": "/a/"}]),
    ({"a": [1, 2]}, [{"op": "move", "from": "/a/-", "path": "/b"}]),
    ({"a": [1, 2]}, [{"op": "add", "path": "/a/length", "value": 0}]),
    ({"a": {"b": 1}}, [{"op": "move", "from": "/a", "path": "/a/b"}]),
    ({"a": {"b": 1}}, [{"op": "move", "from": "/a", "path": "/a/c"}]),
    ({"a": 1}, [{"op": "add", "path": "/__proto__/x", "value": 1}]),
    ({"a": 1}, [{"op": "add", "path": "/__proto__", "value": {}}]),
    ({"a": 1}, [{"op": "add", "path": "/constructor/prototype/x", "value": 1}]),
    ({"a": True}, [{"op": "add", "path": "/a/k", "value": 1}]),
    ({"a": "text"}, [{"op": "remove", "path": "/a/0"}]),
    ({"a": "text"}, [{"op": "copy", "from": "/a/x", "path": "/b"}]),
    ({"a": 1}, [{"op": "remove", "path": "/a/b/c"}]),
]


@sibling("JPA-05")
@pytest.mark.parametrize(("document", "operations"), INAPPLICABLE)
async def test_what_nobody_can_apply_is_noted_and_changes_nothing(
    w: World, document: Any, operations: Any
) -> None:
    script = [state(document), delta(*operations), activity(document)]
    reply, snapshot = await w.played([*script, activity_delta(*operations)])
    assert reply.types[-1] == "RUN_FINISHED"
    assert same(snapshot["state"], document)
    assert same(snapshot["messages"][0]["content"], document)
    assert await w.findings(reply) == [FAILED, "activity_patch_failed"]


@case("JPA-13")
async def test_a_patch_is_applied_whole_or_not(w: World) -> None:
    await all_refused(w)


@case("JPA-14")
async def test_a_malformed_patch_is_never_stored(w: World) -> None:
    for number, event in enumerate(w.input["agent_events"][1:-1]):
        body = run_input(f"t{number}", state={"a": 1}, script=[event])
        reply = await w.run(body)
        stored = [json.loads(line) for line in reply.logged]
        # An operation of an unknown name is taken out, as the official client does.
        assert all(e["delta"] == [] for e in scripts.of(stored, "STATE_DELTA"))
        assert reply.types[-1] == "RUN_ERROR" or await w.findings(reply) == ["strip"]
        assert (await w.snapshot(reply))["state"] == {"a": 1}


@sibling("JPA-14")
async def test_a_patch_that_came_from_elsewhere_breaks_no_fold(w: World) -> None:
    for number, event in enumerate(w.input["agent_events"][1:-1]):
        reply = await w.run(
            run_input(f"t{number}", script=[state({"a": 1}), delta(), *scripts.text("m1", "x")])
        )
        rows = RunEvent.objects.filter(run__key=reply.headers["AGUI-Run"], seq=3)
        assert await rows.aupdate(payload=json.dumps(event)) == 1
        snapshot = await w.snapshot(reply)
        assert snapshot["state"] == {"a": 1}
        assert snapshot["messages"][0]["content"] == "x"
        again = await w.run(run_input(f"t{number}", "r2", script=scripts.text("m2", "y")))
        assert again.types[-1] == "RUN_FINISHED"


MALFORMED = [
    {"op": "copy", "path": "/b", "from": "a"},
    {"op": "move", "path": "/b", "from": None},
    {"op": "remove", "path": None},
    {"op": "test", "path": "/a"},
    {"op": "replace", "path": "/a"},
    {"op": 5, "path": "/a", "value": 1},
    {"op": "Add", "path": "/a", "value": 1},
    "add",
    None,
    [],
]


@sibling("JPA-14")
@pytest.mark.parametrize("operation", MALFORMED, ids=repr)
async def test_no_malformed_operation_is_stored(w: World, operation: Any) -> None:
    for number, event in enumerate((delta(operation), activity_delta(operation))):
        script = [state({"a": 1}), activity({"a": 1}), event]
        reply = await w.run(run_input(f"t{number}", script=script))
        snapshot = await w.snapshot(reply)
        logged = [json.loads(line) for line in reply.logged]
        patches = [e.get("delta", e.get("patch")) for e in logged if e["type"].endswith("_DELTA")]
        assert patches in ([], [[]])
        assert (snapshot["state"], snapshot["messages"][0]["content"]) == ({"a": 1}, {"a": 1})


@case("JPA-16")
async def test_the_root_can_be_any_value(w: World) -> None:
    reply = await w.run()
    assert reply.types[-1] == "RUN_FINISHED"
    found = await states(w, reply)
    assert found == [{"b": 1}, [1], [1, 2], "str", None, {"ok": True}]
    assert await w.findings(reply) == []


@sibling("JPA-16")
@pytest.mark.parametrize("value", [[1], "str", 5, 1.5, True, [], ""])
async def test_a_state_of_any_kind_can_be_posted_and_is_given_to_the_agent(
    w: World, value: Any
) -> None:
    seen = []

    async def agent(run: Any) -> AsyncIterator[Event]:
        seen.extend([run.state, run.input["state"]])
        yield {"type": "CUSTOM", "name": "n", "value": 1}

    with scripts.registered("seeing", agent):
        reply = await w.run(run_input(state=value), "seeing")
        again = await w.run(run_input(run="r2", state=value), "seeing")
    assert same(seen, [value] * 4)
    assert same((await w.snapshot(reply))["state"], value)
    assert scripts.of(again.events, "STATE_SNAPSHOT") == []


# -- size ------------------------------------------------------------------------

COPY = {"op": "copy", "from": "/a", "path": "/a/-"}
MIB = 1024 * 1024
LONG = {"s": "x" * MIB}
MANY = [{"op": "copy", "from": "/s", "path": f"/k{n}"} for n in range(200)]


@contextmanager
def cheap(mib: int = 50) -> Iterator[None]:
    """What happens inside takes no more memory than that at any moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mib * MIB, f"{peak / MIB:.0f} MiB"


def limit(made: Recorder, *script: Event) -> str:
    """The code of the limit at which recording the events ended; "" when all were taken."""
    try:
        for event in script:
            made.feed(event)
    except LimitExceeded as error:
        return error.code
    return ""


def refused(*script: Event) -> None:
    """The last event is refused for its size, in little memory, and leaves no trace."""
    made = recording()
    assert limit(made, *script[:-1]) == ""
    before = protocol.fold([json.loads(row) for _, row in made.drain()])
    with cheap():
        assert limit(made, script[-1]) == "state_too_large"
    assert made.drain() == []
    assert (before.state, before.messages) == (made.fold.state, made.fold.snapshot().messages)


@case("JPA-17")
async def test_a_copy_bomb_is_refused_and_not_sent(w: World) -> None:
    with cheap():
        reply = await w.run()
    assert "STATE_DELTA" not in reply.types
    assert reply.events[-1]["code"] == "state_too_large"
    assert (await w.snapshot(reply))["state"] == {"a": [0]}
    again = await w.run(run_input(run="r2", script=scripts.text("m1", "alive")))
    assert again.types[-1] == "RUN_FINISHED"
    refused(state({"a": [0]}), w.input["agent_events"][1])


def test_a_bomb_of_whole_documents_is_refused() -> None:
    copies = [{"op": "copy", "from": "", "path": f"/k{n}"} for n in range(40)]
    refused(state({"a": 0}), delta(*copies))


@pytest.mark.parametrize("copies", [1, 2, 8])
def test_doubling_over_many_deltas_ends_at_the_limit(copies: int) -> None:
    made = recording()
    with cheap():
        script = [state({"a": [0]}), *[delta(*[COPY] * copies)] * 40]
        assert limit(made, *script) == "state_too_large"
    assert len(protocol.dumps(made.fold.state)) <= conf.get().STATE_BYTES


def test_many_copies_of_a_long_text_are_refused_in_little_memory() -> None:
    refused(state(LONG), delta(*MANY))


def test_a_copy_bomb_in_an_activity_is_refused() -> None:
    refused(activity({"a": [0]}), activity_delta(*[COPY] * 40))


def test_many_copies_of_a_long_text_in_an_activity_are_refused() -> None:
    refused(activity(LONG), activity_delta(*MANY))


def test_doubling_an_activity_over_many_deltas_ends_at_the_limit() -> None:
    double = activity_delta({"op": "copy", "from": "", "path": "/half"})
    assert limit(recording(), activity(LONG), *[double] * 8) == "state_too_large"


@case("JPA-18")
async def test_too_many_operations_are_refused(w: World) -> None:
    reply = await w.run()
    assert "STATE_DELTA" not in reply.types
    assert reply.events[-1]["code"] == "state_too_large"
    assert (await w.snapshot(reply))["state"] == {}


@pytest.mark.parametrize("name", ["add", "replace", "test"])
def test_the_number_of_operations_has_an_exact_limit(name: str) -> None:
    operation = {"op": name, "path": "/k", "value": 1}
    made = recording()
    made.feed(state({"k": 1}))
    made.feed(delta(*[operation] * MAX_OPERATIONS))
    assert made.fold.state == {"k": 1}
    refused(state({"k": 1}), delta(*[operation] * (MAX_OPERATIONS + 1)))


def test_too_many_operations_on_an_activity_are_refused() -> None:
    operation = {"op": "add", "path": "/k", "value": 1}
    refused(activity({}), activity_delta(*[operation] * (MAX_OPERATIONS + 1)))


def test_no_operation_copies_the_document() -> None:
    """Ten thousand operations on a large state make one copy of each container, not one each."""
    large = {"l": list(range(50_000)), "k": 0}
    made = recording()
    made.feed(state(large))
    with cheap(8):
        made.feed(delta(*[{"op": "replace", "path": "/l/7", "value": 1}] * 5_000))


# -- one result in both languages ------------------------------------------------

CORPUS = vectors.read(vectors.VECTORS / "patch" / "extra.jsonl")
PUBLIC = vectors.SHARED / "patch" / "results.jsonl"
if PUBLIC.exists():
    CORPUS += [row for row in vectors.read(PUBLIC) if row["source"] != "extra"]


def sent(document: Any, operations: Any) -> tuple[bool, Any]:
    """Whether the patch is sent to clients as it is, and the state on the server after it."""
    made = recording()
    made.feed(state(document))
    made.drain()
    try:
        made.feed(delta(*operations))
    except (protocol.ProtocolError, LimitExceeded):
        return False, made.fold.state
    events = [json.loads(row) for _, row in made.drain()]
    return [e.get("delta") for e in events] == [list(operations)], made.fold.state


def forked(row: vectors.Case) -> bool:
    """Whether a client that is sent this patch holds another state than the server."""
    as_it_is, held = sent(row["doc"], row["patch"])
    return as_it_is and not vectors.same(held, row["client"]["state"])


@case("JPA-21")
@pytest.mark.parametrize("source", sorted({row["source"] for row in CORPUS}))
async def test_server_and_client_agree_on_the_corpus(w: World, source: str) -> None:
    rows = [row for row in CORPUS if row["source"] == source]
    forks = {row["id"] for row in rows if forked(row)}
    assert forks == set()


DOCUMENT = {"a": {"x": 1}, "l": [1, 2], "s": "str", "n": 5}
#: Operations on DOCUMENT that the official client takes otherwise than RFC 6902.
OTHERWISE: dict[str, list[Any]] = {
    # Accepted there: a leading zero or an empty token as an index.
    "add at 01": [{"op": "add", "path": "/l/01", "value": 9}],
    "add at an empty index": [{"op": "add", "path": "/l/", "value": 9}],
    "copy to 01": [{"op": "copy", "from": "/a", "path": "/l/01"}],
    "move to an empty index": [{"op": "move", "from": "/a", "path": "/l/"}],
    # Appended there; RFC 6902 and our fold refuse the whole patch.
    "move behind the end": [{"op": "move", "from": "/l/0", "path": "/l/2"}],
    "move far behind the end": [{"op": "move", "from": "/a", "path": "/l/5"}],
    "copy behind the end": [{"op": "copy", "from": "/a", "path": "/l/5"}],
    "copy to a huge index": [{"op": "copy", "from": "/n", "path": "/l/99999999999999999999"}],
    # Becomes 0 there.
    "add at 2^32": [{"op": "add", "path": "/l/4294967296", "value": 9}],
    # A circle there: the client can never post its state again.
    "move the root into itself": [{"op": "move", "from": "", "path": "/a/y"}],
    "move the root to the end of a list": [{"op": "move", "from": "", "path": "/l/-"}],
    # Found there: inherited names and properties of arrays and strings.
    "replace toString": [{"op": "replace", "path": "/toString", "value": 9}],
    "replace a/hasOwnProperty": [{"op": "replace", "path": "/a/hasOwnProperty", "value": 9}],
    "replace constructor": [{"op": "replace", "path": "/constructor", "value": 9}],
    "copy a length": [{"op": "copy", "from": "/l/length", "path": "/k"}],
    "move a length": [{"op": "move", "from": "/l/length", "path": "/a/k"}],
    "copy a character to the root": [{"op": "copy", "from": "/s/0", "path": ""}],
    "copy 01 to the root": [{"op": "copy", "from": "/l/01", "path": ""}],
    # Kills the client there: a function cannot be cloned.
    "copy a function": [{"op": "copy", "from": "/a/toString", "path": "/a/y"}],
    "move a function": [{"op": "move", "from": "/a/toString", "path": "/l/-"}],
    # Nothing happens there, and the rest of the patch is applied.
    "below a scalar root": [
        {"op": "replace", "path": "", "value": 5},
        {"op": "add", "path": "/k", "value": 1},
    ],
    "copy nothing to the root": [
        {"op": "copy", "from": "/missing", "path": ""},
        {"op": "replace", "path": "", "value": 1},
    ],
}


def stands_for(before: Event, event: Event) -> None:
    """The event is not sent as it is: a snapshot stands for it with a finding, or it is refused."""
    made = recording()
    made.feed(before)
    made.drain()
    try:
        made.feed(event)
    except (protocol.ProtocolError, LimitExceeded):
        assert made.drain() == []
    else:
        assert [json.loads(row)["type"] for _, row in made.drain()] == [before["type"]]
        assert made.findings


@pytest.mark.parametrize("operations", OTHERWISE.values(), ids=OTHERWISE)
def test_what_javascript_reads_otherwise_is_not_sent_as_it_is(operations: Any) -> None:
    stands_for(state(DOCUMENT), delta(*operations))


@pytest.mark.parametrize("operations", OTHERWISE.values(), ids=OTHERWISE)
def test_nor_is_it_sent_for_an_activity(operations: Any) -> None:
    stands_for(activity(DOCUMENT), activity_delta(*operations))


@case("JPA-22")
async def test_illegal_escapes_are_stopped_and_legal_ones_are_read(w: World) -> None:
    begin = w.input["run_input"]["state"]
    events = scripts.of(w.input["agent_events"], "STATE_DELTA")
    for number, event in enumerate(events[:2]):
        reply = await w.run(run_input(f"t{number}", state=begin, script=[event]))
        assert "STATE_DELTA" not in reply.types
        assert reply.events[-1]["code"] == "protocol_violation"
    reply = await w.run(run_input("legal", state=begin, script=events[2:]))
    assert reply.types[-1] == "RUN_FINISHED"
    assert (await w.snapshot(reply))["state"] == {"a/b": 10, "m~n": 20, "~1": 30}


@sibling("JPA-22")
@pytest.mark.parametrize("pointer", ["/~", "/~2", "/a~/b", "/~~0", "a", " ", "/~\u0660", "#/a"])
@pytest.mark.parametrize("member", ["path", "from"])
async def test_an_illegal_pointer_is_stopped_wherever_it_stands(
    w: World, pointer: str, member: str
) -> None:
    operation = {"op": "copy", "path": "/z", "from": "/a", member: pointer}
    script = [state({"a": 1}), activity({"a": 1}), activity_delta(operation)]
    reply, snapshot = await w.played(script)
    assert reply.events[-1]["code"] == "protocol_violation"
    assert "ACTIVITY_DELTA" not in reply.types
    assert snapshot["messages"][0]["content"] == {"a": 1}
