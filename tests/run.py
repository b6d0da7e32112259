"""`make test`: the whole suite on SQLite, then on PostgreSQL; says at the end what was skipped."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext

from tests import services


def main() -> int:
    """Run pytest once per database; arguments that are not ours are pytest's."""
    parser = argparse.ArgumentParser(prog="python -m tests.run")
    parser.add_argument("--database", choices=("sqlite", "postgres", "all"), default="all")
    options, arguments = parser.parse_known_args()
    client = install_client()
    verdicts = {}
    if options.database != "postgres":
        verdicts["SQLite"] = suite("SQLite", "", arguments)
    if options.database != "sqlite":
        running = services.running_postgres()
        name = "PostgreSQL, running server" if running else "PostgreSQL, embedded server"
        server: AbstractContextManager[str] = (
            nullcontext(running) if running else services.embedded_postgres()
        )
        with server as url:
            verdicts[name] = suite(name, url, arguments)
    say("")
    for name, verdict in verdicts.items():
        say(f"{name}: {verdict}")
    for name, reason in missing(client).items():
        say(f"Skipped, {name}: {reason}")
    return int(any(not verdict.startswith("passed") for verdict in verdicts.values()))


def suite(name: str, url: str, arguments: list[str]) -> str:
    """One pass of pytest, and how it went."""
    say(f"\n=== {name} ===")
    started = time.monotonic()
    status = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        env={**os.environ, "DATABASE_URL": url},
        check=False,
    ).returncode
    verdict = "passed" if status == 0 else f"FAILED (exit code {status} of pytest)"
    return f"{verdict} in {time.monotonic() - started:.0f} s"


def install_client() -> str:
    """Put the official JavaScript client beside its tests; why not, when it cannot be."""
    if not (services.JS / "package.json").exists():
        return "tests/js has no package.json"
    wanted = json.loads((services.JS / "package.json").read_text())["dependencies"]
    if all((services.JS / "node_modules" / name).is_dir() for name in wanted):
        return ""
    npm = shutil.which("npm")
    if npm is None:
        return "there is no npm on the path"
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"],
        cwd=services.JS,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else f"npm install failed: {done.stderr.strip()[-500:]}"


def missing(client: str) -> dict[str, str]:
    """What could not be tested here, and why."""
    reasons = {
        "JavaScript client": client,
        "Redis": ""
        if services.redis_url()
        else "nothing listens on 127.0.0.1:6379, and TEST_REDIS_URL is not set",
        "browser": "" if services.chromium() else "there is no chromium on the path",
    }
    return {name: reason for name, reason in reasons.items() if reason}


def say(text: str) -> None:
    """Print in order with what pytest prints."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
