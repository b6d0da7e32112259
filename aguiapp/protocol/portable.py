"""Whether a JSON Patch means the same to every engine.

fast-json-patch, which the official client uses, finds what JavaScript objects inherit, reads
"01" and "" as array indexes, appends behind the end of an array, makes circles, and passes over
operations below a scalar root. What it does otherwise than RFC 6902 was measured with the client.
"""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from aguiapp.protocol.patch import MAX_OPERATIONS, PatchError, PatchLimit, Work, split

# Of Object.prototype: there in every object, unless one has its own.
_INHERITED: Final = frozenset(
    {
        "__defineGetter__",
        "__defineSetter__",
        "__lookupGetter__",
        "__lookupSetter__",
        "__proto__",
        "constructor",
        "hasOwnProperty",
        "isPrototypeOf",
        "propertyIsEnumerable",
        "prototype",
        "toLocaleString",
        "toString",
        "valueOf",
    }
)
_CANONICAL: Final = re.compile("0|[1-9][0-9]{0,8}")


class Outcome(NamedTuple):
    """What a patch does by RFC 6902: the new document, or why there is none; and whether that
    holds everywhere."""

    portable: bool
    document: Any
    problem: PatchError | None


def attempt(document: Any, operations: Sequence[Any]) -> Outcome:
    """Apply a patch and judge each operation on the way; raises PatchLimit."""
    if len(operations) > MAX_OPERATIONS:
        raise PatchLimit(f"more than {MAX_OPERATIONS} operations in one patch")
    work, portable = Work(document), True
    for number, operation in enumerate(operations, 1):
        portable = portable and _is_portable(work.root, operation, number == len(operations))
        try:
            work.apply(operation)
        except PatchLimit:
            raise
        except PatchError as problem:
            return Outcome(portable, None, problem)
    return Outcome(portable, work.root, None)


class _Elsewhere(Exception):
    """Some engine reads this otherwise."""


class _Missing(Exception):
    """Every engine refuses this."""


def _is_portable(root: Any, operation: Any, last: bool) -> bool:
    name, tokens = operation["op"], split(operation["path"])
    if tokens and root is not None and not isinstance(root, dict | list):
        return False
    try:
        if name in ("move", "copy"):
            value = _source(root, name, split(operation["from"]), tokens)
            if tokens:
                _target(root, tokens, _Elsewhere)
            else:
                _root(name, value, last)
        elif not tokens:
            _root(name, operation.get("value"), last)
        elif name == "add":
            _target(root, tokens, _Missing)
        else:
            _walk(root, tokens)
    except _Elsewhere:
        return False
    except _Missing:
        return True
    return True


def _root(name: str, value: Any, last: bool) -> None:
    """Below a scalar root operations do nothing there, instead of failing."""
    scalar = not isinstance(value, dict | list)
    if name == "remove" or (name != "test" and scalar and not last):
        raise _Elsewhere


def _source(root: Any, name: str, source: list[str], target: list[str]) -> Any:
    """What is moved or copied: there it may also be a part of a text, or what is inherited."""
    if name == "move" and len(source) < len(target) and target[: len(source)] == source:
        raise _Elsewhere
    for token in source:
        if isinstance(root, str) or (isinstance(root, list) and not _CANONICAL.fullmatch(token)):
            raise _Elsewhere
        try:
            root = _child(root, token)
        except _Missing:
            # Nothing is copied to the root then, and the patch goes on.
            raise (_Missing if target else _Elsewhere) from None
    return root


def _walk(root: Any, tokens: list[str]) -> Any:
    for token in tokens:
        root = _child(root, token)
    return root


def _child(container: Any, token: str) -> Any:
    if isinstance(container, dict):
        if token in _INHERITED:
            raise _Elsewhere
        if token in container:
            return container[token]
    elif isinstance(container, list):
        if _CANONICAL.fullmatch(token):
            if int(token) < len(container):
                return container[int(token)]
        elif not token or token.isdigit():
            raise _Elsewhere
    raise _Missing


def _target(root: Any, tokens: list[str], behind: type[Exception]) -> None:
    """Where something is inserted; `behind` is raised for places behind the end of an array.

    The array that something is moved out of is shorter by then: in doubt it is elsewhere.
    """
    parent, last = _walk(root, tokens[:-1]), tokens[-1]
    if isinstance(parent, dict):
        if last in _INHERITED:
            raise _Elsewhere
    elif isinstance(parent, list) and last != "-":
        if not last or (last.isdigit() and not _CANONICAL.fullmatch(last)):
            raise _Elsewhere
        if not last.isdigit():
            raise behind
        if int(last) >= len(parent) + (behind is _Missing):
            raise behind
