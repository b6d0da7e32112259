"""Joining late: whoever comes in anywhere ends with what they see who watched from the start."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from aguiapp import protocol
from aguiapp.protocol import Event, Snapshot
from tests.protocol import cases, official
from tests.protocol.joins import Join, Message, joins, owners_cannot_be_told
from tests.protocol.streams import Stream, generate, legal_streams
from tests.protocol.test_official_client import departures
from tests.protocol.test_properties import through_json

IDS: Event = {"threadId": "t1", "runId": "r1"}
START: Event = {"type": "RUN_STARTED", **IDS}
SUCCESS: Event = {"type": "RUN_FINISHED", **IDS, "outcome": {"type": "success"}}
FAILED: Event = {"type": "RUN_ERROR", "message": "boom"}
QUESTION = {"id": "i1", "reason": "approval"}
INTERRUPT: Event = {**SUCCESS, "outcome": {"type": "interrupt", "interrupts": [QUESTION]}}
STALE = {"stale": True}


def named(kind: str, field: str, value: str, **more: Any) -> Event:
    return {"type": kind, field: value, **more}


def text(name: str, *deltas: str, end: bool = True, **more: Any) -> list[Event]:
    """A message in some deltas, closed or left open."""
    return item("TEXT_MESSAGE", "messageId", name, deltas, end, more)


def thought(name: str, *deltas: str, end: bool = True, **more: Any) -> list[Event]:
    more = {"role": "reasoning", **more}
    return item("REASONING_MESSAGE", "messageId", name, deltas, end, more)


def call(name: str, *deltas: str, end: bool = True, **more: Any) -> list[Event]:
    """A tool call in some deltas, closed or left open."""
    more = {"toolCallName": "find", **more}
    start, *rest = item("TOOL_CALL", "toolCallId", name, deltas, end, more)
    contents = [
        {**one, "type": "TOOL_CALL_ARGS"} if one["type"].endswith("CONTENT") else one
        for one in rest
    ]
    return [start, *contents]


def item(
    kind: str, field: str, name: str, deltas: tuple[str, ...], end: bool, more: dict[str, Any]
) -> list[Event]:
    tag = {key: value for key, value in more.items() if key == "subagentRunId"}
    events = [named(f"{kind}_START", field, name, **more)]
    events += [named(f"{kind}_CONTENT", field, name, delta=delta, **tag) for delta in deltas]
    return [*events, named(f"{kind}_END", field, name, **tag)] if end else events


def said(name: str, content: str = "said", role: str = "user") -> Message:
    return {"id": name, "role": role, "content": content}


def stated(*messages: Message) -> Event:
    return {"type": "MESSAGES_SNAPSHOT", "messages": list(messages)}


def joined(
    before: list[Event], rest: list[Event], held: list[Message] | None = None, **more: Any
) -> list[Event]:
    """The prologue of somebody who comes in between; they end with what a watcher has."""
    held = held or []
    starts = [event for event in before if event["type"] == "RUN_STARTED"]
    run = starts[-1] if starts else {"threadId": "t1", "runId": "r0"}
    snapshot = protocol.fold(before)
    prologue = protocol.join(snapshot, run, held, **more)
    assert not of(prologue, "RUN_ERROR")
    clean(prologue)
    for events in ([*before, *rest], [*prologue, *rest]):
        verdict = protocol.check(events)
        assert verdict.accepts, verdict.message
    joiner = protocol.fold([*prologue, *rest], messages=held, state=STALE)
    watcher = protocol.fold([*before, *rest])
    assert joiner.messages == watcher.messages
    assert joiner.state == watcher.state
    assert joiner.interrupts == watcher.interrupts
    assert [one[:2] for one in joiner.open_items] == [one[:2] for one in watcher.open_items]
    return prologue


def clean(prologue: list[Event]) -> None:
    """Assert that nothing in it would be stripped or dropped."""
    for event in prologue:
        enforced = protocol.enforce(event)
        assert enforced.event == event
        assert not enforced.warnings


def of(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event["type"] in kinds]


def kinds(events: list[Event]) -> list[str]:
    return [event["type"] for event in events]


def active(prologue: list[Event]) -> list[Event]:
    """What follows the replayed history: the active run up to here, after its start."""
    at = max(i for i, event in enumerate(prologue) if event["type"] == "RUN_STARTED")
    return prologue[at + 1 :]


def subagent(name: str, parent: str | None = None) -> Event:
    more = {} if parent is None else {"parentSubagentRunId": parent}
    return named("SUBAGENT_STARTED", "subagentRunId", name, name="helper", **more)


def ended(name: str) -> Event:
    return named("SUBAGENT_FINISHED", "subagentRunId", name)


# -- in the middle of a run -----------------------------------------------------------------


class TestActiveRun:
    def test_history_is_a_run_of_its_own_and_the_active_one_starts_after_it(self) -> None:
        """Message so far, state, and the message reopened: its next delta may follow."""
        whole = [START, *text("m", "Hel", "lo"), SUCCESS]
        prologue = joined(whole[:3], whole[3:])
        assert prologue == [
            {**START, "protocolVersion": "1.0", "runId": "r1:history"},
            stated({"id": "m", "role": "assistant", "content": "Hel"}),
            {"type": "STATE_SNAPSHOT", "snapshot": {}},
            {**SUCCESS, "runId": "r1:history"},
            {**START, "protocolVersion": "1.0"},
            {"type": "TEXT_MESSAGE_START", "messageId": "m"},
        ]

    def test_both_runs_say_what_the_recorded_one_said_of_itself(self) -> None:
        start = {**START, "protocolVersion": "0.9", "parentRunId": "r0", "metadata": {"a": 1}}
        first, _, _, second = joined([start], [SUCCESS])
        said_of_it = {"protocolVersion": "0.9", "parentRunId": "r0", "threadId": "t1"}
        assert second == {"type": "RUN_STARTED", **said_of_it, "runId": "r1"}
        assert first == {**second, "runId": "r1:history"}

    def test_the_run_may_be_named_by_its_ids_alone(self) -> None:
        snapshot = protocol.fold([START, *text("m", end=False)])
        assert protocol.join(snapshot, IDS) == protocol.join(snapshot, START)

    def test_a_call_goes_on_and_none_is_executed_twice(self) -> None:
        """Clients execute at TOOL_CALL_END, so a prologue never holds one."""
        before = [START, *text("m"), *call("c1", "{}", parentMessageId="m")]
        before += call("c2", '{"x":', parentMessageId="m", end=False)
        prologue = joined(before, [*call("c2", "1}")[1:], SUCCESS])
        (message,) = of(prologue, "MESSAGES_SNAPSHOT")[0]["messages"]
        arguments = [one["function"]["arguments"] for one in message["toolCalls"]]
        assert arguments == ["{}", '{"x":']
        assert active(prologue) == [
            named("TOOL_CALL_START", "toolCallId", "c2", toolCallName="find", parentMessageId="m")
        ]

    def test_a_call_has_the_name_it_has_by_now(self) -> None:
        before = [START, *call("c", "{", end=False)]
        before.append(stated(*protocol.fold(before).messages))
        before[-1]["messages"][0]["toolCalls"][0]["function"]["name"] = "search"
        (reopened,) = active(joined(before, [*call("c", "}")[1:], SUCCESS]))
        assert reopened["toolCallName"] == "search"

    def test_metadata_is_not_merged_a_second_time(self) -> None:
        before = [START, *text("m", end=False, metadata={"step": 1})]
        before.append(
            named("TEXT_MESSAGE_CONTENT", "messageId", "m", delta="a", metadata={"step": 2})
        )
        joined(before, [*text("m", "b")[1:], SUCCESS])

    def test_a_pair_of_halves_may_be_cut(self) -> None:
        whole = [START, *text("m", "\ud83d", "\ude00"), SUCCESS]
        joined(whole[:3], whole[3:])

    def test_steps_of_one_name_are_told_apart_by_their_owners(self) -> None:
        opened = named("STEP_STARTED", "stepName", "plan")
        theirs = {**opened, "subagentRunId": "s"}
        before = [START, subagent("s"), opened, theirs]
        closing = [{**one, "type": "STEP_FINISHED"} for one in (theirs, opened)]
        prologue = joined(before, [*closing, ended("s"), SUCCESS])
        assert active(prologue) == [subagent("s"), opened, theirs]

    def test_a_span_and_a_thought_of_one_id_are_two_things(self) -> None:
        span = named("REASONING_START", "messageId", "g")
        before = [START, span, *thought("g", "be", end=False)]
        rest = [*thought("g", "cause")[1:], {**span, "type": "REASONING_END"}, SUCCESS]
        assert kinds(active(joined(before, rest))) == ["REASONING_START", "REASONING_MESSAGE_START"]

    def test_open_interrupts_stay_open_until_the_run_ends(self) -> None:
        resumed = [START, INTERRUPT, {**START, "runId": "r2"}]
        history = joined(resumed, [FAILED])[2]
        assert history["outcome"] == INTERRUPT["outcome"]
        joined(resumed, [{**SUCCESS, "runId": "r2"}])

    def test_calls_of_a_run_that_goes_on_are_nobodys_yet(self) -> None:
        finished = of(joined([START, *call("c", "{}")], [SUCCESS]), "RUN_FINISHED")
        assert [event["outcome"] for event in finished] == [{"type": "success"}]


class TestSubagents:
    def test_a_parent_that_ended_may_be_named_by_a_later_one(self) -> None:
        before = [START, subagent("p"), subagent("c", "p"), ended("p")]
        before += text("m", "a", end=False, subagentRunId="c")
        rest = [*text("m", "b", subagentRunId="c")[1:], subagent("d", "p")]
        prologue = joined(before, [*rest, ended("c"), ended("d"), SUCCESS])
        started = [subagent("p"), ended("p"), subagent("c", "p")]
        assert active(prologue)[:3] == started
        assert active(prologue)[3]["subagentRunId"] == "c"

    def test_one_that_failed_has_ended_too(self) -> None:
        failed = named("SUBAGENT_ERROR", "subagentRunId", "s", message="no")
        prologue = joined([START, subagent("s"), failed], [subagent("d", "s"), ended("d"), SUCCESS])
        assert active(prologue) == [subagent("s"), ended("s")]

    @pytest.mark.parametrize("written", [text, call, thought])
    def test_what_it_closed_may_be_reopened_without_its_tag(self, written: Any) -> None:
        """Whoever watched knows whose it is, so the tag may follow later."""
        first = written("m", "a", subagentRunId="s")
        start, content, end = written("m", "b", subagentRunId="s")
        untagged = {key: value for key, value in start.items() if key != "subagentRunId"}
        before = [START, *text("m0"), subagent("s"), *first]
        joined(before, [untagged, content, end, ended("s"), SUCCESS])

    def test_a_message_of_an_earlier_run_belongs_to_nobody_in_this_one(self) -> None:
        earlier = [START, subagent("s1"), *text("m", "a", subagentRunId="s1"), ended("s1"), SUCCESS]
        before = [*earlier, {**START, "runId": "r2"}, subagent("s2")]
        rest = [*text("m", "b", subagentRunId="s2"), ended("s2"), {**SUCCESS, "runId": "r2"}]
        joined(before, rest)

    def test_naming_a_call_claims_no_message(self) -> None:
        """Those of earlier runs belong to nobody in this one until somebody writes to them."""
        held = stated(said("h", role="assistant"), said("u"))
        before = [START, held, SUCCESS, {**START, "runId": "r2"}, subagent("s1"), subagent("s2")]
        theirs = call("c", "{}", parentMessageId="n", subagentRunId="s1")
        rest = [*theirs, *text("h", "b", subagentRunId="s2"), ended("s1"), ended("s2")]
        joined([*before, *theirs], [*rest, {**SUCCESS, "runId": "r2"}])

    def test_a_call_does_not_take_its_message_with_it(self) -> None:
        """The call is the subagent's, the message it hangs on the parent agent's."""
        host = text("m", "a")
        theirs = call("c", "{}", parentMessageId="h", subagentRunId="s")
        before = [START, subagent("s"), *host, *theirs]
        joined(before, [*text("m", "b"), *theirs, ended("s"), SUCCESS])


class TestTakenAway:
    """Something is open, but a snapshot of the same run took its message away."""

    KEPT = said("u")
    OPEN = {
        "text": (text("m", "a", end=False), text("m", "b")[1:]),
        "call": (call("c", "{", end=False), call("c", "}")[1:]),
        "thought": (thought("g", "a", end=False), thought("g", "b")[1:]),
    }

    @pytest.mark.parametrize("what", OPEN)
    def test_it_is_open_but_not_shown(self, what: str) -> None:
        opened, rest = self.OPEN[what]
        left = [self.KEPT, said("g0", role="reasoning")]
        prologue = joined([START, *opened, stated(*left)], [*rest, SUCCESS])
        assert active(prologue)[0] == opened[0]
        assert active(prologue)[-1]["type"] == "MESSAGES_SNAPSHOT"

    def test_what_is_left_keeps_its_order_when_an_id_is_there_twice(self) -> None:
        opened, rest = self.OPEN["text"]
        answer = {"id": "o", "role": "tool", "toolCallId": "c", "content": ""}
        one, two = ({**answer, "content": content} for content in "12")
        before = [START, *opened, stated(self.KEPT, one, two)]
        joined(before, [*rest, SUCCESS])


# -- between runs ---------------------------------------------------------------------------


class TestNoActiveRun:
    NEXT: tuple[Event, ...] = ({**START, "runId": "r2"}, {**SUCCESS, "runId": "r2"})

    def after(self, *before: Event) -> Event:
        """The end of the prologue, which the next run may follow."""
        prologue = joined(list(before), list(self.NEXT))
        assert kinds(prologue)[-2:] == ["STATE_SNAPSHOT", "RUN_FINISHED"]
        return prologue[-1]

    def test_after_success_calls_wait_for_the_client(self) -> None:
        end = self.after(START, *call("c1", "{}"), *call("c2", "{}"), SUCCESS)
        outcome = {"type": "success", "pendingToolCallIds": ["c1", "c2"]}
        assert end == {**SUCCESS, "outcome": outcome}

    def test_what_the_end_named_as_pending_is_named_again(self) -> None:
        outcome = {"type": "success", "pendingToolCallIds": ["elsewhere"]}
        assert self.after(START, {**SUCCESS, "outcome": outcome})["outcome"] == outcome

    def test_after_an_interrupt_its_questions_are_open(self) -> None:
        assert self.after(START, *call("c", "{}"), INTERRUPT) == INTERRUPT

    def test_after_a_cancelled_run_nothing_is(self) -> None:
        cancelled = {**SUCCESS, "outcome": {"type": "cancelled"}}
        assert self.after(START, INTERRUPT, START, cancelled) == SUCCESS

    def test_a_failed_run_ends_in_order(self) -> None:
        """Its RUN_ERROR would fail the joiner's; its calls will never be answered."""
        assert self.after(START, *text("m", "a", end=False), *call("c"), FAILED) == SUCCESS

    def test_an_error_leaves_questions_open(self) -> None:
        assert self.after(START, INTERRUPT, START, FAILED) == INTERRUPT
        assert self.after(START, INTERRUPT, FAILED) == INTERRUPT

    def test_a_thread_may_have_failed_before_its_first_run(self) -> None:
        assert self.after(FAILED)["runId"] == "r0"

    def test_an_empty_thread_has_its_state(self) -> None:
        prologue = joined([], list(self.NEXT))
        assert kinds(prologue) == ["RUN_STARTED", "STATE_SNAPSHOT", "RUN_FINISHED"]


# -- what the joiner holds ------------------------------------------------------------------


class TestHistory:
    TALK: tuple[Event, ...] = (START, *text("m1", "a"), *text("m2", "b"), SUCCESS)
    HELD: list[Message] = protocol.fold(TALK).messages

    @pytest.mark.parametrize("held", [HELD[:0], HELD[:1], HELD], ids=len)
    def test_a_true_prefix_takes_one_snapshot(self, held: list[Message]) -> None:
        assert len(of(joined(list(self.TALK), [], held), "MESSAGES_SNAPSHOT")) == 1

    @pytest.mark.parametrize(
        "held",
        [HELD[1:], HELD[::-1], [*HELD, said("x")], [said("x")]],
        ids=["later ones", "reversed", "more", "others"],
    )
    def test_anything_else_is_emptied_first(self, held: list[Message]) -> None:
        """Clients never reorder what they hold."""
        first, second = of(joined(list(self.TALK), [], held), "MESSAGES_SNAPSHOT")
        assert (first["messages"], second["messages"]) == ([], self.HELD)

    def test_reasoning_and_activities_take_their_places_too(self) -> None:
        """No snapshot takes them away from whoever holds them unless it names their kind."""
        card = {"activityType": "card", "content": {"a": 1}}
        shown = named("ACTIVITY_SNAPSHOT", "messageId", "v", **card)
        before = [START, *text("m", "a"), shown, *thought("g", "why"), SUCCESS]
        message, card, reason = protocol.fold(before).messages
        joined(before, [], [reason, card, message])
        joined(before, [], [{**card, "content": {"older": 1}}])

    def test_nothing_stays_that_only_they_held(self) -> None:
        held = [said("g", role="reasoning"), {**said("v", role="activity"), "content": {}}]
        prologue = protocol.join(protocol.fold(self.TALK), START, held)
        assert protocol.fold(prologue, messages=held).messages == [*self.HELD]

    @pytest.mark.parametrize(
        "held", [[], HELD[:1], [said("x"), *HELD]], ids=["none", "prefix", "stale"]
    )
    @pytest.mark.parametrize("thoughts", [[], thought("g", "x" * 150)], ids=["", "thoughts"])
    def test_a_long_history_comes_in_small_events(
        self, thoughts: list[Event], held: list[Message]
    ) -> None:
        many = [one for n in range(1, 30) for one in text(f"m{n}", "x" * 100)]
        before = [START, *many[:40], *thoughts, *many[40:], *text("last", "a", end=False)]
        prologue = joined(before, [*text("last", "b")[1:], SUCCESS], held, piece=500)
        longest = max(len(protocol.dumps(event)) for event in prologue[3:])
        assert longest < 1000
        assert len(of(prologue, "RUN_FINISHED")) > 5


# -- for every stream, at every position ----------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(legal_streams(25), st.randoms(use_true_random=False))
def test_a_prologue_needs_no_more_than_json_and_changes_nothing(
    stream: Stream, choose: Random
) -> None:
    before = copy.deepcopy(stream)
    for join in joins(stream, choose):
        if choose.randrange(4):
            continue
        snapshot, held = copy.deepcopy((join.snapshot, join.held))
        run = {**IDS, "runId": "again"}
        prologue = protocol.join(join.snapshot, run, join.held)
        protocol.fold(prologue + join.rest, messages=join.held)
        assert (join.snapshot, join.held) == (snapshot, held)
        assert protocol.join(through_json(snapshot), run, held) == prologue
    assert stream == before


def missed(join: Join, watcher: Snapshot) -> str | None:
    """What a joiner does not have in the end."""
    clean(join.prologue)
    client = cases.Client(join.stream)
    refused = client.run(join.stream["events"])
    if refused is not None:
        return f"refused at {refused}"
    joiner = client.fold.snapshot()
    if join.shared(joiner.messages) != join.shared(watcher.messages):
        return "messages"
    if joiner.state != watcher.state:
        return "state"
    return None if joiner.interrupts == watcher.interrupts else "interrupts"


SEEDS, SIZE = range(70), 40


def test_joiners_end_with_what_watchers_have() -> None:
    told: Counter[bool] = Counter()
    untold: Counter[bool] = Counter()
    for seed in SEEDS:
        stream = generate(seed, SIZE)
        watcher = protocol.fold(stream.events, **stream.initial)
        for join in joins(stream, Random(seed)):
            wrong = missed(join, watcher)
            if owners_cannot_be_told(join.snapshot):
                untold[wrong is None] += 1
            else:
                assert wrong is None, (seed, join.position, join.history, wrong)
                told[True] += 1
    assert 0 < untold.total() < 0.05 * told.total()
    assert untold[True] > 0.9 * untold.total()


# -- the official client --------------------------------------------------------------------

STREAMS = 220


@pytest.mark.node
def test_the_official_client_ends_with_what_it_would_have_watched(
    node: str, tmp_path: Path
) -> None:
    streams = [generate(seed, 20) for seed in range(STREAMS)]
    watched = [{"initial": one.initial, "events": one.events} for one in streams]
    pairs = [
        (number, join)
        for number, stream in enumerate(streams)
        for join in joins(stream, Random(number))
        if not owners_cannot_be_told(join.snapshot)
    ]
    everything = [*watched, *(join.stream for _, join in pairs)]
    results = official.fold(node, everything, tmp_path, told=False)
    for (number, join), joiner in zip(pairs, results[STREAMS:], strict=True):
        note = f"{join.position} {join.history} {protocol.dumps(join.stream)[:3000]}"
        with cases.named({"id": number, "note": note}):
            same_end(join, joiner, watched[number], results[number])


def same_end(join: Join, joiner: cases.Case, stream: cases.Case, watcher: cases.Case) -> None:
    """Assert that the client has the same view, but for ids it holds twice as one object."""
    assert joiner["error"] is None
    assert joiner["state"] == watcher["state"]
    assert joiner["pendingInterrupts"] == watcher["pendingInterrupts"]
    mine, theirs = join.shared(joiner["messages"]), join.shared(watcher["messages"])
    assert [one["id"] for one in mine] == [one["id"] for one in theirs]
    if mine != theirs:
        departed = departures(stream) | departures(join.stream)
        for one, two in zip(mine, theirs, strict=True):
            assert one["id"] in departed or one == two
