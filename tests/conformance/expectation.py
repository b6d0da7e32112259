"""Compares what a client made of a stream with what a case expects of it."""

from collections.abc import Callable
from typing import Any, Final

from tests.conformance.runner import Seen
from tests.protocol import cases

_ABSENT: Final = object()
Compare = Callable[[Any, Seen], object]


def mismatches(expect: dict[str, Any], seen: Seen) -> dict[str, str]:
    """Return expectation key -> what was seen instead, for every key that is not met."""
    found = {}
    for key, wanted in expect.items():
        told = _KEYS[key](wanted, seen)
        if told is not None:
            found[key] = f"wanted {wanted!r}, saw {told!r}"
    return found


def subset(wanted: Any, actual: Any) -> bool:
    """Match arrays element by element, objects by the named members, the rest by JSON value."""
    if isinstance(wanted, list):
        return (
            isinstance(actual, list)
            and len(wanted) == len(actual)
            and all(map(subset, wanted, actual))
        )
    if isinstance(wanted, dict):
        return isinstance(actual, dict) and all(
            key in actual and subset(value, actual[key]) for key, value in wanted.items()
        )
    return cases.same(wanted, actual)


def at(value: Any, path: str) -> Any:
    """Follow a dotted path over own members and indexes in range; _ABSENT when it ends early."""
    for segment in path.split("."):
        if isinstance(value, dict) and segment in value:
            value = value[segment]
        elif isinstance(value, list) and _is_index(segment) and int(segment) < len(value):
            value = value[int(segment)]
        else:
            return _ABSENT
    return value


def exists(value: Any, path: str) -> bool:
    """Whether something is there; an explicit null is."""
    return at(value, path) is not _ABSENT


def _is_index(segment: str) -> bool:
    return segment.isascii() and segment.isdigit() and str(int(segment)) == segment


# Each returns what was seen instead, or None where the expectation is met.


def _equal(read: Callable[[Seen], Any]) -> Compare:
    def compare(wanted: Any, seen: Seen) -> object:
        actual = read(seen)
        return None if cases.same(wanted, actual) else (actual, seen.error)

    return compare


def _within(read: Callable[[Seen], Any]) -> Compare:
    def compare(wanted: Any, seen: Seen) -> object:
        actual = read(seen)
        return None if subset(wanted, actual) else (actual,)

    return compare


def _without(read: Callable[[Seen], Any]) -> Compare:
    def compare(paths: list[str], seen: Seen) -> object:
        actual = read(seen)
        return [path for path in paths if exists(actual, path)] or None

    return compare


def _event_paths(paths: dict[str, Any], seen: Seen) -> object:
    wrong = {}
    for path, value in paths.items():
        actual = at(seen.events, path)
        if actual is _ABSENT or not cases.same(value, actual):
            wrong[path] = "absent" if actual is _ABSENT else actual
    return wrong or None


def _types(seen: Seen) -> list[str]:
    return [event["type"] for event in seen.events]


def _error_contains(text: str, seen: Seen) -> object:
    return None if not text or (seen.rejected and text in seen.error) else (seen.error,)


def _error_words(words: list[str], seen: Seen) -> object:
    missed = [word for word in words if word not in seen.error]
    return None if seen.rejected and not missed else (seen.error,)


def _run_error(wanted: bool | str, seen: Seen) -> object:
    said = seen.run_error
    if isinstance(wanted, bool):
        return None if wanted == (said is not None) else (said,)
    return None if said is not None and wanted in said else (said,)


def _warnings(texts: list[str], seen: Seen) -> object:
    missed = [text for text in texts if not any(text in warning for warning in seen.warnings)]
    return (seen.warnings,) if missed else None


def _no_warnings(wanted: bool, seen: Seen) -> object:
    return (seen.warnings,) if wanted and seen.warnings else None


def _absent_types(types: list[str], seen: Seen) -> object:
    return sorted(set(types) & set(_types(seen))) or None


_KEYS: Final[dict[str, Compare]] = {
    "outcome": _equal(lambda seen: seen.outcome),
    "errorContains": _error_contains,
    "errorWords": _error_words,
    "errorIndex": _equal(lambda seen: seen.index),
    "rule": _equal(lambda seen: seen.rule),
    "runError": _run_error,
    "eventTypes": _equal(_types),
    "eventTypesAbsent": _absent_types,
    "eventPaths": _event_paths,
    "eventAbsentPaths": _without(lambda seen: seen.events),
    "warnings": _warnings,
    "noWarnings": _no_warnings,
    "messageCount": _equal(lambda seen: len(seen.messages)),
    "messages": _within(lambda seen: seen.messages),
    "messageAbsentPaths": _without(lambda seen: seen.messages),
    "state": _within(lambda seen: seen.state),
    "stateAbsentPaths": _without(lambda seen: seen.state),
    "interrupts": _within(lambda seen: seen.interrupts),
    "pendingToolCalls": _equal(lambda seen: seen.pending),
    "request": _within(lambda seen: seen.request),
    "requestAbsentPaths": _without(lambda seen: seen.request),
}

KEYS: Final = _KEYS.keys()
