import json
from typing import Any

import pytest

from aguiapp import protocol
from tests.protocol import cases

MINIMAL = {"threadId": "t1", "runId": "r1", "messages": []}

# Where our verdict differs from the official RunAgentInputSchema, and why.
DEPARTURES = {
    "input-0179": "payload null is what older clients send: left out with a finding",
    "input-0189": "empty ids are refused",
    "input-0191": "a message of an unknown role is dropped, as the client's own check does",
    "input-0218": "forwardedProps null is what older clients send: left out with a finding",
    "input-0244": "ids are at most 255 characters",
}


def refused(body: object) -> protocol.InputError:
    text = body if isinstance(body, str | bytes) else json.dumps(body)
    with pytest.raises(protocol.InputError) as caught:
        protocol.parse_input(text)
    return caught.value


def attempt(body: object) -> dict[str, Any] | None:
    try:
        return protocol.parse_input(json.dumps(body))
    except protocol.InputError:
        return None


def paths(body: object) -> list[str]:
    return [problem["path"] for problem in refused(body).problems]


@cases.each(cases.family("run_input"), lambda case: case["note"].split()[0])
def test_every_input_gets_the_official_verdict(case: cases.Case) -> None:
    official = case["ts"]
    parsed = attempt(case["body"])
    if case["id"] in DEPARTURES:
        assert (parsed is not None) != official["accepted"]
        return
    assert (parsed is not None) == official["accepted"]
    if parsed is None:
        problem = refused(case["body"])
        assert problem.status == 422
        assert problem.problems
    elif "parsed" in official and not case.get("ts_client_strips"):
        # The schema fills in absent tools and context; absent means empty, so we do not.
        assert cases.same({"tools": [], "context": [], **parsed}, official["parsed"])


@cases.each(cases.family("run_input"), lambda case: case["note"].split()[0])
def test_problems_name_what_the_official_schema_names(case: cases.Case) -> None:
    if case["ts"]["accepted"] or case["id"] in DEPARTURES:
        return
    named = paths(case["body"])
    for issue in case["ts"]["issues"]:
        path = issue["path"].strip("/").replace("/", ".")
        assert any(mine == path or mine.startswith(f"{path}.") or not path for mine in named)


def test_unknown_members_are_stripped_and_listed() -> None:
    message = {"id": "u", "role": "user", "content": "x", "future": 1}
    body = {**MINIMAL, "messages": [message, {"role": "robot", "id": "x"}], "unknown": {"x": 1}}
    value, findings = protocol.parse_input_verbose(json.dumps(body))
    assert value == {**MINIMAL, "messages": [{"id": "u", "role": "user", "content": "x"}]}
    assert sorted(finding.path for finding in findings) == [
        "messages.0.future",
        "messages.1",
        "unknown",
    ]
    assert protocol.parse_input(json.dumps(body)) == value


def test_older_clients_are_understood() -> None:
    body = {
        **MINIMAL,
        "state": None,
        "forwardedProps": None,
        "tools": [{"name": "f", "description": "d", "parameters": None}],
        "resume": [{"interruptId": "i", "status": "resolved", "payload": None}],
        "messages": [
            {
                "id": "u",
                "role": "user",
                "content": [{"type": "binary", "mimeType": "image/png", "data": "AA=="}],
            }
        ],
    }
    value, findings = protocol.parse_input_verbose(json.dumps(body))
    assert "state" not in value
    assert "forwardedProps" not in value
    assert value["tools"] == [{"name": "f", "description": "d"}]
    assert value["resume"] == [{"interruptId": "i", "status": "resolved"}]
    assert value["messages"][0]["content"][0]["type"] == "image"
    assert {finding.kind for finding in findings} == {"compat"}


def test_all_mistakes_are_listed_at_once_up_to_twenty() -> None:
    body = {
        "threadId": 5,
        "messages": [{"role": "alien", "content": "x"}],
        "tools": "no",
        "resume": [{}],
    }
    assert paths(body) == [
        "threadId",
        "tools",
        "resume.0.interruptId",
        "resume.0.status",
        "runId",
        "messages.0",
    ]
    assert len(paths({**MINIMAL, "messages": [{"role": "user"}] * 30})) == 20


def test_a_missing_message_id_is_named_with_a_plain_sentence() -> None:
    body = {"threadId": "t1", "runId": "r1", "messages": [{"role": "user", "content": "Hello"}]}
    assert refused(body).problems == [{"path": "messages.0.id", "message": "is required"}]


def test_snake_case_is_no_alias() -> None:
    named = paths({"thread_id": "t1", "run_id": "r1", "messages": []})
    assert named == ["threadId", "runId"]


@pytest.mark.parametrize("bad", ["", "x" * 256, "a\x00b", "a\nb", "a\x7fb", "a\x85b", "\ud83d"])
def test_ids_are_1_to_255_characters_without_controls(bad: str) -> None:
    message = {"id": bad, "role": "user", "content": ""}
    body = {"threadId": bad, "runId": bad, "parentRunId": bad, "messages": [message]}
    assert paths(body) == ["threadId", "runId", "parentRunId", "messages.0.id"]
    assert not protocol.is_id(bad)


@pytest.mark.parametrize("good", ["a", "x" * 255, "\u00e9\U0001f600", " ", "a/b?c=\u2028"])
def test_any_other_text_is_an_id(good: str) -> None:
    assert protocol.is_id(good)
    assert protocol.parse_input(json.dumps({**MINIMAL, "threadId": good}))["threadId"] == good


@pytest.mark.parametrize(
    "body", ["", "{", "nonsense", b"\xff", '{"a":NaN}', '{"x":1e999}', '{"a":1,"a":2}']
)
def test_what_cannot_be_parsed_is_400(body: str | bytes) -> None:
    problem = refused(body)
    assert (problem.status, problem.code) == (400, "bad_json")
    assert problem.message


@pytest.mark.parametrize("depth", [101, 300, 1000, 20_000])
def test_depth_has_one_code_at_any_depth(depth: int) -> None:
    head = '{"threadId":"t1","runId":"r1","messages":[],"state":'
    problem = refused(head + "[" * depth + "]" * depth + "}")
    assert (problem.status, problem.code) == (422, "too_deep")


@pytest.mark.parametrize("body", ["null", "[]", "5", '"x"'])
def test_a_body_that_is_no_object_is_422(body: str) -> None:
    problem = refused(body)
    assert (problem.status, problem.code) == (422, "invalid_input")
    assert [found["path"] for found in problem.problems] == [""]


def test_tool_arguments_are_opaque_text() -> None:
    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}

    calls = [call("1", '{"mine":true}{"mine":true}'), call("2", ""), call("3", '{"a":')]
    body = {**MINIMAL, "messages": [{"id": "m", "role": "assistant", "toolCalls": calls}]}
    assert protocol.parse_input(json.dumps(body)) == body
