"""`manage.py demo`: the example product with people, orders and stored runs, on Daphne."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import secrets
import socket
import sys
import uuid
from typing import Any

from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections
from django.urls import NoReverseMatch, reverse

from aguiapp import conf, engine
from aguiapp.models import Run
from project.models import Order

ORDERS = {
    1001: ("shipped", ["tea", "kettle"]),
    1002: ("paid", ["bicycle bell"]),
    1003: ("delivered", ["chess set"]),
}
#: The stored examples: agent, thread, message, forwardedProps.
EXAMPLES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("support", "demo-support", "Where is order 1001?", {}),
    ("counter", "demo-counter", "Count to ten, please.", {"n": 10}),
)


class Command(BaseCommand):
    """Prepare the database, say where everything is, serve."""

    help = "Migrate, add example people, orders and runs, print where to look, and serve."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=os.environ.get("PORT", "8000"))
        parser.add_argument("--no-serve", action="store_true", help="stop before serving")

    def handle(self, *, host: str, port: int, no_serve: bool, **options: Any) -> None:
        if not no_serve:
            try_port(host, port)
        call_command("migrate", verbosity=0)
        password = self.people()
        seed()
        shown = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104 - compared, not bound
        self.tell(f"http://{shown}:{port}", password)
        if not no_serve:
            serve(host, port)

    def people(self) -> str | None:
        """Make the logins; the password when it was set now, None when it was kept."""
        given = os.environ.get("DEMO_PASSWORD")
        password = given or secrets.token_urlsafe(9)
        fresh = bool(given)
        for name, staff in (("demo1", False), ("demo2", False), ("admin", True)):
            user, created = User.objects.get_or_create(
                username=name, defaults={"is_staff": staff, "is_superuser": staff}
            )
            if created or (given and not user.check_password(given)):
                user.set_password(password)
                user.save()
                fresh = True
        return password if fresh else None

    def tell(self, site: str, password: str | None) -> None:
        """Print the addresses, the logins and a line for the terminal."""
        shown = password or "as printed the first time (DEMO_PASSWORD=... sets a new one)"
        lines = [
            f"Home      {site}/",
            f"Chat      {site}/chat/support/",
            f"Admin     {site}/admin/",
            f"Replay    {site}{replay_path()}",
            "Logins    demo1, demo2, admin (sees everything)",
            f"Password  {shown}",
            "",
            "Stream in a terminal (run it twice: the same runId attaches to the stored run):",
            "",
            curl(site, token("demo1")),
            "",
            "Stop with Ctrl-C.",
        ]
        self.stdout.write("\n".join(["", *lines, ""]))


def seed() -> None:
    """Orders and two stored runs, where there are none."""
    for number, (status, items) in ORDERS.items():
        Order.objects.get_or_create(number=number, defaults={"status": status, "items": items})
    logging.getLogger("aguiapp").setLevel(logging.WARNING)  # until Daphne replaces this process
    demo1 = User.objects.get(username="demo1")
    for agent, thread, text, forwarded in EXAMPLES:
        if not Run.objects.filter(user=demo1, agent=agent).exists():
            engine.run_now(agent, run_input(thread, text, forwarded), user=demo1)


def run_input(thread: str, text: str, forwarded: dict[str, Any]) -> dict[str, Any]:
    """A RunAgentInput with one new message."""
    return {
        "threadId": thread,
        "runId": str(uuid.uuid4()),
        "state": {},
        "messages": [{"id": str(uuid.uuid4()), "role": "user", "content": text}],
        "tools": [],
        "context": [],
        "forwardedProps": forwarded,
    }


def token(username: str) -> str:
    """A bearer token, as `manage.py agui_token` prints it."""
    printed = io.StringIO()
    call_command("agui_token", username, stdout=printed)
    return printed.getvalue().split()[-1]


def curl(site: str, bearer: str) -> str:
    """A line that streams a fresh run when pasted into a shell."""
    body = json.dumps(run_input(str(uuid.uuid4()), "Count, please.", {"n": 50, "delay": 0.05}))
    return (
        f"curl -N {site}{reverse('aguiapp:agent', args=['tokens'])}"
        f" -H 'Authorization: Bearer {bearer}' -H 'Content-Type: application/json' -d '{body}'"
    )


def replay_path() -> str:
    """The replay of the stored support run in the admin; the admin's index without it."""
    run = Run.objects.filter(agent="support").order_by("pk").first()
    try:
        return reverse("admin:aguiapp_run_replay", args=[run.pk if run else None])
    except NoReverseMatch:
        return reverse("admin:index")


def try_port(host: str, port: int) -> None:
    """Say so early when Daphne could not listen there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        socket.create_server((host, port), family=found[0][0]).close()
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise CommandError(f"Port {port} is in use: make demo PORT={port + 1}") from None
        raise CommandError(f"Cannot listen on {host}:{port}: {problem}") from None


def serve(host: str, port: int) -> None:
    """Become Daphne, so that signals reach it directly."""
    connections.close_all()
    sys.stdout.flush()
    os.environ.setdefault("SERVE_STATIC", "1")
    # Daphne takes socket messages of 1 MiB unless told so; ours have a limit of their own.
    largest = str(conf.get().INPUT_BYTES + 1)
    sizes = ["--websocket-max-message-size", largest, "--websocket-max-frame-size", largest]
    daphne = [sys.executable, "-m", "daphne", "-b", host, "-p", str(port)]
    command = [*daphne, *sizes, "project.asgi:application"]
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted
