"""Judge a saved AG-UI stream: `manage.py agui_check run.jsonl`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from aguiapp.protocol.capture import ACTIONS, report


class Command(BaseCommand):
    help = "Judge a saved AG-UI stream (JSON lines, SSE, JSON, protobuf); exit status 1: refused."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", help="a file, or - for standard input")
        parser.add_argument(
            "--print", choices=ACTIONS, default="check", dest="action", help="what to print of it"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["file"]
        try:
            data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        except OSError as problem:
            raise CommandError(f"{name}: {problem.strerror}", returncode=2) from None
        text, status = report(options["action"], data)
        self.stdout.write(text)
        if status:
            sys.exit(status)
