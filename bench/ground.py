"""`python -m bench.ground`: the protocol layer beside the official encoder and client.

Everything is measured in interleaved rounds and given as median [least..most]; what carries over
to other machines are the ratios, each of two measurements of one round. Garbage collection runs
as it does in a server. Both sides get what they start from ready-made: no model is built and no
line parsed in a timed part, but where the agent yields JSON text, reading it is ours to do.
That what is written is equal is held by tests/protocol/test_encoder.py; here, that what is
folded is equal. Without Node and the official client beside the tests, their part is left out.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import statistics
import subprocess
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from ag_ui.core import BaseEvent, TextMessageContentEvent
from ag_ui.encoder import EventEncoder

from aguiapp import protocol
from aguiapp.protocol import Event
from bench import corpus
from tests import services

STARTED: Event = {"type": "RUN_STARTED", "threadId": "t1", "runId": "r1"}
FINISHED: Event = {"type": "RUN_FINISHED", "threadId": "t1", "runId": "r1"}
EPOCH = 1_764_547_200_000
MESSAGE_TOKENS = 200
LOG_LENGTH = 50


def main() -> None:
    """Measure everything and print it; about a minute, nearly all of it the client's."""
    print(f"{'':66} {'measured':>31} {'wanted':>9} met")
    for part in (encoding, folding, linearity, checkpoints, binary):
        part()
    print(flush=True)


# -- measuring ----------------------------------------------------------------------------------


def seconds(work: Callable[[], Any]) -> float:
    """How long one call takes, without garbage of others."""
    gc.collect()
    started = perf_counter()
    work()
    return perf_counter() - started


def each(function: Callable[[Any], Any], items: Iterable[Any]) -> Callable[[], None]:
    """A call of the function with every item."""

    def work() -> None:
        for item in items:
            function(item)

    return work


def title(text: str) -> None:
    print(f"\n{text}", flush=True)


def row(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    least: float | None = None,
    most: float | None = None,
) -> None:
    """One line: the median, its bounds, the goal and whether the median meets it."""
    middle = statistics.median(values)
    bounds = f" [{min(values):.2f}..{max(values):.2f}]" if len(values) > 1 else ""
    measured = f"{middle:.2f}{bounds} {unit}"
    wanted = "" if least is None else f">= {least:g}"
    wanted = wanted if most is None else f"<= {most:g}"
    met = (least is None or middle >= least) and (most is None or middle <= most)
    verdict = "" if not wanted else "yes" if met else "NO"
    print(f"  {name:64} {measured:>31} {wanted:>9} {verdict}", flush=True)


# -- one event: enforced, expanded, verified, written -------------------------------------------


class Ours:
    """What the recorder does with an event up to its JSON text."""

    def __init__(self, opening: Iterable[Any] = ()) -> None:
        self.upgrader = protocol.Upgrader(lambda: "minted")
        self.expander = protocol.Expander()
        self.verifier = protocol.Verifier(strict=True, thread_id="t1", run_id="r1")
        for event in (STARTED, *opening):
            self.take(event)

    def take(self, raw: Any) -> None:
        wire = protocol.to_wire(raw)
        if protocol.conforms(wire):
            for explicit in self.expander.feed(wire):
                protocol.dumps(explicit, plain=True)
                self.verifier.feed(explicit)
            return
        for upgraded in self.upgrader.feed(wire):
            event, _ = protocol.enforce(upgraded)
            if event is not None:
                for explicit in self.expander.feed(event):
                    protocol.dumps(explicit)
                    self.verifier.feed(explicit)
        self.upgrader.drain()


def stamped(events: Iterable[BaseEvent]) -> list[BaseEvent]:
    """The models with a time each."""
    listed = list(events)
    for at, event in enumerate(listed):
        event.timestamp = EPOCH + at
    return listed


def tokens(count: int) -> list[BaseEvent]:
    draw = random.Random(11)
    return stamped(
        TextMessageContentEvent(message_id=corpus.MESSAGE, delta=draw.choice(corpus.WORDS))
        for _ in range(count)
    )


def encoding(count: int = 2000, rounds: int = 31) -> None:
    """Our whole way of an event beside the official encoder alone."""
    title(
        f"An event enforced, expanded, verified and written, beside EventEncoder.encode(model)"
        f" alone:\nthe encoder's time / ours; {count} events, {rounds} rounds"
    )
    models = tokens(count)
    texts = [model.model_dump_json(by_alias=True) for model in models]
    mixed = stamped(corpus.events(count))
    subjects: dict[str, tuple[list[BaseEvent], list[Any]]] = {
        "token event, the agent yields JSON text": (models, texts),
        "token event, the agent yields a dict": (models, [json.loads(text) for text in texts]),
        "token event, the agent yields a model (built before)": (models, list(models)),
        "93 % text, 5 % arguments, 2 % patches as models (built before)": (mixed, list(mixed)),
    }
    theirs: dict[str, list[float]] = {name: [] for name in subjects}
    ours: dict[str, list[float]] = {name: [] for name in subjects}
    encode = EventEncoder().encode
    for _ in range(rounds):
        for name in random.sample(list(subjects), len(subjects)):
            official, raw = subjects[name]
            theirs[name].append(seconds(each(encode, official)) / count * 1e6)
            ours[name].append(seconds(each(Ours(corpus.opening()).take, raw)) / count * 1e6)
    for name in subjects:
        row(name, divided(theirs[name], ours[name]), "x", least=1.5)
        row("    ours", ours[name], "µs")
        row("    the encoder", theirs[name], "µs")


def divided(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


# -- a long run ---------------------------------------------------------------------------------


def state() -> Any:
    """Nested, a little over 100 KB of JSON."""
    draw = random.Random(3)
    columns = {
        f"column{column}": {"items": [card(draw, column * 43 + at) for at in range(43)]}
        for column in range(8)
    }
    steps = [{"name": f"step {at}", "status": "pending"} for at in range(20)]
    return {"plan": {"steps": steps}, "board": {"columns": columns}, "log": []}


def card(draw: random.Random, number: int) -> dict[str, Any]:
    return {
        "id": f"item-{number:04d}",
        "title": f"Document {number} about tokens",
        "tags": ["draft", "agent", "review"][: number % 3 + 1],
        "score": draw.random(),
        "done": False,
        "owner": {"name": f"user {number % 17}", "email": f"user{number % 17}@example.org"},
        "history": [{"at": EPOCH + number, "by": "agent", "note": "changed"} for _ in range(2)],
    }


def deltas() -> Iterator[Event]:
    """Small patches: two of three replace a value, one adds to a log of bounded length."""
    draw, logged = random.Random(5), 0
    while True:
        kind = draw.randrange(3)
        if kind == 0:
            path = f"/board/columns/column{draw.randrange(8)}/items/{draw.randrange(43)}/score"
            operations = [{"op": "replace", "path": path, "value": draw.random()}]
        elif kind == 1:
            path = f"/plan/steps/{draw.randrange(20)}/status"
            operations = [{"op": "replace", "path": path, "value": draw.choice(["done", "open"])}]
        else:
            entry = {"number": logged, "said": "looked at a document"}
            operations = [{"op": "add", "path": "/log/-", "value": entry}]
            logged += 1
            if logged > LOG_LENGTH:
                operations.append({"op": "remove", "path": "/log/0"})
        yield {"type": "STATE_DELTA", "delta": operations}


def run(count: int, message_tokens: int = MESSAGE_TOKENS) -> list[Event]:
    """A run of `count` token deltas and patches, 19 to 1, and what opens and closes them."""
    events: list[Event] = [STARTED, {"type": "STATE_SNAPSHOT", "snapshot": state()}]
    draw, patches, said, name = random.Random(7), deltas(), 0, ""
    for at in range(count):
        if at % 20 == 7:
            events.append(next(patches))
            continue
        name = f"msg_{said // message_tokens:012x}"
        if said % message_tokens == 0:
            events.append({"type": "TEXT_MESSAGE_START", "messageId": name, "role": "assistant"})
        delta = {"type": "TEXT_MESSAGE_CONTENT", "messageId": name, "timestamp": EPOCH + at}
        events.append({**delta, "delta": draw.choice(corpus.WORDS)})
        said += 1
        if said % message_tokens == 0:
            events.append({"type": "TEXT_MESSAGE_END", "messageId": name})
    if said % message_tokens:
        events.append({"type": "TEXT_MESSAGE_END", "messageId": name})
    return [*events, FINISHED]


# -- the fold beside the official client --------------------------------------------------------


class Client:
    """The official client in a Node process that stays warm; see fold.mjs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def fold(self, events: list[Event], expected: protocol.Snapshot, *, paced: bool) -> float:
        """The client's seconds for the run; ends the benchmark when it folds otherwise."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"events": events, "paced": paced}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the official client ended early")
        folded = json.loads(answer)
        if (folded["messages"], folded["state"]) != (expected.messages, expected.state):
            raise SystemExit("the official client and our fold differ")
        return float(folded["ms"]) / 1e3

    def fastest(self, events: list[Event], expected: protocol.Snapshot) -> float:
        """The better of all events in one go and one per macrotask."""
        return min(self.fold(events, expected, paced=paced) for paced in (False, True))


@contextmanager
def client(node: str) -> Iterator[Client]:
    script = Path(__file__).with_name("fold.mjs")
    with subprocess.Popen(
        [node, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Client(process)
        finally:
            process.kill()


def folding(count: int = 20_000, rounds: int = 3) -> None:
    """Our fold of a long run, and our whole pipeline, beside the client's runAgent()."""
    title(
        f"A run of {count} events folded, 95 % tokens and 5 % patches of a 100 KB state, beside\n"
        f"@ag-ui/client 1.0.0 in Node (the better of a burst and one event per macrotask):\n"
        f"the client's time / ours; {rounds} rounds, equal messages and state every time"
    )
    node = services.node()
    if node is None:
        print("  not measured: Node, or the official client in tests/js, is missing")
        return
    shapes = {"messages of 200 tokens": MESSAGE_TOKENS, "one message": count}
    with client(node) as official:
        warm = run(1000)
        official.fastest(warm, protocol.fold(warm))
        for name, message_tokens in shapes.items():
            compare(name, run(count, message_tokens), official, rounds)


def compare(name: str, events: list[Event], official: Client, rounds: int) -> None:
    expected = protocol.fold(events)
    if not protocol.check(events).accepts:
        raise SystemExit("the run is not legal")
    ours, whole, theirs = [], [], []
    for _ in range(rounds):
        ours.append(statistics.median(seconds(lambda: protocol.fold(events)) for _ in range(7)))
        theirs.append(official.fastest(events, expected))
        whole.append(statistics.median(seconds(lambda: protocol.check(events)) for _ in range(3)))
    row(f"{name}: fold", divided(theirs, ours), "x", least=100)
    row(f"{name}: all stages (the client verifies too)", divided(theirs, whole), "x")
    row("    our fold", [1e3 * took for took in ours], "ms")
    row("    all our stages", [1e3 * took for took in whole], "ms")
    row("    the client", [1e3 * took for took in theirs], "ms")


# -- what a longer run and many checkpoints cost ------------------------------------------------


def linearity(counts: Sequence[int] = (10_000, 30_000, 100_000), rounds: int = 15) -> None:
    """Our fold's time per event over the length of a run.

    A round folds the shorter runs so often that all take about as long: noise hits them alike.
    """
    title(f"Time per event over the length of the run, our fold, the same mix; {rounds} rounds")
    runs = {count: run(count) for count in counts}
    took: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in random.sample(counts, len(counts)):
            again = [runs[count]] * (max(counts) // count)
            spent = seconds(each(protocol.fold, again))
            took[count].append(spent / len(again) / count * 1e6)
    shortest, *others = counts
    for longer in others:
        name = f"{longer} events / {shortest} events"
        row(name, divided(took[longer], took[shortest]), "x", most=1.25)
    for count in counts:
        row(f"    {count} events", took[count], "µs/event")


def checkpoints(count: int = 1000) -> None:
    """What snapshots hold in memory and cost in time."""
    title(f"{count} snapshots kept along a run over a 100 KB state; one full copy is a deepcopy")
    patches = deltas()
    alone = [{"type": "STATE_SNAPSHOT", "snapshot": state()}]
    alone += [next(patches) for _ in range(count)]
    for name, events, every in (
        ("one patch between two snapshots, no messages", alone, 1),
        ("20 events between two, 95 % tokens, messages of 200 tokens", run(20 * count), 20),
        ("the same, one message", run(20 * count, 20 * count), 20),
    ):
        kept, full = held(events, every, count)
        row(name, [kept / full], "copies", most=count / 10)
        row("    one full copy", [full / 1e3], "kB")
    folded = protocol.Fold()
    for event in run(20 * count)[:-1]:
        folded.feed(event)
    saved = folded.snapshot()
    resumed = [seconds(lambda: protocol.Fold.from_snapshot(saved)) * 1e6 for _ in range(50)]
    taken = [seconds(folded.snapshot) * 1e6 for _ in range(50)]
    row(f"Fold.snapshot() with {len(saved.messages)} messages", taken, "µs")
    row(f"Fold.from_snapshot() with {len(saved.messages)} messages", resumed, "µs")


def held(events: list[Event], every: int, count: int) -> tuple[int, int]:
    """Bytes that `count` snapshots hold, and bytes of one full copy of the last."""
    tracemalloc.start()
    try:
        folded = protocol.Fold()
        saved: list[protocol.Snapshot] = []
        for at, event in enumerate(events):
            folded.feed(event)
            if at % every == every - 1 and len(saved) < count:
                saved.append(folded.snapshot())
        assert len(saved) == count
        last = saved[-1]
        with_them, _ = tracemalloc.get_traced_memory()
        full = copy.deepcopy((last.messages, last.state))
        with_copy, _ = tracemalloc.get_traced_memory()
        del full
        saved.clear()
        del last
        gc.collect()
        without, _ = tracemalloc.get_traced_memory()
        return with_them - without, with_copy - with_them
    finally:
        tracemalloc.stop()


# -- the two encodings --------------------------------------------------------------------------


def binary(count: int = 2000, rounds: int = 31) -> None:
    """Protobuf beside JSON in an event stream."""
    title(f"A token event as protobuf, beside JSON: protobuf's time / JSON's; {rounds} rounds")
    if not protocol.proto_available():
        print("  not measured: the protobuf package is missing")
        return
    events = [protocol.to_wire(model) for model in tokens(count)]
    texts = [protocol.dumps(event) for event in events]
    messages = [protocol.encode_proto(event) for event in events]
    if [protocol.decode_proto(message) for message in messages] != events:
        raise SystemExit("protobuf does not give back the events")
    subjects: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "encode_proto": (protocol.encode_proto, events),
        "encode_sse": (protocol.encode_sse, events),
        "decode_proto": (protocol.decode_proto, messages),
        "json.loads": (json.loads, texts),
    }
    took: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name in random.sample(list(subjects), len(subjects)):
            took[name].append(seconds(each(*subjects[name])) / count * 1e6)
    for one, other in (("encode_proto", "encode_sse"), ("decode_proto", "json.loads")):
        row(f"{one} / {other}", divided(took[one], took[other]), "x")
    for name, values in took.items():
        row(f"    {name}", values, "µs")
    row("bytes of the message / bytes of the JSON", [size(messages) / size(texts)], "x")


def size(parts: Iterable[str | bytes]) -> int:
    return sum(map(len, parts))


if __name__ == "__main__":
    main()
