"""A saved stream is judged from a shell, whatever form it was saved in."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from aguiapp import protocol
from aguiapp.protocol.__main__ import main
from aguiapp.protocol.capture import read, report
from tests.protocol.cases import ROOT

LEGAL: list[protocol.Event] = [
    {"type": "RUN_STARTED", "threadId": "t", "runId": "r"},
    {"type": "TEXT_MESSAGE_CHUNK", "messageId": "m", "delta": "h\u00e9", "extra": 1},
    {"type": "RUN_FINISHED", "threadId": "t", "runId": "r"},
]
ILLEGAL = [*LEGAL[:1], {"type": "TEXT_MESSAGE_END", "messageId": "m"}, *LEGAL[2:]]


def saved(form: str, events: list[protocol.Event]) -> bytes:
    if form == "sse":
        return b": hello\n\n" + b"".join(protocol.encode_sse(e, "c-1") for e in events)
    if form == "proto":
        return b"".join(map(protocol.encode_proto_frame, events))
    if form == "document":
        return json.dumps({"events": events}, indent=1).encode()
    if form == "array":
        return json.dumps(events).encode("utf-8-sig")
    return "\n".join(json.dumps(event) for event in events).encode()


FORMS = ["sse", "proto", "document", "array", "lines"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form: str) -> None:
    events = LEGAL if form != "proto" else [LEGAL[0], {**LEGAL[1]}, LEGAL[2]]
    found = read(saved(form, events))
    assert found.broken is None
    if form == "proto":  # unknown fields have no place there
        events[1].pop("extra")
    assert found.events == events


def test_one_event_alone_is_a_stream_of_one() -> None:
    assert read(b'{"type":"RUN_ERROR","message":"x"}').events[0]["message"] == "x"


@pytest.mark.parametrize("form", FORMS)
def test_what_is_refused_is_named(form: str) -> None:
    text, status = report("check", saved(form, ILLEGAL))
    assert status == 1
    assert text.startswith("refused at event 2: VERIFY-10: ")


def test_a_legal_stream_is_accepted_with_its_warnings() -> None:
    chunk = {**LEGAL[1], "extra": 1}
    text, status = report("check", saved("lines", [LEGAL[0], chunk, LEGAL[2]]))
    assert status == 0
    first, last = text.split("\n")
    assert first.startswith("warning at event 2: strip: ")
    assert first.endswith("(extra)")
    assert last == "accepted: 3 events"


def test_a_stream_that_just_stops_is_warned_about() -> None:
    for events in (LEGAL[:2], []):
        text, status = report("check", saved("lines", events))
        assert status == 0
        number = len(events) + 1
        assert f"warning at event {number}: VERIFY-40: the stream ends" in text


@pytest.mark.parametrize(
    ("data", "number", "rule"),
    [
        (saved("sse", LEGAL[:1]) + b"data: [DONE]\n\n", 2, "not_json"),
        (saved("lines", LEGAL[:2]) + b"\nNaN\n", 3, "bad_number"),
        (saved("proto", LEGAL[:1]) + b"\0\0\0\1", 2, "proto"),
        (b"\xff\xfe", 1, "not_utf8"),
        (b"[1]", 1, "malformed"),
    ],
)
def test_what_cannot_be_read_is_refused_at_its_place(data: bytes, number: int, rule: str) -> None:
    text, status = report("check", data)
    assert status == 1
    assert text.split("\n")[-1].startswith(f"refused at event {number}: {rule}: ")


def test_expand_and_fold_print_what_they_made() -> None:
    text, status = report("expand", saved("sse", LEGAL))
    types = [json.loads(line)["type"] for line in text.split("\n")]
    assert (status, types) == (
        0,
        [
            "RUN_STARTED",
            "TEXT_MESSAGE_START",
            "TEXT_MESSAGE_CONTENT",
            "TEXT_MESSAGE_END",
            "RUN_FINISHED",
        ],
    )
    text, status = report("fold", saved("sse", LEGAL))
    assert json.loads(text)["messages"] == [{"id": "m", "role": "assistant", "content": "h\u00e9"}]
    assert json.loads(text)["open"] == []
    text, status = report("fold", saved("sse", ILLEGAL))
    assert status == 1
    assert text.split("\n")[-1].startswith("refused at event 2")


def test_the_module_reports_and_returns_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(saved("document", LEGAL))
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out.endswith("accepted: 3 events\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(saved("sse", ILLEGAL))))
    assert main(["fold", "-"]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["expand", str(tmp_path / "none")])
    assert "No such file" in capsys.readouterr().err


def shell(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "aguiapp.protocol", *arguments]
    return subprocess.run(command, input=given, capture_output=True, cwd=ROOT, check=False)


def test_the_shell_gets_text_and_status(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(saved("lines", ILLEGAL))
    done = shell("check", str(file))
    assert (done.returncode, done.stderr) == (1, b"")
    assert done.stdout.startswith(b"refused at event 2: VERIFY-10")
    done = shell("expand", "-", given=saved("sse", LEGAL))
    assert (done.returncode, done.stdout.count(b"\n")) == (0, 5)
    done = shell("check", str(tmp_path / "none"))
    assert done.returncode == 2
    assert b"No such file" in done.stderr


def test_the_management_command_does_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.sse"
    file.write_bytes(saved("sse", LEGAL))
    out = io.StringIO()
    call_command("agui_check", str(file), stdout=out)
    assert out.getvalue().endswith("accepted: 3 events\n")
    out = io.StringIO()
    call_command("agui_check", str(file), "--print", "fold", stdout=out)
    assert json.loads(out.getvalue())["messages"][0]["id"] == "m"
    file.write_bytes(saved("sse", ILLEGAL))
    with pytest.raises(SystemExit, match="1"):
        call_command("agui_check", str(file), stdout=io.StringIO())
    with pytest.raises(CommandError, match="No such file"):
        call_command("agui_check", str(tmp_path / "none"))
