"""Streams through the unmodified official client, many in one Node process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests import services
from tests.protocol import cases


def fold(
    node: str, streams: Iterable[dict[str, Any]], folder: Path, *, told: bool = True
) -> list[dict[str, Any]]:
    """What the client makes of each {initial, events}, in order; see `js/fold.mjs`.

    A result is {messages, state, error, error_index, pendingInterrupts, runs}. `told=False`
    leaves `runs` empty and is faster. About 200 streams of 20 events take a second.
    """
    source, target = folder / "streams.jsonl", folder / "results.jsonl"
    with source.open("w", encoding="ascii") as lines:
        for stream in streams:
            lines.write(json.dumps({**stream, "told": told}) + "\n")
    done = subprocess.run(
        [node, str(services.JS / "fold.mjs"), str(source), str(target)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]
    return cases.read(target)
