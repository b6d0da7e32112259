import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from aguiapp import protocol
from aguiapp.protocol import jsontext
from aguiapp.protocol.jsontext import JSONTextError


@pytest.fixture(params=["fast", "plain"])
def encoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything holds with and without the fast encoder."""
    if request.param == "plain":
        monkeypatch.setattr(jsontext, "_fast", None)
    elif jsontext._fast is None:
        pytest.skip("the fast encoder is not installed")
    return str(request.param)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a":-Infinity}'])
def test_constants_of_other_languages_are_refused_by_name(text: str) -> None:
    with pytest.raises(JSONTextError, match=r"NaN|Infinity") as caught:
        protocol.loads(text)
    assert caught.value.rule == "bad_number"


def test_numbers_beyond_the_range_are_refused_and_big_integers_stay_exact() -> None:
    for text in ("1e999", "-1e400", '{"a":[1E309]}'):
        with pytest.raises(JSONTextError, match="range"):
            protocol.loads(text)
    assert protocol.loads("18446744073709551616") == 2**64
    assert protocol.loads(str(2**53 + 1)) == 2**53 + 1
    with pytest.raises(JSONTextError, match="digits"):
        protocol.loads("9" * 5000)


def test_repeated_keys_are_refused_unless_asked_for() -> None:
    with pytest.raises(JSONTextError, match="'a' appears twice") as caught:
        protocol.loads('{"x":{"a":1,"b":2,"a":3}}')
    assert caught.value.rule == "repeated_key"
    assert protocol.loads('{"a":1,"a":2}', unique_keys=False) == {"a": 2}


@pytest.mark.parametrize("depth", [129, 140, 300, 1000, 5000, 20_000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_depth_has_one_verdict_everywhere(depth: int, opening: str, closing: str) -> None:
    body = opening * depth + "1" + closing * depth
    for text in (body, opening * depth, body.encode()):
        with pytest.raises(JSONTextError) as caught:
            protocol.loads(text)
        assert caught.value.rule == "too_deep"


def test_depth_counts_containers_and_not_what_strings_hold() -> None:
    assert protocol.loads("[" * 128 + "]" * 128)
    flat = json.dumps(["[" * 500, '"' + "{" * 500, "\\"] + [{}] * 300)
    assert protocol.loads(flat) == json.loads(flat)


def test_hostile_text_is_judged_in_linear_time() -> None:
    with pytest.raises(JSONTextError):
        protocol.loads("[" * 129 + '"' + '\\"' * 500_000)


@pytest.mark.parametrize("text", ["", "{", "[1,]", "'a'", "\ufeff1", '"a\nb"', "01", "{} {}"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(JSONTextError) as caught:
        protocol.loads(text)
    assert caught.value.rule == "not_json"


def test_bytes_must_be_utf_8() -> None:
    assert protocol.loads(b'\xef\xbb\xbf"\xc3\xa9"') == "\u00e9"
    with pytest.raises(JSONTextError) as caught:
        protocol.loads(b'"\xff"')
    assert caught.value.rule == "not_utf8"


def test_the_text_is_compact_and_safe_in_a_line(encoder: str) -> None:
    value = {"a": ["\u00e9\U0001f600", "x\u2028y\u2029z\u0085", "\x00\n\r\x1f", 1, None, True]}
    text = protocol.dumps(value)
    assert " " not in text
    assert "\u00e9\U0001f600" in text
    assert r"x\u2028y\u2029z\u0085" in text
    assert r"\u0000\n\r\u001f" in text
    assert len(text.splitlines()) == 1
    assert protocol.loads(text) == value


def test_a_lone_half_is_an_escape_and_a_pair_is_a_character(encoder: str) -> None:
    assert protocol.dumps("cut \ud83d") == r'"cut \ud83d"'
    assert protocol.loads(protocol.dumps("\ude00 \ud83d")) == "\ude00 \ud83d"
    assert protocol.dumps({"\ud83d": "\ud83d\ude00"}) == '{"\\ud83d":"\U0001f600"}'
    protocol.dumps("\ud83d").encode()


def test_visible_escapes_stay_visible(encoder: str) -> None:
    value = {"path": "C:\\u0000dir", "args": '{"s":"a\\u0000b"}', "back": "\\u2028"}
    assert protocol.loads(protocol.dumps(value)) == value


@pytest.mark.parametrize("number", [2**53, 2**63, 2**64, -(2**64), 10**30, 1e22, 0.1, 5e-324])
def test_numbers_survive(number: float, encoder: str) -> None:
    assert protocol.loads(protocol.dumps([number])) == [number]
    assert type(protocol.loads(protocol.dumps(number))) is type(number)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "NaN"),
        ([{"a": float("inf")}], "Infinity"),
        (float("-inf"), "-Infinity"),
        ({1: "a"}, "key"),
        ([{None: 1}], "key"),
        ({True: 1}, "key"),
        ({("a",): 1}, "key"),
        ({1, 2}, "set"),
        (b"x", "bytes"),
        ([object()], "object"),
        (1j, "complex"),
        pytest.param(10**5000, "digits", id="big"),
    ],
)
def test_what_is_no_json_is_not_written(value: Any, said: str, encoder: str) -> None:
    with pytest.raises(JSONTextError, match=said):
        protocol.dumps(value)
    with pytest.raises(JSONTextError, match=said):
        protocol.dumps({"type": "CUSTOM", "value": value})


def test_depth_and_circles_are_refused_without_a_recursion_error(encoder: str) -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    circle: list[Any] = []
    circle += [circle, circle]
    ring: dict[str, Any] = {}
    ring["ring"] = {"ring": ring}
    for value in (deep, circle, ring):
        with pytest.raises(JSONTextError) as caught:
            protocol.dumps(value)
        assert caught.value.rule == "too_deep"
    nested: list[Any] = []
    for _ in range(127):
        nested = [nested]
    assert protocol.dumps(nested) == "[" * 128 + "]" * 128


def test_subclasses_of_json_types_are_written_by_value(encoder: str) -> None:
    class Name(str):
        __slots__ = ()

    class Table(dict[str, Any]):
        pass

    assert protocol.dumps(Table({Name("a"): (Name("b"), 1)})) == '{"a":["b",1]}'


TEXT = st.text(st.characters(codec=None), max_size=6).map(protocol.join_halves)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_writing_and_reading_is_the_identity_in_both_modes(value: Any) -> None:
    fast = protocol.dumps(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jsontext, "_fast", None)
        plain = protocol.dumps(value)
    for text in (fast, plain):
        assert protocol.loads(text) == value
        assert protocol.loads(text.encode()) == value
        assert len(text.splitlines()) == 1


def test_a_generous_caller_gets_no_recursion_error() -> None:
    with pytest.raises(JSONTextError) as caught:
        protocol.loads("[" * 100_000 + "]" * 100_000, max_depth=10**6)
    assert caught.value.rule == "too_deep"


FLAT = [
    '{"a":"x","b":1,"c":-0,"d":null,"e":true,"f":0.1}',
    '{"a":"x:y","b":"\\"","c":"\\u00e9\\ud83d\\ude00"}',
    '{"a":{},"b":1e3}',
    ' {"a" : 1 } ',
    '{"a":18446744073709551616,"b":"\u00e9"}',
    '{"a":"\\ud83d"}',
]


@pytest.mark.parametrize("text", FLAT)
def test_short_texts_read_the_same_with_and_without_the_fast_decoder(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = protocol.loads(text)
    monkeypatch.setattr(jsontext, "_fast_decode", None)
    slow = protocol.loads(text)
    assert repr(fast) == repr(slow) == repr(json.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"a" :1,"a":2}',
        '{"a":1,"\\u0061":2}',
        '{"a":":","a":1}',
        '{"a":1e400}',
        '{"a":NaN}',
    ],
)
def test_what_the_fast_decoder_would_let_pass_is_refused(text: str) -> None:
    with pytest.raises(JSONTextError):
        protocol.loads(text)
