"""A run's input at rest: the posted text, each message of it kept once per thread by its hash."""

from __future__ import annotations

import hashlib
import json
from json.decoder import JSONDecoder, scanstring  # type: ignore[attr-defined]
from typing import Any

from aguiapp.models import InputMessage, Run
from aguiapp.store import sql

_decode = JSONDecoder(strict=True).raw_decode
_SPACE = " \t\n\r"


def _skip(text: str, index: int) -> int:
    while text[index] in _SPACE:
        index += 1
    return index


def _array_slices(text: str, index: int) -> list[tuple[int, int]]:
    """Start and end of each element of the array that begins at `index`."""
    slices = []
    index = _skip(text, index + 1)
    while text[index] != "]":
        _, end = _decode(text, index)
        slices.append((index, end))
        index = _skip(text, end)
        if text[index] == ",":
            index = _skip(text, index + 1)
    return slices


def _message_slices(text: str) -> list[tuple[int, int]]:
    """Where the elements of the top-level member `messages` stand in a valid JSON object."""
    index = _skip(text, _skip(text, 0) + 1)
    while text[index] != "}":
        name, index = scanstring(text, index + 1, True)
        index = _skip(text, _skip(text, index) + 1)
        if name == "messages" and text[index] == "[":
            return _array_slices(text, index)
        _, index = _decode(text, index)
        index = _skip(text, index)
        if text[index] == ",":
            index = _skip(text, index + 1)
    return []


def cut(text: str) -> tuple[str, dict[str, str]]:
    """The template kept on the run, and its messages by hash.

    The template is a JSON array: text, hash, text, hash, …, text.
    """
    parts: list[str] = []
    messages: dict[str, str] = {}
    at = 0
    for start, end in _message_slices(text):
        payload = text[start:end]
        name = digest(payload)
        messages[name] = payload
        parts += (text[at:start], name)
        at = end
    parts.append(text[at:])
    return json.dumps(parts), messages


def digest(text: str) -> str:
    """SHA-256 of the text in hexadecimal; lone surrogates count as they are."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def save(thread_id: int, text: str) -> str:
    """Store the messages that the thread does not hold yet; returns the run's template."""
    template, messages = cut(text)
    table = InputMessage.objects.using(sql.database())
    table.bulk_create(
        [InputMessage(thread_id=thread_id, hash=name, payload=m) for name, m in messages.items()],
        ignore_conflicts=True,
    )
    return template


def rebuild(run: Run) -> str:
    """The text that was posted, byte for byte; "" when none was."""
    if not run.input:
        return ""
    parts: list[Any] = json.loads(run.input)
    table = InputMessage.objects.using(sql.database()).filter(
        thread_id=run.thread_id, hash__in=parts[1::2]
    )
    payloads = dict(table.values_list("hash", "payload"))
    return "".join(payloads[part] if i % 2 else part for i, part in enumerate(parts))
