"""`python -m aguiapp.protocol check|fold|expand FILE`."""

import argparse
import sys
from pathlib import Path

from aguiapp.protocol.capture import ACTIONS, report


def main(arguments: list[str] | None = None) -> int:
    """Print the report on a file, or on standard input for `-`; return the exit status.

    0: legal. 1: refused. 2: the file cannot be opened.
    """
    parser = argparse.ArgumentParser(
        prog="python -m aguiapp.protocol",
        description="Judge, expand or fold a saved AG-UI stream (JSON lines, SSE, JSON, protobuf).",
    )
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("file", help="a file, or - for standard input")
    given = parser.parse_args(arguments)
    try:
        data = sys.stdin.buffer.read() if given.file == "-" else Path(given.file).read_bytes()
    except OSError as problem:
        parser.error(f"{given.file}: {problem.strerror}")
    text, status = report(given.action, data)
    sys.stdout.write(f"{text}\n")
    return status


if __name__ == "__main__":  # pragma: no cover - the tests run it as a process of its own
    sys.exit(main())
