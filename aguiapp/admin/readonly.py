"""Admin pages that show and never write."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest


class ReadOnly:
    """Nobody adds, changes or deletes through the admin: only the store writes these tables."""

    def has_add_permission(self, request: HttpRequest, *_: Any) -> bool:
        """Whether rows can be added: never."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Whether rows can be changed: never."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Whether rows can be deleted: never."""
        return False
