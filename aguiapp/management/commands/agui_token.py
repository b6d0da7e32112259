"""Print a bearer token for a user."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser

from aguiapp import access


class Command(BaseCommand):
    help = "Print a signed bearer token that speaks for USER until it expires."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("user", help="the user's natural key (usually the username)")
        parser.add_argument(
            "--seconds", type=int, default=None, help="lifetime (default: TOKEN_SECONDS)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        model = get_user_model()
        try:
            user = model._default_manager.get_by_natural_key(options["user"])
        except model.DoesNotExist:
            raise CommandError(f"There is no user {options['user']!r}.") from None
        if not user.is_active:
            raise CommandError(f"The user {options['user']!r} is not active.")
        self.stdout.write(access.make_token(user, options["seconds"]))
