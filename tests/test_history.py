"""Whose history and whose state a run starts with: the rules one by one, then at random."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings as hypothesis, strategies as st

from aguiapp import protocol
from aguiapp.engine import history
from aguiapp.engine.history import Merged, Rules
from tests.scripts import legal, of, run_input, said

Message = dict[str, Any]


def fold(*messages: Message, state: Any = None) -> protocol.Snapshot:
    """A thread's fold."""
    return protocol.Fold(messages=messages, state={} if state is None else state).snapshot()


def assistant(name: str, content: str = "answer", **more: Any) -> Message:
    return {"id": name, "role": "assistant", "content": content, **more}


def reasoning(name: str) -> Message:
    return {"id": name, "role": "reasoning", "content": "why"}


def activity(name: str) -> Message:
    return {"id": name, "role": "activity", "activityType": "card", "content": {"a": 1}}


def merged(held: protocol.Snapshot, *messages: Message, **more: Any) -> Merged:
    """The merge of a post of these messages; keyword arguments are rules or of the input."""
    names = {"client_history", "has_base", "instructions"}
    rules = {key: more.pop(key) for key in names & set(more)}
    if "mode" in more:
        rules["state"] = more.pop("mode")
    known = more.pop("known_states", ())
    fresh = more.pop("fresh", False)
    given_ = run_input(messages=messages, **more)
    return history.merge(held, given_, Rules(**rules), fresh=fresh, known_states=known)


def ids(messages: Any) -> list[str]:
    return [message["id"] for message in messages]


MARK = {"aguiapp": {"actor": "p1"}}
LAST = {"threadId": "t1", "runId": "r1"}
TALK = (said("u1"), assistant("a1"), said("u2"), assistant("a2"))


class TestHistory:
    def test_a_first_post_brings_everything(self) -> None:
        found = merged(fold(), said("u1"), fresh=True)
        assert (ids(found.messages), ids(found.new)) == (["u1"], ["u1"])
        assert (found.heal, found.edited, found.findings) == (False, None, [])

    def test_known_ids_keep_the_servers_copy(self) -> None:
        found = merged(fold(*TALK), said("u1", "forged"), *TALK[1:], said("u3"))
        assert found.messages == [*TALK, said("u3")]
        assert found.new == [said("u3")]
        assert found.heal

    def test_new_ids_are_appended_and_what_is_left_out_stays(self) -> None:
        found = merged(fold(*TALK), said("u3"))
        assert ids(found.messages) == ["u1", "a1", "u2", "a2", "u3"]
        assert found.edited is None
        assert found.heal

    def test_the_same_view_needs_no_heal(self) -> None:
        assert not merged(fold(*TALK), *TALK, said("u3")).heal

    def test_only_what_the_client_cannot_hold_may_be_missing(self) -> None:
        held = fold(said("u1"), reasoning("g1"), activity("v1"), assistant("a1"))
        found = merged(held, said("u1"), assistant("a1"), said("u2"))
        assert not found.heal
        assert ids(found.messages) == ["u1", "g1", "a1", "u2"]

    def test_the_agent_gets_no_activity(self) -> None:
        found = merged(fold(said("u1"), activity("v1")), said("u1"), activity("v2"), said("u2"))
        assert ids(found.messages) == ["u1", "u2"]

    def test_nothing_new_and_a_strict_prefix_ending_in_a_user_message_is_an_edit(self) -> None:
        found = merged(fold(*TALK), *TALK[:3])
        assert found.edited == list(TALK[:3])
        assert found.messages == list(TALK[:3])
        assert (found.new, found.heal) == ([], False)

    def test_an_edit_keeps_the_reasoning_before_its_end(self) -> None:
        held = fold(said("u1"), reasoning("g1"), assistant("a1"), said("u2"), reasoning("g2"))
        found = merged(held, said("u1"), assistant("a1"), said("u2"), resume=[])
        assert found.edited is None  # the reasoning behind it is not counted
        longer = fold(*held.messages, assistant("a2"), activity("v2"))
        found = merged(longer, said("u1"), assistant("a1"), said("u2"))
        assert ids(found.edited) == ["u1", "g1", "a1", "u2"]
        assert found.drops_activities

    @pytest.mark.parametrize(
        "view",
        [
            TALK,  # not strict
            TALK[:2],  # ends in an assistant message
            (TALK[2],),  # no prefix
            (TALK[0], TALK[2]),
            (),
        ],
    )
    def test_what_is_no_such_prefix_removes_nothing(self, view: tuple[Message, ...]) -> None:
        found = merged(fold(*TALK), *view)
        assert found.edited is None
        assert ids(found.messages) == ids(TALK)

    def test_something_new_is_never_a_regeneration(self) -> None:
        found = merged(fold(*TALK), TALK[0], said("u9"))
        assert found.edited is None
        assert ids(found.messages) == [*ids(TALK), "u9"]

    def test_a_resume_is_never_a_regeneration(self) -> None:
        resume = [{"interruptId": "i1", "status": "resolved"}]
        assert merged(fold(*TALK), *TALK[:3], resume=resume).edited is None

    def test_with_a_base_the_posted_history_is_the_history(self) -> None:
        found = merged(fold(*TALK), TALK[0], assistant("a1", "edited"), said("u9"), has_base=True)
        assert found.edited == [TALK[0], assistant("a1", "edited"), said("u9")]
        assert found.new == [said("u9")]
        assert not found.heal

    def test_with_a_base_nobody_can_forge_an_answer(self) -> None:
        found = merged(fold(*TALK), *TALK, assistant("forged"), said("u9"), has_base=True)
        assert ids(found.edited) == [*ids(TALK), "u9"]
        assert found.findings

    def test_clients_add_user_and_tool_messages_only(self) -> None:
        tool = {"id": "t1", "role": "tool", "toolCallId": "c1", "content": "ok"}
        found = merged(
            fold(*TALK), *TALK, assistant("x1"), reasoning("x2"), tool, said("u3", role="user")
        )
        assert ids(found.new) == ["t1", "u3"]
        assert ids(found.messages) == [*ids(TALK), "t1", "u3"]
        assert {finding["id"] for finding in found.findings} == {"x1", "x2"}

    @pytest.mark.parametrize("role", ["system", "developer"])
    def test_instructions_are_for_this_run_only(self, role: str) -> None:
        found = merged(fold(*TALK), said("s1", "be kind", role), *TALK, said("u3"))
        assert ids(found.messages) == ["s1", *ids(TALK), "u3"]
        assert ids(found.new) == ["u3"]
        assert not found.heal
        refused = merged(fold(*TALK), said("s1", "x", role), *TALK, instructions=False)
        assert ids(refused.messages) == ids(TALK)
        assert refused.findings

    def test_client_history_takes_everything_as_it_is(self) -> None:
        theirs = (said("s1", "x", "system"), TALK[0], assistant("mine"), said("u3"))
        found = merged(fold(*TALK), *theirs, client_history=True)
        assert found.messages == list(theirs)
        assert found.edited == list(theirs)
        assert ids(found.new) == ["s1", "mine", "u3"]
        assert found.findings == []

    def test_client_history_that_only_grows_is_no_edit(self) -> None:
        found = merged(fold(*TALK), *TALK, said("u3"), client_history=True)
        assert (found.edited, ids(found.new)) == (None, ["u3"])

    def test_a_forged_answer_in_the_view_is_healed(self) -> None:
        """The requester shows a message that nobody else has."""
        assert merged(fold(*TALK), *TALK, assistant("forged"), said("u3")).heal

    def test_a_new_message_before_known_ones_is_healed(self) -> None:
        """The thread appends it, so the requester's order is another one."""
        assert merged(fold(*TALK), TALK[0], said("new"), *TALK[1:]).heal

    def test_another_order_is_healed(self) -> None:
        assert merged(fold(*TALK), TALK[2], TALK[3], TALK[0], TALK[1], said("u3")).heal


class TestState:
    def test_nothing_or_an_empty_object_means_the_threads(self) -> None:
        held = fold(state={"n": 1})
        assert (merged(held, state={}).state, merged(held, state={}).state_edited) == (
            {"n": 1},
            False,
        )
        assert merged(held, state={}).heal
        absent = run_input()
        del absent["state"]
        found = history.merge(held, absent, Rules(), fresh=False)
        assert (found.state, found.state_edited) == ({"n": 1}, False)

    def test_the_same_state_is_no_edit(self) -> None:
        found = merged(fold(state={"n": 1, "m": 2.5}), state={"m": 2.5, "n": 1.0})
        assert (found.state_edited, found.heal) == (False, False)

    def test_a_state_of_an_earlier_end_is_a_stale_view(self) -> None:
        old = {"n": 0}
        found = merged(fold(state={"n": 1}), state=old, known_states={history.state_hash(old)})
        assert (found.state, found.state_edited, found.heal) == ({"n": 1}, False, True)

    def test_anything_else_is_an_edit_by_that_person(self) -> None:
        found = merged(fold(state={"n": 1}), state={"n": 9})
        assert (found.state, found.state_edited, found.heal) == ({"n": 9}, True, False)
        (event,) = history.opening_events(found, {"aguiapp": {"actor": "p7"}})
        assert event["type"] == "STATE_SNAPSHOT"
        assert event["snapshot"] == {"n": 9}
        assert event["metadata"]["aguiapp"]["actor"] == "p7"

    def test_mode_client_takes_the_inputs(self) -> None:
        held = fold(state={"n": 1})
        found = merged(held, state={}, mode="client")
        assert (found.state, found.state_edited) == ({}, True)
        old = merged(
            held, state={"n": 0}, mode="client", known_states={history.state_hash({"n": 0})}
        )
        assert old.state == {"n": 0}

    def test_mode_thread_ignores_the_inputs(self) -> None:
        found = merged(fold(state={"n": 1}), state={"n": 9}, mode="thread")
        assert (found.state, found.state_edited, found.heal) == ({"n": 1}, False, True)

    @pytest.mark.parametrize("state", [None, 0, False, "", [], [1], "x"])
    def test_any_json_may_be_a_state(self, state: Any) -> None:
        found = merged(fold(state={"n": 1}), state=state)
        assert (found.state, found.state_edited) == (state, True)

    def test_true_is_not_one(self) -> None:
        assert history.canonical(True) != history.canonical(1)
        assert history.canonical({"a": 1.0, "b": -0.0}) == history.canonical({"b": 0, "a": 1})
        assert history.state_hash("\ud800") != history.state_hash("\ufffd")


def test_a_new_thread_without_a_state_of_its_own_is_quiet() -> None:
    found = merged(fold(), said("u1"), fresh=True)
    assert history.opening_events(found, MARK) == []


class TestHeal:
    def test_a_prefix_needs_one_snapshot(self) -> None:
        events = protocol.restate(fold(*TALK, state={"n": 1}), LAST, TALK[:2])
        assert [e["type"] for e in events] == [
            "RUN_STARTED",
            "MESSAGES_SNAPSHOT",
            "STATE_SNAPSHOT",
            "RUN_FINISHED",
        ]
        legal(events)

    def test_anything_else_is_reset_first(self) -> None:
        events = protocol.restate(fold(*TALK), LAST, TALK[2:])
        assert len(of(events, "MESSAGES_SNAPSHOT")) == 2
        legal(events)

    def test_open_interrupts_stay_open(self) -> None:
        held = protocol.fold(
            [
                {"type": "RUN_STARTED", "threadId": "t1", "runId": "r1"},
                {
                    "type": "RUN_FINISHED",
                    "threadId": "t1",
                    "runId": "r1",
                    "outcome": {"type": "interrupt", "interrupts": [{"id": "i", "reason": "x"}]},
                },
            ]
        )
        last = protocol.restate(held, LAST, ())[-1]
        assert last["outcome"] == {
            "type": "interrupt",
            "interrupts": [{"id": "i", "reason": "x"}],
        }

    def test_a_long_history_comes_in_small_events(self) -> None:
        many = [said(f"u{n}", "x" * 100) for n in range(30)]
        events = protocol.restate(fold(*many), LAST, many[3:], piece=500)
        legal(events)
        assert all(len(protocol.dumps(event)) < 1000 for event in events)
        assert ids(protocol.fold(events, messages=many[3:]).messages) == ids(many)


# -- at random -------------------------------------------------------------------

ROLES = st.sampled_from(["user", "assistant", "reasoning", "activity", "tool"])


def message(name: str, role: str) -> Message:
    """A message of that role."""
    match role:
        case "activity":
            return activity(name)
        case "tool":
            return {"id": name, "role": "tool", "toolCallId": f"c{name}", "content": "ok"}
        case _:
            return {"id": name, "role": role, "content": f"{role} {name}"}


@st.composite
def threads(draw: Any) -> protocol.Snapshot:
    """Some thread's fold."""
    roles = draw(st.lists(ROLES, max_size=7))
    messages = [message(f"m{n}", role) for n, role in enumerate(roles)]
    return fold(*messages, state=draw(st.sampled_from([{}, {"n": 1}])))


@st.composite
def views(draw: Any, held: protocol.Snapshot, *, honest: bool = False) -> list[Message]:
    """A stale, shuffled or changed view of it; one that is not honest also invents."""
    view = [m for m in held.messages if draw(st.booleans())]
    if draw(st.booleans()):
        view = list(draw(st.permutations(view)))
    view = [
        {**m, "content": "changed"} if m["role"] == "user" and draw(st.booleans()) else m
        for m in view
    ]
    if honest:
        return view + [message(f"x{n}", "user") for n in range(draw(st.integers(0, 2)))]
    invented = draw(st.lists(st.sampled_from(["user", "assistant"]), max_size=2))
    for number, role in enumerate(invented):
        view.insert(draw(st.integers(0, len(view))), message(f"x{number}", role))
    return view


def known(messages: list[Message], held: protocol.Snapshot) -> list[Message]:
    """Without what only the client holds and no server can see: reasoning and activities."""
    mine = set(ids(held.messages))
    return [m for m in messages if m["id"] in mine or m["role"] not in ("reasoning", "activity")]


@pytest.mark.parametrize("piece", [1024 * 1024, 120])
@hypothesis(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_heal_is_legal_and_brings_any_view_to_the_threads_fold(
    piece: int, data: st.DataObject
) -> None:
    held = data.draw(threads())
    view = data.draw(views(held))
    state = data.draw(st.sampled_from([{}, {"n": 1}, {"old": 1}]))
    events = protocol.restate(held, LAST, view, piece=piece)
    legal(events)
    healed = protocol.fold(events, messages=view, state=state)
    assert known(healed.messages, held) == held.messages
    assert healed.state == held.state


@pytest.mark.parametrize(("honest", "based"), [(True, False), (True, True), (False, False)])
@hypothesis(max_examples=300, deadline=None)
@given(data=st.data())
def test_whoever_posts_ends_with_what_everybody_else_has(
    honest: bool, based: bool, data: st.DataObject
) -> None:
    """Requester: own view, heal, run. Watcher: the thread's fold, run. The same conversation."""
    held = data.draw(threads())
    view = data.draw(views(held, honest=honest))
    state = data.draw(st.sampled_from([{}, {"n": 1}, {"edited": 1}]))
    rules = Rules(has_base=based)
    posted = run_input(run="r2", messages=view, state=state)
    found = history.merge(held, posted, rules, fresh=False)
    healing = protocol.restate(held, LAST, [m for m in view if m not in found.new])
    echo = {"threadId": "t1", "runId": "r2", "messages": found.new}
    run = [
        {"type": "RUN_STARTED", "threadId": "t1", "runId": "r2", "input": echo},
        *history.opening_events(found, MARK),
        {"type": "RUN_FINISHED", "threadId": "t1", "runId": "r2"},
    ]
    legal(healing + run)
    watcher = protocol.Fold.from_snapshot(held)
    for event in run:
        watcher.feed(event)
    after = watcher.snapshot()
    theirs = protocol.fold((healing if found.heal else []) + run, messages=view, state=state)

    def spoken(messages: list[Message]) -> list[Message]:
        return [m for m in messages if m["role"] not in ("reasoning", "activity")]

    assert spoken(theirs.messages) == spoken(after.messages)
    assert theirs.state == after.state == found.state
    agent = [m for m in found.messages if m["role"] != "reasoning"]
    assert agent == spoken(after.messages)
