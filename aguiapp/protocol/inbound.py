"""RunAgentInput, parsed strictly: the only message a client sends before a stream opens."""

from collections.abc import Sequence
from typing import Any, Final

from aguiapp.protocol.events import Finding, ProtocolError, text_of
from aguiapp.protocol.jsontext import JSONTextError, loads
from aguiapp.protocol.legacy import upgrade_input
from aguiapp.protocol.schema import RUN_INPUT
from aguiapp.protocol.shapes import MAX_PROBLEMS, Report

MAX_ID: Final = 255
MAX_INPUT_DEPTH: Final = 100


class InputError(ProtocolError):
    """The body was refused before a stream opened: HTTP status, code, and every problem."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int,
        problems: Sequence[dict[str, str]] = (),
    ) -> None:
        super().__init__("input", message)
        self.code = code
        self.status = status
        self.problems = list(problems)


def parse_input(body: str | bytes, *, max_depth: int = MAX_INPUT_DEPTH) -> dict[str, Any]:
    """Return the run input in wire form, without what this protocol version does not know."""
    return parse_input_verbose(body, max_depth=max_depth)[0]


def parse_input_verbose(
    body: str | bytes, *, max_depth: int = MAX_INPUT_DEPTH
) -> tuple[dict[str, Any], list[Finding]]:
    """See parse_input(); also return what was stripped or translated."""
    try:
        value = loads(body, max_depth=max_depth)
    except JSONTextError as problem:
        if problem.rule == "too_deep":
            raise InputError("too_deep", problem.message, status=422) from None
        raise InputError("bad_json", problem.message, status=400) from None
    return check_input(value)


def check_input(value: Any) -> tuple[dict[str, Any], list[Finding]]:
    """Judge an input that is already parsed."""
    findings: list[Finding] = []
    report = Report(tags_required=True)
    checked = RUN_INPUT.check(upgrade_input(value, "", findings), "", report)
    if isinstance(checked, dict):
        _check_ids(checked, report)
    if report.problems:
        raise InputError(
            "invalid_input",
            "the run input is not valid",
            status=422,
            problems=_listed(report),
        )
    return checked, findings + report.findings


def is_id(value: object) -> bool:
    """Whether a text can be an id here: 1 to 255 characters, none of them a control."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID and not _has_control(value)


def _has_control(value: str) -> bool:
    # Surrogates cannot be stored as text by every database.
    return any(c < " " or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" for c in value)


def _check_ids(value: dict[str, Any], report: Report) -> None:
    for key in ("threadId", "runId", "parentRunId"):
        if key in value:
            _check_id(value[key], key, report)
    messages = value.get("messages")
    if isinstance(messages, list):
        for position, message in enumerate(messages):
            if isinstance(message, dict) and "id" in message:
                _check_id(message["id"], f"messages.{position}.id", report)


def _check_id(value: Any, path: str, report: Report) -> None:
    # Anything that is no string has been named by the shape already.
    if isinstance(value, str) and not is_id(value):
        report.problem(
            path, f"must be 1 to {MAX_ID} characters without controls, not {text_of(value)}"
        )


def _listed(report: Report) -> list[dict[str, str]]:
    """List the problems; a dropped message or part is one too, once the body is refused."""
    listed = [{"path": path, "message": said} for path, said in report.problems]
    listed += [
        {"path": found.path, "message": "has a type that is not known here"}
        for found in report.findings
        if found.path.rpartition(".")[2].isdigit()
    ]
    return listed[:MAX_PROBLEMS]
