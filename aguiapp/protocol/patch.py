"""RFC 6902 JSON Patch by path copying: atomic, and the input is never touched.

Only the containers on the way to a change are copied, once per call; everything else is
shared between the old and the new document, so a delta costs the depth it reaches, not the
size of the state. Values are therefore to be treated as immutable by whoever holds them.
"""

from collections.abc import Sequence
from typing import Any, Final

from aguiapp.protocol.events import text_of

MAX_OPERATIONS: Final = 10_000
# One 1.9 kB delta of copies-into-itself takes the official client down with 4 GB.
MAX_COPIED: Final = 100_000
# A long text weighs one value for so many characters.
CHARACTERS: Final = 160

# fast-json-patch refuses to write these; a state that holds them breaks JavaScript clients.
_FORBIDDEN = "__proto__"


class PatchError(Exception):
    """The patch does not apply to this document; the document is unchanged."""


class PatchLimit(PatchError):
    """The patch asks for more work or growth than one delta may."""


def patch(
    document: Any,
    operations: Sequence[Any],
    *,
    max_operations: int = MAX_OPERATIONS,
    max_copied: int = MAX_COPIED,
    official: bool = False,
) -> Any:
    """Apply all operations or none; `official` adds the array indexes fast-json-patch takes."""
    if not isinstance(operations, list | tuple):
        raise PatchError(f"a patch is an array, not {text_of(operations)}")
    if len(operations) > max_operations:
        raise PatchLimit(f"more than {max_operations} operations in one patch")
    work = Work(document, max_copied, official=official)
    for operation in operations:
        work.apply(operation)
    return work.root


def split(pointer: Any) -> list[str]:
    """Turn a JSON Pointer into its tokens."""
    if not isinstance(pointer, str):
        raise PatchError(f"a path is a string, not {text_of(pointer)}")
    if not pointer:
        return []
    if pointer[0] != "/":
        raise PatchError(f"a path starts with a slash: {text_of(pointer)}")
    tokens = pointer[1:].split("/")
    if "~" not in pointer:
        return tokens
    return [_unescape(token) for token in tokens]


def _unescape(token: str) -> str:
    plain = token.replace("~0", "").replace("~1", "")
    if "~" in plain:
        raise PatchError(f"bad escape in path token {text_of(token)}")
    return token.replace("~1", "/").replace("~0", "~")


def same(left: Any, right: Any) -> bool:
    """Compare as JSON does: 1 equals 1.0, true equals only true."""
    pairs = [(left, right)]
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, dict) and isinstance(b, dict):
            if a.keys() != b.keys():
                return False
            pairs.extend((a[key], b[key]) for key in a)
        elif isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                return False
            pairs.extend(zip(a, b, strict=True))
        elif isinstance(a, bool) or isinstance(b, bool):
            if a is not b:
                return False
        elif a != b:
            return False
    return True


def _index(container: list[Any], token: str) -> int:
    """The position of an existing element."""
    if not _digits(token) or (token.startswith("0") and len(token) > 1):
        raise PatchError(f"not an array index: {text_of(token)}")
    if int(token) >= len(container):
        raise PatchError(f"array index out of range: {text_of(token)}")
    return int(token)


def _digits(token: str) -> bool:
    # int() refuses more than 4300 digits; no array is longer than 18 of them can say.
    return len(token) <= 18 and token.isascii() and token.isdigit()


def _child(container: Any, token: str) -> Any:
    if isinstance(container, dict):
        if token not in container:
            raise PatchError(f"path does not exist at {text_of(token)}")
        return container[token]
    if isinstance(container, list):
        return container[_index(container, token)]
    raise PatchError(f"nothing lies below a scalar: {text_of(token)}")


class Work:
    """One patch in progress: the root so far and the containers this call may change.

    `apply` raises PatchError, or PatchLimit, and may leave a half done patch behind.
    """

    __slots__ = ("_copied", "_official", "_owned", "root")

    def __init__(
        self, document: Any, max_copied: int = MAX_COPIED, *, official: bool = False
    ) -> None:
        self.root = document
        self._official = official
        self._copied = max_copied
        self._owned: dict[int, Any] = {}

    def apply(self, operation: Any) -> None:
        if not isinstance(operation, dict):
            raise PatchError(f"an operation is an object, not {text_of(operation)}")
        name = operation.get("op")
        if not isinstance(name, str) or name not in _METHODS:
            raise PatchError(f"unknown operation {text_of(name)}")
        for member in _NEEDS[name]:
            if member not in operation:
                raise PatchError(f"{name} needs {member!r}")
        _METHODS[name](self, split(operation["path"]), operation)

    def get(self, tokens: list[str]) -> Any:
        value = self.root
        for token in tokens:
            value = _child(value, token)
        return value

    def add(self, tokens: list[str], operation: dict[str, Any]) -> None:
        self.insert(tokens, operation["value"])

    def insert(self, tokens: list[str], value: Any) -> None:
        if not tokens:
            self.root = value
            return
        _writable(tokens)
        parent = self._own(tokens)
        last = tokens[-1]
        if isinstance(parent, list):
            parent.insert(self._slot(parent, last), value)
        else:
            parent[last] = value

    def _slot(self, parent: list[Any], token: str) -> int:
        if token in ("-", str(len(parent))):
            return len(parent)
        # fast-json-patch reads "" as 0 and "01" as 1 here, and so does our fold.
        if self._official and (not token or _digits(token)):
            at = int(token or 0)
            if at <= len(parent):
                return at
        return _index(parent, token)

    def remove(self, tokens: list[str], operation: dict[str, Any]) -> None:
        self.take(tokens)

    def take(self, tokens: list[str]) -> Any:
        if not tokens:
            value, self.root = self.root, None
            return value
        _writable(tokens)
        self.get(tokens)
        parent = self._own(tokens)
        if isinstance(parent, list):
            return parent.pop(_index(parent, tokens[-1]))
        return parent.pop(tokens[-1])

    def replace(self, tokens: list[str], operation: dict[str, Any]) -> None:
        if not tokens:
            self.root = operation["value"]
            return
        _writable(tokens)
        self.get(tokens)
        parent = self._own(tokens)
        if isinstance(parent, list):
            parent[_index(parent, tokens[-1])] = operation["value"]
        else:
            parent[tokens[-1]] = operation["value"]

    def move(self, tokens: list[str], operation: dict[str, Any]) -> None:
        source = split(operation["from"])
        if source == tokens:
            self.get(source)
            return
        if tokens[: len(source)] == source:
            raise PatchError("cannot move a value into itself")
        value = self.get(source)
        self.take(source)
        self.insert(tokens, value)

    def copy(self, tokens: list[str], operation: dict[str, Any]) -> None:
        value = self.get(split(operation["from"]))
        self._share(value)
        self.insert(tokens, value)

    def test(self, tokens: list[str], operation: dict[str, Any]) -> None:
        if not same(self.get(tokens), operation["value"]):
            raise PatchError(f"test failed at {text_of(operation['path'])}")

    def _share(self, value: Any) -> None:
        """From here on two places hold these containers, so they may not change in place."""
        pending = [value]
        while pending:
            item = pending.pop()
            self._copied -= 1
            if isinstance(item, dict):
                pending.extend(item.values())
            elif isinstance(item, list):
                pending.extend(item)
            elif isinstance(item, str):
                self._copied -= len(item) // CHARACTERS
                continue
            else:
                continue
            if self._copied < 0:
                break
            self._owned.pop(id(item), None)
        if self._copied < 0:
            raise PatchLimit("one patch copies too much")

    def _own(self, tokens: list[str]) -> Any:
        """Copy every container down to the parent of the last token, once per call."""
        node = self.root = self._mine(self.root)
        for token in tokens[:-1]:
            child = _child(node, token)
            mine = self._mine(child)
            if mine is not child:
                node[_index(node, token) if isinstance(node, list) else token] = mine
            node = mine
        return node

    def _mine(self, container: Any) -> Any:
        if id(container) in self._owned:
            return container
        if not isinstance(container, dict | list):
            raise PatchError("nothing lies below a scalar")
        fresh = container.copy()
        self._owned[id(fresh)] = fresh
        return fresh


def _writable(tokens: list[str]) -> None:
    if _FORBIDDEN in tokens or tokens[-2:] == ["constructor", "prototype"]:
        raise PatchError("__proto__ and constructor/prototype cannot be written")


_METHODS: Final = {
    "add": Work.add,
    "remove": Work.remove,
    "replace": Work.replace,
    "move": Work.move,
    "copy": Work.copy,
    "test": Work.test,
}
_NEEDS: Final = {
    "add": ("path", "value"),
    "remove": ("path",),
    "replace": ("path", "value"),
    "move": ("path", "from"),
    "copy": ("path", "from"),
    "test": ("path", "value"),
}
