"""Strict JSON shapes: each checks a value, strips what it does not know, coerces nothing.

A shape returns the very object it was given unless something had to be removed, so the
common case allocates nothing. Problems and findings go to a Report, because an input must
list all its mistakes at once. Unknown *members of a union* are dropped, not refused; the
removal cascades upward until something optional or an array element can go.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from aguiapp.protocol.events import Finding, text_of

SAFE_INTEGER: Final = 2**53 - 1
MAX_PROBLEMS: Final = 20
DROP: Final = object()

_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)*", re.DOTALL)


class Report:
    """Collects what is wrong (problems) and what was removed (findings)."""

    __slots__ = ("findings", "problems", "tags_required")

    def __init__(self, *, tags_required: bool = False) -> None:
        self.problems: list[tuple[str, str]] = []
        self.findings: list[Finding] = []
        self.tags_required = tags_required

    def problem(self, path: str, message: str) -> None:
        self.problems.append((path, message))

    def strip(self, path: str, message: str) -> None:
        self.findings.append(Finding("strip", message, path))

    def forget(self, problems: int, findings: int) -> None:
        """Take back what was said about a value that is dropped as a whole."""
        del self.problems[problems:]
        del self.findings[findings:]


class Shape:
    """Anything that can check a value."""

    __slots__ = ()

    @abstractmethod
    def check(self, value: Any, path: str, report: Report) -> Any:
        """Return the value without unknown parts, or DROP; note what is wrong in the report."""


class Scalar(Shape):
    """A value judged as a whole by one predicate."""

    __slots__ = ("name", "ok")

    def __init__(self, name: str, ok: Callable[[Any], bool]) -> None:
        self.name = name
        self.ok = ok

    def check(self, value: Any, path: str, report: Report) -> Any:
        if not self.ok(value):
            report.problem(path, f"must be {self.name}, not {text_of(value)}")
        return value


class Optional11(Shape):
    """A string of protocol 1.1: kept when usable, never a reason to refuse."""

    __slots__ = ()

    def check(self, value: Any, path: str, report: Report) -> Any:
        return value if isinstance(value, str) else DROP


def _is_integer(value: Any) -> bool:
    """JSON has one number type: 5.0 is the integer 5, and true is not a number."""
    if value.__class__ is float:
        return bool(value.is_integer()) and -SAFE_INTEGER <= value <= SAFE_INTEGER
    if value.__class__ is bool or not isinstance(value, int):
        return False
    return -SAFE_INTEGER <= value <= SAFE_INTEGER


TEXT = Scalar("a string", lambda value: isinstance(value, str))
BOOLEAN = Scalar("true or false", lambda value: value.__class__ is bool)
INTEGER = Scalar("an integer within 2^53-1", _is_integer)
COUNT = Scalar(
    "a non-negative integer within 2^53-1", lambda value: _is_integer(value) and value >= 0
)
OBJECT = Scalar("an object", lambda value: isinstance(value, dict))
ANY = Scalar("left out instead of null", lambda value: value is not None)
JSON = Scalar("JSON", lambda value: True)
POINTER = Scalar(
    "a JSON Pointer",
    lambda value: isinstance(value, str) and _POINTER.fullmatch(value) is not None,
)


def choice(*values: str) -> Scalar:
    """A string out of a closed set."""
    allowed = frozenset(values)
    return Scalar(
        " or ".join(repr(value) for value in values),
        lambda value: isinstance(value, str) and value in allowed,
    )


class Struct(Shape):
    """An object with known members; unknown ones are stripped unless it is open."""

    __slots__ = ("fields", "is_open", "needed", "required", "texts")

    def __init__(
        self,
        required: Mapping[str, Shape],
        optional: Mapping[str, Shape] | None = None,
        *,
        is_open: bool = False,
    ) -> None:
        self.fields: dict[str, Shape] = {**required, **(optional or {})}
        self.required = tuple(required)
        self.needed = frozenset(required)
        self.texts = frozenset(key for key, shape in self.fields.items() if shape is TEXT)
        self.is_open = is_open

    def check(self, value: Any, path: str, report: Report) -> Any:
        if not isinstance(value, dict):
            report.problem(path, f"must be an object, not {text_of(value)}")
            return value
        prefix = f"{path}." if path else ""
        changed: dict[str, Any] | None = None
        for key, item in value.items():
            shape = self.fields.get(key)
            if shape is TEXT and item.__class__ is str:
                continue
            checked = self._member(shape, item, f"{prefix}{key}", report)
            if checked is item:
                continue
            if checked is DROP and key in self.required:
                return DROP
            changed = dict(value) if changed is None else changed
            if checked is DROP:
                del changed[key]
                report.strip(f"{prefix}{key}", "unknown to this protocol version, removed")
            else:
                changed[key] = checked
        for key in self.required:
            if key not in value:
                report.problem(f"{prefix}{key}", "is required")
        return value if changed is None else changed

    def _member(self, shape: Shape | None, item: Any, path: str, report: Report) -> Any:
        if shape is None:
            return item if self.is_open else DROP
        return shape.check(item, path, report)


class ListOf(Shape):
    """An array; elements that are unknown union members are taken out."""

    __slots__ = ("item", "least")

    def __init__(self, item: Shape, *, least: int = 0) -> None:
        self.item = item
        self.least = least

    def check(self, value: Any, path: str, report: Report) -> Any:
        if not isinstance(value, list):
            report.problem(path, f"must be an array, not {text_of(value)}")
            return value
        kept = []
        same = True
        for position, element in enumerate(value):
            mark = (len(report.problems), len(report.findings))
            checked = self.item.check(element, f"{path}.{position}", report)
            if checked is DROP:
                report.forget(*mark)
                report.strip(f"{path}.{position}", "unknown member of a union, removed")
                same = False
                continue
            same = same and checked is element
            kept.append(checked)
        if len(kept) < self.least:
            report.problem(path, f"must hold at least {self.least} element")
        return value if same else kept


class Tagged(Shape):
    """A union told apart by one string member."""

    __slots__ = ("members", "tag")

    def __init__(self, tag: str, members: Mapping[str, Shape]) -> None:
        self.tag = tag
        self.members = dict(members)

    def check(self, value: Any, path: str, report: Report) -> Any:
        if not isinstance(value, dict):
            report.problem(path, f"must be an object, not {text_of(value)}")
            return value
        name = value.get(self.tag)
        member = self.members.get(name) if isinstance(name, str) else None
        if member is not None:
            return member.check(value, path, report)
        if report.tags_required and not isinstance(name, str):
            report.problem(f"{path}.{self.tag}", f"must be {_one_of(self.members)}")
            return value
        return DROP


class TextOr(Shape):
    """A string, or else the other shape."""

    __slots__ = ("other",)

    def __init__(self, other: Shape) -> None:
        self.other = other

    def check(self, value: Any, path: str, report: Report) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            report.problem(path, f"must be a string or an array, not {text_of(value)}")
            return value
        return self.other.check(value, path, report)


def _one_of(names: Iterable[str]) -> str:
    return "one of " + ", ".join(sorted(names))
