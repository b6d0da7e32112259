"""Legal streams: whatever a conforming producer may send, with its rarest turns.

One writer serves both a plain seed and hypothesis: all it asks of either is to choose like a
`random.Random`. It keeps its own account of what is open and who owns it, so the verifier is
tested by it rather than consulted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from hypothesis import strategies as st

from aguiapp.protocol import Event
from tests.protocol.ledger import CHUNKED, OPEN, Ledger
from tests.protocol.values import (
    PARTS,
    ROLES,
    happens,
    json_object,
    json_patch,
    json_value,
    message,
    present,
    some_messages,
)

THREAD: Final = "t1"
TEXTS: Final = ("m1", "m2", "m3", "m4", "")
REASONED: Final = ("r1", "r2", "r3")
ACTIVITIES: Final = ("a1", "a2")
CALLS: Final = ("c1", "c2", "c3", "c4")
RESULTS: Final = ("o1", "o2", "o3")
SUBAGENTS: Final = ("s1", "s2", "s3")
DELTAS: Final = (
    "a",
    "",
    " b",
    "\u00e9\n",
    "\U0001f600",
    "\ud83d",
    "\ude00",
    '{"x":',
    "1}",
    "\u2028",
)


@dataclass(frozen=True)
class Stream:
    """Events with what a client held before them, and the names of the turns they take."""

    initial: dict[str, Any]
    events: list[Event]
    features: frozenset[str]


def generate(seed: int, size: int = 30, *, chunks: bool = False, runs: int | None = None) -> Stream:
    """The legal stream of a seed, of about `size` events at most."""
    return _Writer(Random(seed), size, chunks=chunks).stream(runs)


def legal_streams(
    size: int = 30, *, chunks: bool = False, runs: int | None = None
) -> st.SearchStrategy[Stream]:
    """Legal streams of about `size` events at most; `runs` fixes how many runs."""
    return st.randoms(use_true_random=False).map(
        lambda choose: _Writer(choose, size, chunks=chunks).stream(runs)
    )


class _Writer(Ledger):
    """Writes one stream, a move at a time."""

    def __init__(self, choose: Random, size: int, *, chunks: bool) -> None:
        self.state: Any = {} if choose.randrange(2) == 0 else json_value(choose)
        self.messages = some_messages(choose) if happens(choose, 3) else []
        super().__init__(choose, self.messages, self.state)
        self.size = size
        self.interrupts: list[str] = []
        self.seen: set[str] = set()
        self.moves: list[Callable[[], None]] = [
            *(self._open_text, self._open_call, self._open_reasoning, self._open_span),
            *[self._continue] * 5,
            *[self._close] * 3,
            *(self._result, self._result, self._state_snapshot, self._state_delta),
            *(self._messages_snapshot, self._activity_snapshot, self._activity_delta),
            *(self._encrypted, self._step, self._subagent, self._split_pair),
            *(self._aside, self._state_delta, self._open_call),
        ]
        if chunks:
            self.moves += [*[self._open_chunk] * 5, *[self._continue_chunk] * 5]

    def stream(self, runs: int | None) -> Stream:
        """Write the runs."""
        count = 1 + self.choose.randrange(3) if runs is None else runs
        if happens(self.choose, 12):
            self._fail("opening error")
        for number in range(count):
            self._run(number, last=number == count - 1, moves=self.size // count)
        initial = {"messages": self.messages, "state": self.state}
        return Stream(initial, self.events, frozenset(self.features))

    # -- runs -------------------------------------------------------------------------------

    def _run(self, number: int, *, last: bool, moves: int) -> None:
        self.ids = {"threadId": THREAD, "runId": f"run{number + 1}"}
        self.reset()
        self._start(number)
        for _ in range(self.choose.randrange(moves + 1)):
            self.pick(self.moves)()
        if last and self.maybe(6):
            self.note("truncated")
            return
        if self.maybe(5):
            self._fail("error in mid-run" if any(self.open.values()) else "error")
            return
        self._finish()
        if self.maybe(8):
            self._fail("late error")

    def _start(self, number: int) -> None:
        fields = self.some(3, protocolVersion="1.0", parentRunId="elsewhere")
        if self.maybe(2):
            carried: Event = {**self.ids, "messages": self._echo(number)}
            carried |= self.some(4, state=json_value(self.choose), tools=[], context=[])
            if self.interrupts:
                self.note("resumed")
                carried["resume"] = [
                    {"interruptId": name, "status": self.pick(("resolved", "cancelled"))}
                    for name in self.interrupts
                ]
            fields["input"] = carried
        self.emit("RUN_STARTED", {**self.ids, **fields})
        self.adopt(fields.get("input", {}).get("messages", []), overwrite=False)

    def _echo(self, number: int) -> list[Event]:
        """The history as a client would send it, with or without its newest turn."""
        held = [one for one in self._held() if one["role"] != "activity"]
        if held:
            self.note("echo of known ids")
        if self.maybe(3):
            return held
        self.note("echo of a new message")
        return [*held, message(self.choose, "user", f"u{number + 1}")]

    def _finish(self) -> None:
        self._close_all()
        fields: Event = {**self.ids, **self.some(4, result=present(self.choose))}
        fields |= self.some(4, usage=[{"provider": "p", "inputTokens": 3}, {}])
        pending = [name for name in self.called if name not in self.answered]
        ending = self.pick(("absent", "success", "interrupt", "cancelled"))
        self.interrupts = []
        if ending == "success":
            fields["outcome"] = {"type": ending, **self.some(2, pendingToolCallIds=pending)}
            if "pendingToolCallIds" in fields["outcome"] and pending:
                self.note("named pending calls")
        elif ending == "interrupt":
            self.interrupts = ["i1", "i2"][: 1 + self.choose.randrange(2)]
            fields["outcome"] = {"type": ending, "interrupts": self._questions()}
        elif ending == "cancelled":
            fields["outcome"] = {"type": ending}
        self.note(f"outcome {ending}")
        self.emit("RUN_FINISHED", fields)
        self.reset()

    def _questions(self) -> list[Event]:
        return [
            {"id": name, "reason": "approval"}
            | self.some(
                3,
                message="ok?",
                toolCallId="c1",
                responseSchema={"type": "object"},
                expiresAt="2030-01-01T00:00:00Z",
                subagentRunId="s1",
                metadata=json_object(self.choose, 2),
            )
            for name in self.interrupts
        ]

    def _fail(self, feature: str) -> None:
        self.note(feature)
        self.emit("RUN_ERROR", {"message": "boom", **self.some(3, code="E", usage=[{}])})
        self.reset()

    def _close_all(self) -> None:
        while left := [*self.explicit(), *self.steps, *self.active]:
            item = self.pick(left)
            if item in self.active:
                self._end_subagent(item)
            elif item in self.steps:
                self._end_step(item)
            else:
                self._end(*item)

    # -- items that open, grow and close ----------------------------------------------------

    def _opening(self, kind: str, names: tuple[str, ...]) -> str | None:
        free = self.closed_ids(kind, names)
        return self.pick(free) if free else None

    def _open_text(self) -> None:
        strange = (*ACTIVITIES, *RESULTS, *REASONED, *CALLS) if self.maybe(10) else TEXTS
        name = self._opening("text", strange)
        if name is None:
            return
        if name in self.owners["message"]:
            self.note("reopened text")
        fields = {"messageId": name, **self.some(2, role=self.pick(ROLES))}
        fields |= self.some(6, name="Ada")
        self.emit("TEXT_MESSAGE_START", fields, self.tag("message", name))

    def _open_reasoning(self) -> None:
        name = self._opening("reasoning", TEXTS if self.maybe(10) else REASONED)
        if name is not None:
            if name not in self.open["span"]:
                self.note("reasoning outside a span")
            fields = {"messageId": name, "role": "reasoning"}
            self.emit("REASONING_MESSAGE_START", fields, self.tag("reasoning", name))

    def _open_span(self) -> None:
        name = self._opening("span", REASONED)
        if name is not None:
            self.emit("REASONING_START", {"messageId": name}, self.tag("reasoning", name))

    def _call(self) -> tuple[Event, str | None] | None:
        """The fields and tag of a call that may be opened now."""
        name = self._opening("tool", CALLS)
        parent = self.pick((None, None, *TEXTS[:4], *RESULTS[:1], *REASONED[:1], "u1", "nobody"))
        tags = self.call_tags(name, parent) if name else []
        if name is None or not tags:
            return None
        called = self.called.get(name, self.pick(("find", "book")))
        if name in self.owners["call"]:
            self.note("reopened call")
            called = "renamed" if self.maybe(6) else called
        fields: Event = {"toolCallId": name, "toolCallName": called}
        if parent is not None:
            fields["parentMessageId"] = parent
            self.note("call under a parent" if self.fold.has_message(parent) else "no parent")
        return fields, self.pick(tags)

    def _open_call(self) -> None:
        if call := self._call():
            self.emit("TOOL_CALL_START", *call)

    def _continue(self) -> None:
        growing = [item for item in self.explicit() if item[0] != "span"]
        if growing:
            self._grow(self.pick(growing), self.pick(DELTAS))

    def _grow(self, item: tuple[str, str], delta: str) -> None:
        kind, name = item
        content, _, field, bucket = OPEN[kind]
        self.emit(content, {field: name, "delta": delta}, self.tag(bucket, name))

    def _split_pair(self) -> None:
        growing = [item for item in self.explicit() if item[0] != "span"]
        if not growing:
            return
        item = self.pick(growing)
        self._grow(item, "x\ud83d")
        if self.maybe(2) and len(growing) > 1:
            other = self.pick([one for one in growing if one != item])
            self._grow(other, self.pick(DELTAS))
        self._grow(item, "\ude00y")
        self.note("pair over two deltas")

    def _close(self) -> None:
        if open_items := self.explicit():
            self._end(*self.pick(open_items))

    def _end(self, kind: str, name: str) -> None:
        _, end, field, bucket = OPEN[kind]
        if kind == "span" and name in self.open["reasoning"]:
            self.note("span closed before its message")
        self.emit(end, {field: name}, self.tag(bucket, name))

    def _result(self) -> None:
        name = self.pick((*CALLS, "c9"))
        busy = self.chunked("text")
        message = self.pick([one for one in (*RESULTS, *TEXTS[:1]) if one not in busy])
        if name in self.open["tool"]:
            self.note("result before end")
        if name in self.answered:
            self.note("repeated result")
        if not self.fold.has_tool_call(name):
            self.note("result of an unknown call")
        content: Any = self.pick(("", "done", "\U0001f600"))
        if self.maybe(3):
            content = self.choose.sample(PARTS, self.choose.randrange(3))
            self.note("result in parts")
        fields = {"messageId": message, "toolCallId": name, "content": content}
        self.emit("TOOL_CALL_RESULT", fields | self.some(3, role="tool"), self.any_tag())

    # -- state, snapshots, activities -------------------------------------------------------

    def _state_snapshot(self) -> None:
        snapshot = json_value(self.choose)
        if not snapshot:
            self.note(f"state {snapshot!r}")
        self.emit("STATE_SNAPSHOT", {"snapshot": snapshot}, self.any_tag())

    def _state_delta(self) -> None:
        delta = json_patch(self.choose, self.fold.state)
        for operation in delta:
            self.note(f"patch {operation['op']}")
        self.emit("STATE_DELTA", {"delta": delta}, self.any_tag())

    def _held(self) -> list[Event]:
        """The messages a client holds that may be stated: an activity may have been spoilt."""
        return [
            copy.deepcopy(message)
            for message in self.fold.snapshot().messages
            if message["role"] != "activity" or isinstance(message["content"], dict)
        ]

    def _messages_snapshot(self) -> None:
        messages = self._held()
        for role in ("activity", "reasoning"):
            if self.maybe(3):
                messages = [one for one in messages if one["role"] != role]
        if self.maybe(2):
            messages = [one for one in messages if self.choose.randrange(3)]
        if self.maybe(3):
            self.choose.shuffle(messages)
            self.note("reordered snapshot")
        if self.maybe(3):
            messages += some_messages(self.choose)
        stated = {one["id"] for one in messages}
        if any(name not in stated for kind, name in self.explicit() if kind == "text"):
            self.note("snapshot removes an open message")
        fields: Event = {"messages": messages}
        if self.maybe(6):
            owned = self.pick((None, [], ["plan"], "nonsense", [1]))
            fields["metadata"] = {"@ag-ui/client": {"authoritativeActivityTypes": owned}}
            self.note("activity types owned")
        self.emit("MESSAGES_SNAPSHOT", fields)

    def _activity_snapshot(self) -> None:
        name = self.pick((*ACTIVITIES, *ACTIVITIES, *TEXTS[:2]))
        replace = self.pick(({}, {"replace": True}, {"replace": False}))
        held = {one["id"]: one["role"] for one in self.fold.snapshot().messages}
        role = held.get(name, "nothing")
        role = role if role in ("activity", "nothing") else "another message"
        self.note(f"activity replace={replace.get('replace')} on {role}")
        content = json_object(self.choose)
        fields = {"messageId": name, "activityType": self.pick(("plan", "chart"))}
        tag = self.any_tag()
        if replace.get("replace") is not False or name not in self.owners["activity"]:
            self.owners["activity"][name] = tag
        self.emit("ACTIVITY_SNAPSHOT", {**fields, "content": content, **replace}, tag)

    def _activity_delta(self) -> None:
        name = self.pick((*ACTIVITIES, *ACTIVITIES, "m1", "a9"))
        held = {one["id"]: one["content"] for one in self._held() if one["role"] == "activity"}
        delta = json_patch(self.choose, held.get(name, {}), inside=True)
        fields = {"messageId": name, "activityType": self.pick(("plan", "chart"))}
        self.note("activity delta" if name in held else "activity delta without activity")
        self.emit("ACTIVITY_DELTA", {**fields, "patch": delta}, self.tag("activity", name))

    def _encrypted(self) -> None:
        subtype = self.pick(("message", "tool-call"))
        name = self.pick((*REASONED, *TEXTS, *ACTIVITIES) if subtype == "message" else CALLS)
        known = self.fold.has_message if subtype == "message" else self.fold.has_tool_call
        self.note(f"encrypted {subtype} {'known' if known(name) else 'unknown'}")
        in_messages = name in self.owners["message"]
        bucket = "message" if in_messages else "reasoning"
        fields = {"subtype": subtype, "entityId": name, "encryptedValue": self.pick(("v", ""))}
        tag = self.tag("call" if subtype == "tool-call" else bucket, name)
        self.emit("REASONING_ENCRYPTED_VALUE", fields, tag)

    # -- steps, subagents, the rest ---------------------------------------------------------

    def _step(self) -> None:
        if self.steps and self.maybe(2):
            self._end_step(self.pick(self.steps))
            return
        names = [name for name, _ in self.steps]
        step = (self.pick((*names, "plan", "act")), self.any_tag())
        if step in self.steps:
            return
        if step[0] in names:
            self.note("one step name, two owners")
        self.steps.append(step)
        self.emit("STEP_STARTED", {"stepName": step[0]}, step[1])

    def _end_step(self, step: tuple[str, str | None]) -> None:
        self.steps.remove(step)
        self.emit("STEP_FINISHED", {"stepName": step[0]}, step[1])

    def _subagent(self) -> None:
        if self.active and self.maybe(2):
            self._end_subagent(self.pick(self.active))
            return
        known = [*self.active, *self.closed]
        free = [name for name in SUBAGENTS if name not in known]
        if not free:
            return
        name = self.pick(free)
        fields: Event = {"subagentRunId": name, "name": "helper"}
        fields |= self.some(3, description="", parentToolCallId="c1", parentMessageId="m1")
        if known and self.maybe(2):
            fields["parentSubagentRunId"] = self.pick(known)
            nested = fields["parentSubagentRunId"] in self.active
            self.note("nested subagent" if nested else "subagent of a closed parent")
        if name in self.seen:
            self.note("subagent of an earlier run")
        self.seen.add(name)
        self.active.append(name)
        self.emit("SUBAGENT_STARTED", fields)

    def _end_subagent(self, name: str) -> None:
        self.active.remove(name)
        self.closed.append(name)
        if self.maybe(3):
            fields = {"subagentRunId": name, "message": "no", **self.some(2, code="E")}
            self.emit("SUBAGENT_ERROR", fields)
            return
        outcome = self.pick(
            (
                {"type": "success"},
                {"type": "suspended"},
                {"type": "suspended", "interruptIds": ["i1"]},
            )
        )
        fields = self.some(2, outcome=outcome, result=present(self.choose))
        self.emit("SUBAGENT_FINISHED", {"subagentRunId": name, **fields})

    def _aside(self) -> None:
        if self.maybe(2):
            fields = {"event": json_value(self.choose), **self.some(2, source="vendor")}
            self.emit("RAW", fields, self.any_tag())
        else:
            fields = {"name": "note", "value": json_value(self.choose)}
            self.emit("CUSTOM", fields, self.any_tag())

    # -- chunks -----------------------------------------------------------------------------

    def _open_chunk(self) -> None:
        kind = self.pick(CHUNKED)
        said = self.some(2, delta=self.pick(DELTAS))
        if kind == "TOOL_CALL_CHUNK":
            if call := self._call():
                self.emit(kind, {**call[0], **said}, call[1])
            return
        text = kind == "TEXT_MESSAGE_CHUNK"
        name = self._opening(CHUNKED[kind][0], TEXTS if text else REASONED)
        if name is None:
            return
        fields: Event = {"messageId": name, **said}
        if text:
            fields |= self.some(3, role=self.pick(ROLES), name="Ada")
        tag = self.tag("message" if text else "reasoning", name)
        self.emit(kind, fields, tag)

    def _continue_chunk(self) -> None:
        lanes = self.expander.snapshot()
        if not lanes:
            return
        lane = self.pick(lanes)
        owners = [one["owner"] for one in lanes if one["type"] == lane["type"]]
        kind, owner = lane["type"], lane["owner"]
        known = {key: value for key, value in lane["agreed"].items() if value is not None}
        fields = self.some(3, **known) | self.some(2, delta=self.pick(DELTAS))
        found = owner is None or len(owners) == 1
        tag = self.pick((None, owner)) if found else owner
        if self.maybe(2):
            fields[CHUNKED[kind][1]] = lane["id"]
            tag = self.pick((None, owner))
        self.note("chunk found by its lane" if tag is None else "chunk of a subagent")
        self.emit(kind, fields, tag)
