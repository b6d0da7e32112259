"""Case files: one JSON object, one whole stream, and what a client has to make of it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

OWN = Path(__file__).with_name("cases")
# Overrides for other clients describe their gaps; the last of these that a case has, counts.
LANES = ("typescript", "aguiapp")

_TEXTS = "a list of strings"


class CaseError(Exception):
    """A case file that cannot be judged: which file, which key, and why."""


@dataclass(frozen=True, slots=True)
class Case:
    """One stream with its effective expectation; `own` cases may use the keys of our own."""

    name: str
    stream: list[Any]
    expect: dict[str, Any]
    own: bool
    input: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    official: dict[str, Any] | None = None

    def first_run(self) -> dict[str, str]:
        """Return the ids the request uses: those of the first RUN_STARTED, as upstream does."""
        found = {"threadId": "thread", "runId": "run"}
        for event in reversed(self.stream):
            if isinstance(event, dict) and event.get("type") == "RUN_STARTED":
                found.update({key: event[key] for key in found if isinstance(event.get(key), str)})
        return found


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is(kind: type | tuple[type, ...], value: Any) -> bool:
    return isinstance(value, kind)


_text = ("a string", partial(_is, str))
_object = ("an object", partial(_is, dict))
_list = ("an array", partial(_is, list))
_texts = (_TEXTS, _is_texts)
_count = ("a count", _is_count)
_flag = ("true or false", partial(_is, bool))

_EXPECT = {
    "outcome": ('"completed" or "failed"', lambda value: value in ("completed", "failed")),
    "errorContains": _text,
    "runError": ("true, false or a string", partial(_is, (bool, str))),
    "eventTypes": _texts,
    "eventTypesAbsent": _texts,
    "eventPaths": _object,
    "eventAbsentPaths": _texts,
    "warnings": _texts,
    "noWarnings": _flag,
    "messageCount": _count,
    "messages": _list,
    "state": ("JSON", lambda value: True),
    "request": _object,
    "requestAbsentPaths": _texts,
}
_OWN_EXPECT = {
    "rule": _text,
    "errorIndex": _count,
    "messageAbsentPaths": _texts,
    "stateAbsentPaths": _texts,
    "interrupts": _list,
    "pendingToolCalls": _texts,
}
EXPECT = _EXPECT.keys() | _OWN_EXPECT.keys()
_TOP = {
    "name": _text,
    "area": _text,
    "description": _text,
    "specPage": _text,
    "kill": _text,
    "client": _object,
    "input": _object,
    "stream": _list,
    "expect": _object,
    "expectOverrides": _object,
}
_OWN_TOP = {"rules": _texts, "official": _object}
_REQUIRED = ("name", "area", "description", "stream", "expect")
_CLIENT = {"maxProtocolVersion": _text}
_OWN_CLIENT = {"strict": _flag}
_INPUT = {
    "messages": _list,
    "state": ("JSON", lambda value: True),
    "tools": _list,
    "context": _list,
    "resume": _list,
    "forwardedProps": ("JSON", lambda value: True),
}
_OFFICIAL = {"differs": _text, "in": _texts}


def files(folder: Path) -> list[Path]:
    """Every case file below a folder, in a stable order."""
    return sorted(folder.rglob("*.json"))


def own_cases() -> Iterator[Case]:
    """Read our own cases."""
    return (read(path) for path in files(OWN))


def read(path: Path) -> Case:
    """Read one file; files below our own folder may use our own keys."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as problem:
        raise CaseError(f"{path}: not JSON: {problem}") from None
    return parse(value, str(path), path.stem, own=path.is_relative_to(OWN))


def parse(value: Any, where: str, stem: str, *, own: bool) -> Case:
    """Judge a case and resolve its expectation for our lane."""
    if not isinstance(value, dict):
        raise CaseError(f"{where}: a case is an object")
    _check(value, {**_TOP, **(_OWN_TOP if own else {})}, where, "")
    for key in _REQUIRED:
        if key not in value:
            raise CaseError(f"{where}: {key} is missing")
    if value["name"] != stem:
        raise CaseError(f"{where}: name is {value['name']!r}, not the file's")
    _check(value.get("client", {}), {**_CLIENT, **(_OWN_CLIENT if own else {})}, where, "client.")
    _check(value.get("input", {}), _INPUT, where, "input.")
    if "official" in value:
        _check(value["official"], _OFFICIAL, where, "official.")
        if value["official"].keys() != _OFFICIAL.keys() or not value["official"]["in"]:
            raise CaseError(f"{where}: official needs differs and in")
    return Case(
        name=value["name"],
        stream=value["stream"],
        expect=_effective(value, where, own=own),
        own=own,
        input=value.get("input", {}),
        client=value.get("client", {}),
        rules=tuple(value.get("rules", ())),
        official=value.get("official"),
    )


def _effective(value: dict[str, Any], where: str, *, own: bool) -> dict[str, Any]:
    known = {**_EXPECT, **(_OWN_EXPECT if own else {})}
    expect: dict[str, Any] = value["expect"]
    _check(expect, known, where, "expect.")
    for lane, override in value.get("expectOverrides", {}).items():
        prefix = f"expectOverrides.{lane}"
        if not isinstance(override, dict):
            raise CaseError(f"{where}: {prefix} must be an object")
        if not isinstance(override.get("intentional"), str):
            raise CaseError(f"{where}: {prefix}.intentional is missing")
        _check(override, {**known, "intentional": _text}, where, f"{prefix}.")
    for lane in LANES:
        expect = {**expect, **value.get("expectOverrides", {}).get(lane, {})}
    expect.pop("intentional", None)
    if not expect.keys() - {"outcome"}:
        raise CaseError(f"{where}: expect names nothing beside the outcome")
    return expect


def _check(value: dict[str, Any], known: dict[str, Any], where: str, prefix: str) -> None:
    for key, item in value.items():
        if key not in known:
            raise CaseError(f"{where}: unknown key {prefix}{key}")
        what, fits = known[key]
        if not fits(item):
            raise CaseError(f"{where}: {prefix}{key} must be {what}")
