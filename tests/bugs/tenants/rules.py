"""Hooks of the host: a policy that follows a relation of the user, and two ways to say who it is."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.db.models import Q
from django.http import HttpRequest

from aguiapp import access
from aguiapp.models import Thread


class Policy(access.Policy):
    """Only people of a tenant that is allowed see anything."""

    def visible(self, identity: access.Identity) -> Q:
        if not identity.user.tenant.allowed:
            return Q(pk__in=[])
        return super().visible(identity)

    def rights(self, identity: access.Identity, thread: Thread) -> frozenset[str]:
        return super().rights(identity, thread) if identity.user.tenant.name else frozenset()


def key_of(request: HttpRequest) -> str:
    """Who a request says it is from."""
    return str(request.headers.get("X-Person", ""))


def known(request: HttpRequest) -> Any:
    """A sync hook that uses the ORM."""
    return get_user_model()._default_manager.filter(username=key_of(request)).first()


async def aknown(request: HttpRequest) -> Any:
    """The same as an async one."""
    return await get_user_model()._default_manager.filter(username=key_of(request)).afirst()
