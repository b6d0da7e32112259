"""JSON by rules of our own: what is read and written is the same on every library.

Reading refuses NaN and out-of-range numbers by name, repeated keys, and depth beyond a limit
that is measured on the text before the recursive parser sees it, so that every Python gives
the same verdict. Big integers stay exact and lone surrogates stay as they are. Writing checks
the value first and only then hands it to the fast encoder, which would silently turn NaN into
null and integer keys into strings. The text is both what is stored and what is sent, so the
characters that other readers take for line ends are escaped in it.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from json.decoder import JSONDecoder
from json.encoder import JSONEncoder
from typing import Any, Final, NoReturn

from aguiapp.protocol.events import ProtocolError, text_of
from aguiapp.protocol.transcript import joined_pair

try:
    from msgspec.json import Decoder, Encoder

    _fast: Callable[[Any], bytes] | None = Encoder().encode
    _fast_decode: Callable[[str], Any] | None = Decoder().decode
except ImportError:  # pragma: no cover - the fallback is tested by switching both off
    _fast = _fast_decode = None

# Above what inputs and agents may nest (JSON_DEPTH): events are built around their values.
MAX_DEPTH: Final = 128
# Texts up to this length are tried by the fast decoder: token events are far below it.
_SHORT: Final = 4096

# Everything but brackets, strings as a whole: possessive, and content with a string that never
# ends, so that any text takes linear time.
_BETWEEN = re.compile(r'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[^"\[\]{}]++)++', re.DOTALL)
_SPECIAL = re.compile("[\ud800-\udbff][\udc00-\udfff]|[\ud800-\udfff\u0085\u2028\u2029]")
_SCALARS: Final = frozenset({str, int, bool, type(None)})
_slow = JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


class JSONTextError(ProtocolError):
    """The text or value is not JSON as this protocol takes it; `rule` says why."""

    code = "bad_json"


# -- reading ------------------------------------------------------------------------------------


def loads(
    text: str | bytes | bytearray, *, max_depth: int = MAX_DEPTH, unique_keys: bool = True
) -> Any:
    """Parse one JSON document strictly."""
    if text.__class__ is str and len(text) <= _SHORT and (flat := _flat(text)) is not None:
        return flat
    if not isinstance(text, str):
        try:
            text = bytes(text).decode("utf-8-sig")
        except UnicodeDecodeError as problem:
            raise JSONTextError("not_utf8", f"not UTF-8 at byte {problem.start}") from None
    _check_text_depth(text, max_depth)
    decoder = _UNIQUE if unique_keys else _LAST_WINS
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as problem:
        said = f"{problem.msg} at line {problem.lineno} column {problem.colno}"
        raise JSONTextError("not_json", said) from None
    except RecursionError:
        raise JSONTextError("too_deep", f"nested deeper than {max_depth}") from None
    except ValueError:
        raise JSONTextError("bad_number", "a number has too many digits") from None


def _flat(text: Any) -> dict[str, Any] | None:
    """Read an object of scalars; None when the text is anything else, or may be.

    The fast decoder keeps the last of repeated keys; as many colons as keys rule them out.
    """
    if _fast_decode is None:
        return None
    try:
        value = _fast_decode(text)
    except (ValueError, RecursionError):
        return None
    if value.__class__ is dict and text.count(":") == len(value) and "[" not in text:
        return value
    return None


def _check_text_depth(text: str, max_depth: int) -> None:
    if text.count("[") + text.count("{") <= max_depth:
        return
    depth = 0
    for bracket in _BETWEEN.sub("", text):
        if bracket in "[{":
            depth += 1
            if depth > max_depth:
                raise JSONTextError("too_deep", f"nested deeper than {max_depth}")
        else:
            depth -= 1


def _constant(name: str) -> NoReturn:
    raise JSONTextError("bad_number", f"{name} is not JSON")


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise JSONTextError("bad_number", f"{text_of(digits)} is beyond the range of a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise JSONTextError("repeated_key", f"the key {text_of(_repeated(pairs))} appears twice")
    return built


def _repeated(pairs: list[tuple[str, Any]]) -> str:
    counted = Counter(key for key, _ in pairs)
    return next(key for key, times in counted.items() if times > 1)


_UNIQUE: Final = JSONDecoder(
    parse_constant=_constant, parse_float=_float, object_pairs_hook=_unique
)
_LAST_WINS: Final = JSONDecoder(parse_constant=_constant, parse_float=_float)


# -- writing ------------------------------------------------------------------------------------


def dumps(value: Any, *, max_depth: int = MAX_DEPTH, plain: bool = False) -> str:
    """Write the one JSON text of a value: compact, safe in a line, nothing lost.

    `plain` says that it is known for an object of strings, integers, booleans and null.
    """
    plain = plain or _is_flat(value) or _check(value, max_depth)
    text: str | None = None
    if plain and _fast is not None:
        try:
            text = _fast(value).decode()
        except (ValueError, TypeError, OverflowError):
            # Lone surrogates and integers beyond 64 bits: legal here, not there.
            text = None
    if text is None:
        try:
            text = _slow(value)
        except (ValueError, TypeError) as problem:
            raise JSONTextError("not_json", f"cannot be written as JSON: {problem}") from None
    return text if text.isascii() else _SPECIAL.sub(_escape, text)


def _is_flat(value: Any) -> bool:
    """Whether it is an object of scalars, as nearly every event of a stream is."""
    if value.__class__ is not dict:
        return False
    for key, member in value.items():
        if member.__class__ not in _SCALARS or key.__class__ is not str:
            return False
    return True


def _escape(match: re.Match[str]) -> str:
    found = match.group()
    return joined_pair(match) if len(found) == 2 else f"\\u{ord(found):04x}"


def _check(value: Any, max_depth: int) -> bool:
    """Refuse what is not JSON; tell whether only the plain built-in types occur."""
    plain = True
    pending: list[tuple[Any, int]] = [([value], 0)]
    while pending:
        container, depth = pending.pop()
        if depth > max_depth:
            raise JSONTextError("too_deep", f"nested deeper than {max_depth}, or in a circle")
        if isinstance(container, dict):
            for key in container:
                if key.__class__ is not str:
                    _refuse_key(key)
            members: Iterable[Any] = container.values()
        else:
            members = container
        for member in members:
            kind = member.__class__
            if kind in _SCALARS:
                continue
            if kind is dict or kind is list:
                pending.append((member, depth + 1))
            else:
                plain = _check_other(member, depth, pending) and plain
    return plain


def _check_other(member: Any, depth: int, pending: list[tuple[Any, int]]) -> bool:
    if isinstance(member, float):
        if not math.isfinite(member):
            name = "NaN" if math.isnan(member) else "Infinity" if member > 0 else "-Infinity"
            raise JSONTextError("bad_number", f"{name} is not JSON")
        return member.__class__ is float
    if isinstance(member, dict | list | tuple):
        pending.append((member, depth + 1))
        return member.__class__ is tuple
    if isinstance(member, str | int):
        return False
    raise JSONTextError("not_json", f"{type(member).__name__} is not a JSON type")


def _refuse_key(key: Any) -> None:
    if not isinstance(key, str):
        raise JSONTextError("bad_key", f"a key must be a string, not {text_of(key)}")
