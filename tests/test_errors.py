"""Every code that a client can meet is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from aguiapp import errors
from aguiapp.protocol import InputError

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "reference" / "errors.md"
CODE = re.compile(r"[a-z]+(?:_[a-z0-9]+)*")


def family(kind: type[errors.AguiError]) -> Iterator[type[errors.AguiError]]:
    """A class and all that inherit from it."""
    yield kind
    for child in kind.__subclasses__():
        yield from family(child)


def literals() -> set[str]:
    """What stands in the source as the code of an error."""
    found = set()
    for path in (ROOT / "aguiapp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            given = [k.value for k in node.keywords if k.arg == "code"]
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in ("InputError", "LimitExceeded"):
                given += node.args[:1]
            found |= {
                value.value
                for value in given
                if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value
            }
    return found


CODES = {kind.code for kind in family(errors.AguiError)} | set(errors.RUN_ERROR_CODES) | literals()


def test_codes_are_stable_words() -> None:
    assert len(CODES) > 25
    assert all(CODE.fullmatch(code) for code in CODES)
    assert InputError("c", "m", status=400).code == "c"


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_is_documented(code: str) -> None:
    assert f"`{code}`" in DOCUMENT.read_text()


def test_every_code_of_a_run_is_said_in_public_words() -> None:
    for code in literals() & set(errors.RUN_ERROR_CODES):
        assert errors.RUN_ERROR_CODES[code].endswith(".")


def test_every_refusal_has_a_status_and_a_sentence() -> None:
    for kind in family(errors.AguiError):
        error = kind()
        assert 400 <= error.status < 600
        assert error.message.endswith("."), kind
        assert error.message[0].isupper()
        assert str(error) == error.message


def test_details_and_words_can_be_given() -> None:
    error = errors.NotFound("No such order.", code="no_order", details={"order": 7})
    assert error.as_dict() == {
        "error": {"code": "no_order", "message": "No such order.", "details": {"order": 7}}
    }
