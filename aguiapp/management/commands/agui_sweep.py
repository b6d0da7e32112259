"""End the runs whose process is gone: `manage.py agui_sweep`, for cron and for after a crash."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from aguiapp import store
from aguiapp.engine import recovery


class Command(BaseCommand):
    help = "End the runs whose process is gone. Processes that serve requests do so by themselves."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="only say which they are")

    def handle(self, *args: Any, **options: Any) -> None:
        dry = options["dry_run"]
        runs = store.abandoned() if dry else recovery.sweep()
        for run in runs:
            held = run.lease_owner or "nobody"
            self.stdout.write(f"{run.key} agent={run.agent} held by {held}")
        waiting = len(store.claimable())
        self.stdout.write(f"{len(runs)} runs {'are lost' if dry else 'ended'}.")
        if waiting:
            self.stdout.write(
                f"{waiting} threads have turns that wait for an answer or a serving process."
            )
