"""Who somebody is, and what they may do: tokens, cookies, roles, hooks."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.core import signing
from django.http import HttpRequest
from django.test import AsyncClient, Client

from aguiapp import access, errors
from aguiapp.errors import AguiError
from aguiapp.models import Command, Participant, Run, Thread
from project import scripted
from tests import scripts
from tests.scripts import Person, run_input

pytestmark = pytest.mark.django_db(transaction=True)

THREADS = "/agui/threads/"


@pytest.fixture(autouse=True)
def scripted_agent() -> Iterator[None]:
    with scripts.registered("scripted", scripted.play):
        yield


async def answer(**headers: str) -> scripts.Reply:
    """The listing, asked for with these headers."""
    return await Person(**headers).ask(THREADS)


class TestTokens:
    @pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
    async def test_a_token_speaks_for_its_user(self, user: User, scheme: str) -> None:
        assert (await answer(authorization=f"{scheme} {access.make_token(user)}")).status == 200

    @pytest.mark.parametrize("seconds", [-1, -1000])
    async def test_it_expires(self, user: User, seconds: int) -> None:
        refused = await answer(authorization=f"Bearer {access.make_token(user, seconds)}")
        assert (refused.status, refused.code) == (401, "unauthenticated")

    async def test_it_dies_with_the_password(self, user: User) -> None:
        token = access.make_token(user)
        user.set_password("new")
        await user.asave()
        assert (await answer(authorization=f"Bearer {token}")).status == 401
        assert (await answer(authorization=f"Bearer {access.make_token(user)}")).status == 200

    async def test_it_dies_with_the_user(self, user: User) -> None:
        token = access.make_token(user)
        user.is_active = False
        await user.asave()
        assert (await answer(authorization=f"Bearer {token}")).status == 401
        await user.adelete()
        assert (await answer(authorization=f"Bearer {token}")).status == 401

    @pytest.mark.parametrize(
        "token", ["", "x", "a:b:c", "é" * 5, "." * 3000, "x" * 10_000, "a b", "%00", ":::"]
    )
    async def test_garbage_is_401_and_nothing_more(self, token: str) -> None:
        refused = await answer(authorization=f"Bearer {token}")
        assert (refused.status, refused.code) == (401, "unauthenticated")
        assert refused.headers["WWW-Authenticate"] == "Bearer"

    @pytest.mark.parametrize(
        "claim", [None, [], {}, {"u": "1"}, {"u": "x", "e": 9e9, "p": ""}, {"u": [1], "e": "x"}]
    )
    async def test_a_signed_claim_of_another_shape_is_401(self, claim: Any) -> None:
        token = signing.dumps(claim, salt=access.TOKEN_SALT)
        assert (await answer(authorization=f"Bearer {token}")).status == 401

    async def test_another_salt_or_key_is_another_token(self, user: User, settings: Any) -> None:
        claim = {"u": str(user.pk), "e": int(time.time()) + 99, "p": access._password_mark(user)}
        assert (
            await answer(authorization=f"Bearer {signing.dumps(claim, salt='other')}")
        ).status == 401
        token = access.make_token(user)
        settings.SECRET_KEY = "another"
        assert (await answer(authorization=f"Bearer {token}")).status == 401

    async def test_a_bad_token_is_refused_even_with_a_good_session(self, user: User) -> None:
        person = Person(authorization="Bearer x")
        await person.client.aforce_login(user)
        assert (await person.ask(THREADS)).status == 401

    async def test_other_schemes_are_not_ours(self, user: User) -> None:
        person = Person(authorization="Basic eDp5")
        assert (await person.ask(THREADS)).status == 401
        await person.client.aforce_login(user)
        assert (await person.ask(THREADS)).status == 200

    async def test_no_token_is_taken_from_the_address(self, user: User) -> None:
        token = access.make_token(user)
        for name in ("token", "access_token", "bearer"):
            assert (await Person().ask(f"{THREADS}?{name}={token}")).status == 401


class Browser(Person):
    """Somebody with a cookie, whose requests Django checks for forgery."""

    def __init__(self, **headers: str) -> None:
        super().__init__(None, **headers)
        self.client = AsyncClient(enforce_csrf_checks=True)

    async def csrf(self) -> str:
        """The token of a page's form."""
        page = (await self.client.get("/login/")).content.decode()
        if not page:  # signed in already
            page = (await self.client.get("/")).content.decode()
        found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
        assert found
        return found[1]


PLAIN = {"script": [{"type": "CUSTOM", "name": "n", "value": 1}]}


class TestCsrf:
    async def test_a_cookie_alone_may_read_but_not_write(self, user: User) -> None:
        browser = Browser()
        await browser.client.aforce_login(user)
        assert (await browser.ask(THREADS)).status == 200
        refused = await browser.run(run_input(forwardedProps=PLAIN))
        assert (refused.status, refused.code) == (403, "csrf_failed")
        assert not await Thread.objects.aexists()

    async def test_with_the_token_it_may(self, user: User) -> None:
        browser = Browser()
        token = await browser.csrf()
        await browser.client.aforce_login(user)
        reply = await browser.run(run_input(forwardedProps=PLAIN), **{"x-csrftoken": token})
        assert reply.status == 200
        wrong = {"x-csrftoken": token[:-1] + ("x" if token[-1] != "x" else "y")}
        assert (await browser.run(run_input(run="r2"), **wrong)).code == "csrf_failed"

    @pytest.mark.parametrize(
        ("origin", "status"),
        [
            ("http://testserver", 200),
            ("http://evil.example", 403),
            ("null", 403),
            ("http://good.example", 200),
        ],
    )
    async def test_the_origin_must_be_ours_or_trusted(
        self, user: User, settings: Any, origin: str, status: int
    ) -> None:
        settings.CSRF_TRUSTED_ORIGINS = ["http://good.example"]
        browser = Browser()
        token = await browser.csrf()
        await browser.client.aforce_login(user)
        reply = await browser.run(
            run_input(forwardedProps=PLAIN), **{"x-csrftoken": token, "origin": origin}
        )
        assert reply.status == status

    async def test_a_bearer_needs_none_from_anywhere(self, user: User) -> None:
        browser = Browser(authorization=f"Bearer {access.make_token(user)}")
        body = run_input(forwardedProps=PLAIN)
        assert (await browser.run(body, origin="http://evil.example")).status == 200

    async def test_cancel_is_checked_as_well(self, user: User) -> None:
        done = await Person(user).run(run_input(script=[]))
        path = f"{THREADS}{done.headers['AGUI-Thread']}/runs/{done.headers['AGUI-Run']}/cancel"
        browser = Browser()
        await browser.client.aforce_login(user)
        assert (await browser.ask(path, {})).code == "csrf_failed"
        assert not await Command.objects.aexists()

    async def test_an_anonymous_session_is_checked_as_well(self, settings: Any) -> None:
        settings.AGUIAPP = {"ANONYMOUS": True}
        browser = Browser()
        assert (await browser.run(run_input())).code == "csrf_failed"
        token = await browser.csrf()
        reply = await browser.run(run_input(forwardedProps=PLAIN), **{"x-csrftoken": token})
        assert reply.status == 200


class TestAnonymous:
    async def test_closed_by_default(self) -> None:
        refused = await Person().run(run_input())
        assert (refused.status, refused.code) == (401, "unauthenticated")
        assert refused.headers["WWW-Authenticate"] == "Bearer"

    async def test_each_session_is_a_scope_of_its_own(self, settings: Any) -> None:
        settings.AGUIAPP = {"ANONYMOUS": True}
        first, second = Person(), Person()
        keys = [(await p.run(run_input(script=[]))).headers["AGUI-Thread"] for p in (first, second)]
        assert keys[0] != keys[1]
        assert (await first.run(run_input(run="r2", script=[]))).headers["AGUI-Thread"] == keys[0]
        assert (await first.ask(f"{THREADS}{keys[1]}/snapshot")).status == 404
        assert (await first.ask(f"{THREADS}{keys[0]}/snapshot")).status == 200
        scopes = {scope async for scope in Thread.objects.values_list("scope", flat=True)}
        assert all(scope.startswith("session:") for scope in scopes)
        session = first.client.cookies["sessionid"].value
        assert not any(session in scope for scope in scopes)

    async def test_nobody_chooses_the_session_of_somebody_else(self, settings: Any) -> None:
        """A key that the server never gave out is none."""
        settings.AGUIAPP = {"ANONYMOUS": True}
        people = [Person(), Person()]
        for person in people:
            person.client.cookies["sessionid"] = "chosenchosenchosenchosenchosench"
        keys = {(await p.run(run_input(script=[]))).headers["AGUI-Thread"] for p in people}
        assert len(keys) == 2


HOOK: dict[str, Any] = {}


def sync_hook(request: HttpRequest) -> Any:
    return HOOK["user"]


async def async_hook(request: HttpRequest) -> Any:
    return HOOK["user"]


def orm_hook(request: HttpRequest) -> Any:
    return User.objects.get(username=request.headers["X-User"])


class TestHook:
    @pytest.mark.parametrize("name", ["sync_hook", "async_hook"])
    async def test_the_host_says_who_it_is(self, user: User, settings: Any, name: str) -> None:
        settings.AGUIAPP = {"AUTHENTICATE": f"{__name__}.{name}"}
        HOOK["user"] = user
        browser = Browser()
        reply = await browser.run(run_input(script=[]))
        assert reply.status == 200
        assert (await Thread.objects.aget()).scope == f"user:{user.pk}"
        HOOK["user"] = None
        assert (await Browser().ask(THREADS)).status == 401

    async def test_an_anonymous_user_is_nobody(self, settings: Any) -> None:
        """Many hosts' functions return AnonymousUser for a stranger."""
        settings.AGUIAPP = {"AUTHENTICATE": f"{__name__}.sync_hook"}
        HOOK["user"] = AnonymousUser()
        assert (await Browser().run(run_input(script=[]))).status == 401
        assert not await Thread.objects.aexists()

    async def test_a_hook_may_ask_the_database(self, user: User, settings: Any) -> None:
        settings.AGUIAPP = {"AUTHENTICATE": f"{__name__}.orm_hook"}
        assert (await Person(**{"x-user": "ada"}).ask(THREADS)).status == 200


class TestRoles:
    @pytest.fixture
    async def key(self, user: User) -> str:
        """A thread of ada's."""
        return str((await Person(user).run(run_input(script=[]))).headers["AGUI-Thread"])

    async def share(self, key: str, other: User, role: str) -> Person:
        thread = await Thread.objects.aget(key=key)
        await Participant.objects.acreate(thread=thread, user=other, role=role)
        return Person(other)

    async def cancel_path(self, key: str) -> str:
        run = await Run.objects.alatest("pk")
        return f"{THREADS}{key}/runs/{run.key}/cancel"

    async def test_a_viewer_sees_and_no_more(self, key: str, other: User) -> None:
        bob = await self.share(key, other, "viewer")
        for path in ("snapshot", "events"):
            assert (await bob.ask(f"{THREADS}{key}/{path}")).status == 200
        for refused in (
            await bob.ask(await self.cancel_path(key), {}),
            await bob.run(run_input(run="r2", script=[]), query=f"?thread={key}"),
        ):
            assert (refused.status, refused.code) == (403, "forbidden")
        assert await Run.objects.acount() == 1
        (listed,) = (await bob.ask(THREADS)).json["threads"]
        assert (listed["key"], listed["own"]) == (key, False)
        assert (await bob.ask(f"{THREADS}?thread_id=t1")).json["threads"] == []

    async def test_a_member_speaks_and_cancels(self, key: str, other: User) -> None:
        bob = await self.share(key, other, "member")
        reply = await bob.run(run_input(run="r2", script=[]), query=f"?thread={key}")
        assert reply.status == 200
        assert reply.headers["AGUI-Thread"] == key
        assert (await bob.ask(await self.cancel_path(key), {})).status == 200
        assert await Thread.objects.acount() == 1
        run = await Run.objects.alatest("pk")
        assert run.user_id == other.pk
        wrong = await bob.run(run_input("other", "r3"), query=f"?thread={key}")
        assert (wrong.status, wrong.code) == (422, "invalid_input")

    async def test_the_same_thread_id_without_the_key_is_ones_own(
        self, key: str, other: User
    ) -> None:
        bob = await self.share(key, other, "member")
        assert (await bob.run(run_input(script=[]))).headers["AGUI-Thread"] != key

    async def test_a_run_of_another_thread_cannot_be_named(self, key: str, user: User) -> None:
        second = await Person(user).run(run_input("t2", script=[]))
        run = second.headers["AGUI-Run"]
        for path in (f"stream?run={run}", f"events?run={run}"):
            assert (await Person(user).ask(f"{THREADS}{key}/{path}")).status == 404
        assert (await Person(user).ask(f"{THREADS}{key}/runs/{run}/cancel", {})).status == 404

    def test_rights_are_one_list(self) -> None:
        assert sorted(access.RIGHTS) == ["answer", "cancel", "edit", "export", "see", "speak"]
        assert all(rights <= access.RIGHTS for rights in access.ROLE_RIGHTS.values())
        with pytest.raises(AttributeError):
            access.Identity(None, "x").scope = "y"  # type: ignore[misc]

    def test_actors_are_opaque(self, user: User) -> None:
        actor = access.Identity(user, f"user:{user.pk}").actor
        assert actor[1:] != str(user.pk)
        assert user.username not in actor
        assert actor != access.Identity(user, "user:other").actor
        assert actor == access.Identity(SimpleNamespace(), f"user:{user.pk}").actor


class TestWhileAStreamLives:
    @pytest.mark.parametrize("reason", ["unshared", "inactive", "deleted"])
    async def test_who_may_no_longer_see_is_cut_off(
        self, user: User, other: User, settings: Any, reason: str
    ) -> None:
        settings.AGUIAPP = {"HEARTBEAT_SECONDS": 0.02}
        go = asyncio.Event()

        async def slow(run: Any) -> AsyncIterator[Any]:
            yield {"type": "CUSTOM", "name": "n", "value": 1}
            await go.wait()

        with scripts.registered("slow", slow):
            mine = await Person(user).watch(run_input(), "slow")
            key = mine.response.headers["AGUI-Thread"]
            thread = await Thread.objects.aget(key=key)
            part = await Participant.objects.acreate(thread=thread, user=other)
            theirs = scripts.Stream(await Person(other).open(f"{THREADS}{key}/stream"))
            await theirs.until(lambda raw: raw.count(b": keep-alive") > 2)
            if reason == "unshared":
                await part.adelete()
            elif reason == "inactive":
                other.is_active = False
                await other.asave()
            else:
                await other.adelete()
            reply = await theirs.rest()
            assert reply.aborted
            go.set()
            assert not (await mine.rest()).aborted


def test_every_refusal_has_its_shape() -> None:
    for kind in AguiError.__subclasses__():
        body = kind().as_dict()
        assert set(body["error"]) == {"code", "message", "details"}
        assert body["error"]["message"].endswith((".", "."))


class TestStillValid:
    """What is asked again while a stream lives."""

    def identity(self, user: User, **more: Any) -> access.Identity:
        mark = access._password_mark(user)
        return access.Identity(user, f"user:{user.pk}", mark, **more)

    def test_a_person_as_they_came(self, user: User) -> None:
        assert access.still_valid(self.identity(user))
        assert access.still_valid(access.Identity(None, "session:x"))

    def test_an_expired_token(self, user: User) -> None:
        assert access.still_valid(self.identity(user, expires=time.time() + 60))
        assert not access.still_valid(self.identity(user, expires=time.time() - 1))

    def test_a_new_password_or_no_user_any_more(self, user: User) -> None:
        before = self.identity(user)
        user.set_password("new")
        user.save()
        assert not access.still_valid(before)
        again = self.identity(user)
        assert access.still_valid(again)
        User.objects.filter(pk=user.pk).update(is_active=False)
        assert not access.still_valid(again)

    def test_a_session_that_was_ended(self, user: User) -> None:
        browser = Client()
        browser.force_login(user)
        identity = self.identity(user, session=browser.session.session_key)
        assert access.still_valid(identity)
        browser.logout()
        assert not access.still_valid(identity)

    def test_a_right_that_was_taken_away(self, user: User, other: User) -> None:
        thread = Thread.objects.create(scope=f"user:{user.pk}", thread_id="t1", owner=user)
        part = Participant.objects.create(thread=thread, user=other)
        assert access.refusal(self.identity(other), thread) is None
        part.delete()
        assert isinstance(access.refusal(self.identity(other), thread), errors.NotFound)
