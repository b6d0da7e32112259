"""Who somebody is, and what they may do with a thread. Closed by default."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.conf import settings
from django.contrib.auth import SESSION_KEY, get_user_model
from django.contrib.auth.base_user import AbstractBaseUser
from django.core import signing
from django.core.exceptions import DisallowedHost, ValidationError
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.middleware.csrf import CsrfViewMiddleware
from django.utils.crypto import constant_time_compare, salted_hmac

from aguiapp import conf, store
from aguiapp.errors import AguiError, CsrfFailed, Forbidden, NotFound, Unauthenticated
from aguiapp.models import Participant, Run, Thread

RIGHTS = frozenset({"see", "speak", "answer", "cancel", "edit", "export"})
ROLE_RIGHTS: dict[str, frozenset[str]] = {
    Participant.Role.VIEWER: frozenset({"see"}),
    Participant.Role.MEMBER: RIGHTS - {"export"},
}
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
TOKEN_SALT = "aguiapp.bearer"  # noqa: S105  (names a purpose, is no secret)


@dataclass(frozen=True)
class Identity:
    """Somebody: their Django user (None for a session), and the scope their threads live in.

    `mark` is of the password they came with, `expires` of their token (Unix time), `session` the
    key of their session: a stream ends when any of them does.
    """

    user: Any
    scope: str
    mark: str = ""
    expires: float | None = None
    session: str | None = None

    @property
    def actor(self) -> str:
        """An opaque id of this person, for events; names are resolved when shown."""
        return "p" + salted_hmac("aguiapp.actor", self.scope, algorithm="sha256").hexdigest()[:20]


async def identify(request: HttpRequest) -> Identity:
    """Who asks: by the host's AUTHENTICATE hook, else by the session, with Django's CSRF check.

    Raises Unauthenticated, or CsrfFailed for an unsafe method without a valid token.
    """
    user = await _call(conf.imported("AUTHENTICATE"), request)
    if user is not None and user.is_authenticated:
        expires = getattr(request, "agui_token_expires", None)
        return Identity(user, f"user:{user.pk}", _password_mark(user), expires)
    auser = getattr(request, "auser", None)
    user = await auser() if auser is not None else None
    if user is not None and user.is_authenticated:
        _check_csrf(request)
        session = getattr(request, "session", None)
        key = session.session_key if session is not None else None
        return Identity(user, f"user:{user.pk}", _password_mark(user), session=key)
    if conf.get().ANONYMOUS and hasattr(request, "session"):
        _check_csrf(request)
        return Identity(None, await _session_scope(request))
    raise Unauthenticated


async def _call(hook: Any, request: HttpRequest) -> Any:
    """A hook of the host, sync or async; a sync one may use the ORM."""
    if iscoroutinefunction(hook):
        return await hook(request)
    return await sync_to_async(hook, thread_sensitive=True)(request)


async def _session_scope(request: HttpRequest) -> str:
    if not request.session.session_key:
        await request.session.acreate()
    digest = salted_hmac("aguiapp.session", request.session.session_key or "", algorithm="sha256")
    return f"session:{digest.hexdigest()}"


class _CsrfCheck(CsrfViewMiddleware):
    """Django's own check, answering with the reason instead of a page."""

    def _reject(self, request: HttpRequest, reason: str) -> Any:
        return reason

    def origin_verified(self, request: HttpRequest) -> bool:
        return bool(self._origin_verified(request))  # type: ignore[attr-defined]


def _check_csrf(request: HttpRequest) -> None:
    if request.method in SAFE_METHODS:
        return
    check = _CsrfCheck(_no_view)
    check.process_request(request)
    if reason := check.process_view(request, _no_view, (), {}):
        raise CsrfFailed(details={"reason": str(reason)})


def _no_view(request: HttpRequest) -> Any:
    """Stands for a view that is not exempt from the check."""


# -- bearer tokens ---------------------------------------------------------------


def make_token(user: AbstractBaseUser, seconds: int | None = None) -> str:
    """A signed token that speaks for `user` until it expires or the password changes."""
    lifetime = conf.get().TOKEN_SECONDS if seconds is None else seconds
    claim = {"u": str(user.pk), "e": int(time.time()) + lifetime, "p": _password_mark(user)}
    return signing.dumps(claim, salt=TOKEN_SALT, compress=True)


def _password_mark(user: Any) -> str:
    found = getattr(user, "get_session_auth_hash", None)
    return found()[:24] if found is not None else ""


async def bearer_user(request: HttpRequest) -> AbstractBaseUser | None:
    """The default AUTHENTICATE hook: `Authorization: Bearer <token of agui_token>`.

    None when the request carries no bearer token; raises Unauthenticated for a bad one.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    try:
        claim = signing.loads(token.strip(), salt=TOKEN_SALT)
        user = await store.call(get_user_model()._default_manager.get, pk=claim["u"])
        expires, mark = int(claim["e"]), str(claim["p"])
    except (signing.BadSignature, get_user_model().DoesNotExist, ValidationError) as error:
        raise Unauthenticated("The bearer token is not valid.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise Unauthenticated("The bearer token is not valid.") from error
    if expires < time.time() or not user.is_active:
        raise Unauthenticated("The bearer token has expired.")
    if not constant_time_compare(mark, _password_mark(user)):
        raise Unauthenticated("The bearer token has expired.")
    request.agui_token_expires = expires  # type: ignore[attr-defined]
    return user


# -- threads ---------------------------------------------------------------------


class Policy:
    """The default rules: an owner may do everything, participants what their role allows.

    Subclass it and name it in `AGUIAPP["POLICY"]`. Both methods run off the event loop.
    """

    def visible(self, identity: Identity) -> Q:
        """Which threads this person may see; everything else does not exist for them."""
        mine = Q(scope=identity.scope)
        if identity.user is None:
            return mine
        shared = Participant.objects.filter(user_id=identity.user.pk).values("thread_id")
        return mine | Q(pk__in=shared)

    def rights(self, identity: Identity, thread: Thread) -> frozenset[str]:
        """What this person may do with a thread they may see: a part of RIGHTS."""
        if thread.scope == identity.scope:
            return RIGHTS
        part = thread.participants.filter(user=identity.user).first() if identity.user else None
        return ROLE_RIGHTS.get(part.role, frozenset()) if part else frozenset()


def threads(identity: Identity) -> QuerySet[Thread]:
    """The threads that exist for this person: the start of every query of every view."""
    policy: Policy = conf.imported("POLICY")()
    return Thread.objects.using(store.database()).filter(policy.visible(identity))


def find(identity: Identity, key: uuid.UUID, right: str) -> Thread:
    """The thread of that key, if this person has that right.

    Raises NotFound for what they may not see, Forbidden for what they may see but not do.
    """
    return _allowed(identity, threads(identity).filter(key=key).first(), right)


def own(identity: Identity, thread_id: str) -> Thread | None:
    """This person's own thread of that id, if they may see it; None where there is none yet."""
    thread = threads(identity).filter(scope=identity.scope, thread_id=thread_id).first()
    return None if thread is None else _allowed(identity, thread, "see")


def may(identity: Identity, thread: Thread, right: str) -> bool:
    """Whether a person who sees the thread has that right."""
    return right in _rights(identity, thread)


def _rights(identity: Identity, thread: Thread) -> frozenset[str]:
    policy: Policy = conf.imported("POLICY")()
    return policy.rights(identity, thread)


def _allowed(identity: Identity, thread: Thread | None, right: str) -> Thread:
    if thread is None or "see" not in (rights := _rights(identity, thread)):
        raise NotFound
    if right not in rights:
        raise Forbidden(details={"right": right})
    return thread


def still_valid(identity: Identity) -> bool:
    """Whether what somebody identified themselves with still counts."""
    if identity.expires is not None and identity.expires < time.time():
        return False
    if identity.user is None:
        return True
    user = get_user_model()._default_manager.filter(pk=identity.user.pk, is_active=True).first()
    if user is None or not constant_time_compare(_password_mark(user), identity.mark):
        return False
    if identity.session is None:
        return True
    session = import_module(settings.SESSION_ENGINE).SessionStore(identity.session)
    return bool(session.get(SESSION_KEY) == str(user.pk))


def still_has(run: Run, right: str) -> bool:
    """Whether who asked for a run that waits, or waited, still has that right on its thread.

    A session's own thread, or one of the server's, nobody can take away.
    """
    if run.user is None or not run.thread.scope.startswith("user:"):
        return True
    identity = Identity(run.user, f"user:{run.user.pk}")
    visible = threads(identity).filter(pk=run.thread_id).exists()
    return bool(run.user.is_active and visible and may(identity, run.thread, right))


def refusal(identity: Identity, thread: Thread) -> AguiError | None:
    """Why a person who opened a stream may not go on reading it; None when they may."""
    if not still_valid(identity):
        return Unauthenticated()
    try:
        find(identity, thread.key, "see")
    except (NotFound, Forbidden) as error:
        return error
    return None


def origin_allowed(request: HttpRequest) -> bool:
    """Whether a handshake's Origin is this host or trusted; other clients than browsers send none."""
    if "HTTP_ORIGIN" not in request.META:
        return True
    try:
        return _CsrfCheck(_no_view).origin_verified(request)
    except DisallowedHost:
        return False
