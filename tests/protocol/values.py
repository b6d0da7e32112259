"""JSON values, patches and messages, drawn from anything that chooses like `random.Random`."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from aguiapp import protocol

LEAVES: tuple[Any, ...] = (
    *(None, False, True, 0, 1, -7, 2.5, 1e21, "", "a", "true", "0"),
    *("l\u00edne\n", "\U0001f600", "\u2028", '"\\/', "\x00", 2**53 - 1),
)
KEYS = ("a", "b", "", "0", "a/b", "m~n", "\u00e9", "toString")


def happens(choose: Random, one_in: int) -> bool:
    """Whether something rare happens; the simplest answer is no."""
    return choose.randrange(one_in) == one_in - 1


def json_value(choose: Random, depth: int = 3) -> Any:
    """Any JSON value that JavaScript keeps."""
    kind = choose.randrange(6) if depth else 0
    if kind == 4:
        return [json_value(choose, depth - 1) for _ in range(choose.randrange(4))]
    return json_object(choose, depth) if kind == 5 else choose.choice(LEAVES)


def json_object(choose: Random, depth: int = 3) -> dict[str, Any]:
    """A JSON object."""
    return {choose.choice(KEYS): json_value(choose, depth - 1) for _ in range(choose.randrange(4))}


def present(choose: Random) -> Any:
    """Any JSON value but null."""
    value = json_value(choose)
    return "" if value is None else value


def json_patch(choose: Random, document: Any, *, inside: bool = False) -> list[dict[str, Any]]:
    """A patch, often one that applies; `inside` leaves the root an object."""
    operations: list[dict[str, Any]] = []
    for _ in range(choose.randrange(4)):
        operation = _operation(choose, document, inside=inside)
        operations.append(operation)
        try:
            document = protocol.patch(document, [operation], official=True)
        except protocol.PatchError:
            break
    return operations


def _operation(choose: Random, document: Any, *, inside: bool) -> dict[str, Any]:
    at, value = _place(choose, document)
    kind = choose.choice(("replace", "add", "remove", "test", "copy", "move", "add", "test"))
    if kind == "test":
        return {"op": kind, "path": at, "value": value if choose.randrange(3) else "other"}
    if kind == "add" and at:
        # A new member beside the place, or an element: before it, or at the end.
        at = at.rpartition("/")[0] + "/" + choose.choice(("new", "-", "0", "1", "9"))
    elif inside and not at:
        at = "/a"
    if kind in ("copy", "move"):
        source = _place(choose, document)[0]
        if (inside and not source) or (kind == "move" and at.startswith(f"{source}/")):
            # Nothing moves into itself, and the root of an activity is not moved away.
            source = "/b"
        return {"op": kind, "from": source, "path": at}
    if kind == "remove":
        return {"op": kind, "path": at}
    return {"op": kind, "path": at, "value": json_value(choose, 2)}


def _place(choose: Random, document: Any) -> tuple[str, Any]:
    """A pointer into the document and what is there; now and then one that leads nowhere."""
    pointer = ""
    while isinstance(document, dict | list) and document and not happens(choose, 3):
        if isinstance(document, dict):
            key = choose.choice(list(document))
            document = document[key]
        else:
            key = str(choose.randrange(len(document)))
            document = document[int(key)]
        pointer += "/" + key.replace("~", "~0").replace("/", "~1")
    if happens(choose, 8):
        return f"{pointer}/missing/{choose.randrange(3)}", document
    return pointer, document


# -- messages -----------------------------------------------------------------------------------

ROLES: Final = ("assistant", "user", "system", "developer")
PARTS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "text", "text": "seen"},
    {"type": "text", "text": "", "id": "p", "metadata": [None]},
    {"type": "image", "source": {"type": "url", "value": "https://example.org/a.png"}},
    {"type": "audio", "source": {"type": "data", "value": "AA==", "mimeType": "audio/wav"}},
    {"type": "video", "source": {"type": "file", "value": "h", "provider": "p"}, "metadata": 0},
    {"type": "document", "source": {"type": "file", "value": "h", "mimeType": "text/csv"}},
)


def some(choose: Random, one_in: int, **fields: Any) -> dict[str, Any]:
    """Each field, now and then."""
    return {key: value for key, value in fields.items() if happens(choose, one_in)}


def some_messages(choose: Random) -> list[dict[str, Any]]:
    """Up to three messages of any role, under ids that events use too."""
    roles = (*ROLES, "tool", "activity", "reasoning")
    names = choose.sample(("m1", "m2", "m3", "r1", "a1", "o1", "n1"), choose.randrange(4))
    return [message(choose, choose.choice(roles), name) for name in names]


def message(choose: Random, role: str, name: str) -> dict[str, Any]:
    """A message of that role and id."""
    made: dict[str, Any] = {"id": name, "role": role, "content": "said"}
    made |= some(choose, 4, metadata=json_object(choose, 2))
    if role == "activity":
        return {**made, "activityType": "plan", "content": json_object(choose)}
    made |= some(choose, 4, encryptedValue="opaque")
    if role == "tool":
        return made | {"toolCallId": "c1"} | some(choose, 3, error="failed")
    if role == "user" and happens(choose, 3):
        made["content"] = choose.sample(PARTS, 2)
    if role == "assistant":
        called = {"name": "find", "arguments": "{}"}
        calls = [{"id": "c1", "type": "function", "function": called}]
        made |= some(choose, 2, toolCalls=calls)
    return made if role == "reasoning" else made | some(choose, 6, name="Bob")
