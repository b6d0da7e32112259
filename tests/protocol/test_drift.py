"""Our field tables against the installed Python models and the schemas of the npm package.

A new release that adds, drops or loosens a field shows up here as a difference by name.
"""

from __future__ import annotations

import json
import subprocess
import types
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import pytest
from ag_ui import core
from pydantic import BaseModel

from aguiapp import protocol
from aguiapp.protocol import schema
from aguiapp.protocol.shapes import TEXT, ListOf, Shape, Struct, Tagged

HOLDERS = ("Developer", "System", "User", "Assistant", "Tool", "Reasoning")
# Protocol 1.1, kept for whoever sends it: (schema, field, difference).
NEWER = {
    (name, "encryptedValueType", "only here")
    for name in (
        *(f"{role}Message" for role in HOLDERS),
        *("ToolCall", "ReasoningEncryptedValueEvent"),
    )
}

CLOSED = {
    ("TextMessageStartEvent", "role"),
    ("TextMessageChunkEvent", "role"),
    ("ReasoningMessageStartEvent", "role"),
    ("ReasoningEncryptedValueEvent", "subtype"),
    ("ToolCallResultEvent", "role"),
    ("ToolCall", "type"),
    ("ResumeEntry", "status"),
}


class Field(NamedTuple):
    required: bool
    values: list[str] | None


Table = dict[str, dict[str, Field]]


def camel(name: str) -> str:
    return "".join(part.title() for part in name.replace("-", "_").split("_"))


def structs() -> dict[str, Struct]:
    """Our tables under the names of the official schemas."""
    usage = schema.EVENTS["RUN_FINISHED"].fields["usage"]
    operations = schema.PATCH.item
    assert isinstance(usage, ListOf)
    assert isinstance(operations, Tagged)
    families: dict[str, dict[str, Shape]] = {
        "{}Event": {**schema.EVENTS},
        "{}Message": schema.MESSAGE.members,
        "{}Part": schema.PART.members,
        "{}Source": schema.SOURCE.members,
        "RunFinished{}Outcome": schema.RUN_OUTCOME.members,
        "SubagentFinished{}Outcome": schema.SUBAGENT_OUTCOME.members,
        "{}Operation": operations.members,
        "{}": {
            "tool_call": schema.TOOL_CALL,
            "function_call": schema.TOOL_CALL.fields["function"],
            "interrupt": schema.INTERRUPT,
            "run_agent_input": schema.RUN_INPUT,
            "tool": schema.TOOL,
            "context": schema.CONTEXT,
            "resume_entry": schema.RESUME,
            "token_usage": usage.item,
        },
    }
    found = {}
    for form, members in families.items():
        for name, struct in members.items():
            assert isinstance(struct, Struct)
            found[form.format(camel(name))] = struct
    return found


OURS = structs()


def differences(theirs: Table) -> set[tuple[str, str, str]]:
    found = set()
    for name, fields in theirs.items():
        struct = OURS[name]
        for field in fields.keys() | struct.fields.keys():
            if field not in fields:
                found.add((name, field, "only here"))
            elif field not in struct.fields:
                found.add((name, field, "only there"))
            elif fields[field].required != (field in struct.required):
                found.add((name, field, "required" if fields[field].required else "optional"))
    return found


def same_values(theirs: Table) -> set[tuple[str, str]]:
    """Assert that closed sets of strings are the same; return which were compared."""
    compared = set()
    for name, fields in theirs.items():
        for field, (_, values) in fields.items():
            shape = OURS[name].fields[field]
            ok = getattr(shape, "ok", None)
            # The member that tells a union apart is judged by the union.
            if values is None or ok is None or shape is TEXT:
                continue
            assert all(map(ok, values)), (name, field)
            assert not any(ok(value + "x") for value in values), (name, field)
            compared.add((name, field))
    return compared


# -- the Python models ------------------------------------------------------------------


def union(alias: Any) -> tuple[type[BaseModel], ...]:
    members: tuple[type[BaseModel], ...] = get_args(get_args(alias)[0])
    return members


def closed(annotation: Any) -> list[str] | None:
    """The closed set of strings of an annotation, if it is one."""
    if get_origin(annotation) is Literal:
        return [getattr(one, "value", one) for one in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [one.value for one in annotation]
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        found = [closed(one) for one in get_args(annotation) if one is not types.NoneType]
        return found[0] if len(found) == 1 else None
    return None


def python_models() -> Table:
    models: list[type[BaseModel]] = [
        *(*union(core.Event), *union(core.Message), *union(core.ContentPart)),
        *(*union(core.PartSource), *union(core.RunFinishedOutcome)),
        *union(core.SubagentFinishedOutcome),
        *(core.ToolCall, core.FunctionCall, core.Interrupt, core.RunAgentInput, core.Tool),
        *(core.Context, core.ResumeEntry, core.TokenUsage),
    ]
    return {
        model.__name__: {
            field.alias or name: Field(
                # A constant has a default in Python, and must be on the wire all the same.
                field.is_required() or field.default is not None,
                closed(field.annotation),
            )
            for name, field in model.model_fields.items()
        }
        for model in models
    }


def test_the_python_models_have_our_fields() -> None:
    theirs = python_models()
    # Operations of a patch have no model.
    assert OURS.keys() - theirs.keys() == {name for name in OURS if name.endswith("Operation")}
    assert differences(theirs) == NEWER
    assert same_values(theirs) == CLOSED


def test_the_python_package_speaks_our_version_and_our_types() -> None:
    assert core.PROTOCOL_VERSION == protocol.PROTOCOL_VERSION
    assert {kind.value for kind in core.EventType} == protocol.TYPES


# -- the npm package --------------------------------------------------------------------


@pytest.mark.node
def test_the_schemas_of_the_npm_package_have_our_fields(node: str, js: Path) -> None:
    printed = subprocess.run(
        [node, str(js / "fields.mjs")], capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(printed)
    theirs = {
        name: {field: Field(**said) for field, said in fields.items()}
        for name, fields in found.items()
        if name in OURS
    }
    assert theirs.keys() == OURS.keys()
    assert {name for name in found if name.endswith("Event")} - theirs.keys() == {"BaseEvent"}
    assert differences(theirs) == NEWER
    assert same_values(theirs) == CLOSED
