"""What a host's own tests see with `AGUIAPP = {"WRITER": "inline"}`: a plain TestCase is enough."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.test import AsyncClient, Client, TestCase, modify_settings, override_settings

from aguiapp import RunContext, access, agents, engine, store
from aguiapp.models import Run, RunEvent, Thread
from tests import scripts
from tests.scripts import legal, run_input, said


async def shopkeeper(run: RunContext) -> None:
    """A host's agent, which uses the ORM."""
    name = await run.call(lambda: User.objects.get(pk=run.user.pk).username)
    async with run.message(message_id=f"m-{run.input['runId']}") as message:
        await message.write(f"Hello {name}, you said {run.last_user_text}")
    await run.set_state({"greeted": name})


class SyncOnly:
    """A middleware of a host that knows nothing of async."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        response = self.get_response(request)
        response["X-Sync"] = "1"
        return response


@override_settings(AGUIAPP={"WRITER": "inline"})
class TestHost(TestCase):
    user: User

    @classmethod
    def setUpTestData(cls) -> None:
        cls.user = User.objects.create_user("guest", password="guest")

    def setUp(self) -> None:
        agents.agent("shopkeeper")(shopkeeper)
        self.addCleanup(agents.unregister, "shopkeeper")
        self.headers = {"authorization": f"Bearer {access.make_token(self.user)}"}

    def post(self, body: Any, query: str = "") -> Any:
        return Client(headers=self.headers).post(
            f"/agui/agents/shopkeeper/{query}", data=body, content_type="application/json"
        )

    def test_a_sync_client_gets_the_whole_stream(self) -> None:
        response = self.post(run_input(messages=[said("u1", "tea")]))
        assert response.status_code == 200
        assert response["Content-Type"] == "text/event-stream; charset=utf-8"
        frames = scripts.frames(response.content)
        legal([json.loads(frame.data) for frame in frames])
        assert "Hello guest, you said tea" in frames[2].data
        run = Run.objects.get()
        assert (run.status, run.last_seq, str(run.key)) == ("success", 6, response["AGUI-Run"])
        assert [e.payload for e in run.events.order_by("seq")] == [f.data for f in frames]

    @modify_settings(MIDDLEWARE={"append": "tests.test_inline.SyncOnly"})
    def test_a_sync_middleware_is_no_matter_for_a_sync_client(self) -> None:
        response = self.post(run_input(messages=[said("u1", "tea")]))
        assert (response.status_code, response["X-Sync"]) == (200, "1")

    @modify_settings(MIDDLEWARE={"append": "tests.test_inline.SyncOnly"})
    async def test_a_sync_middleware_is_no_matter_for_an_async_client(self) -> None:
        response = await AsyncClient().post(
            "/agui/agents/shopkeeper/",
            data=run_input(),
            content_type="application/json",
            headers=self.headers,
        )
        assert (response.status_code, response["X-Sync"]) == (200, "1")

    def test_a_sync_client_gets_a_document(self) -> None:
        events = self.post(run_input(), "?stream=0").json()["events"]
        assert [e["type"] for e in events][-1] == "RUN_FINISHED"

    def test_a_second_run_goes_on_where_the_first_one_ended(self) -> None:
        self.post(run_input(messages=[said("u1", "tea")]))
        response = self.post(run_input(run="r2", messages=[said("u2", "milk")]))
        events = [json.loads(frame.data) for frame in scripts.frames(response.content)]
        legal(events)
        assert int(response["AGUI-Unlogged"]) > 0
        fold = store.snapshot(Thread.objects.get()).fold
        assert [m["id"] for m in fold.messages] == ["u1", "m-r1", "u2", "m-r2"]
        assert Run.objects.count() == 2

    def test_refusals_are_the_same(self) -> None:
        assert self.post({"threadId": ""}).status_code == 422
        assert Client().post("/agui/agents/shopkeeper/").status_code == 401
        self.post(run_input())
        refused = self.post(run_input(messages=[said("other")]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "run_id_taken")
        # The transaction of the test is still good.
        assert User.objects.filter(username="guest").exists()

    def test_a_failing_agent_leaves_the_transaction_whole(self) -> None:
        async def broken(run: RunContext) -> None:
            await run.call(lambda: User.objects.get(pk=-1))

        agents.agent("broken")(broken)
        self.addCleanup(agents.unregister, "broken")
        response = Client(headers=self.headers).post(
            "/agui/agents/broken/", data=run_input(), content_type="application/json"
        )
        assert b"agent_failed" in response.content
        assert Run.objects.get().status == "error"

    def test_reads_work_as_well(self) -> None:
        key = self.post(run_input(messages=[said("u1", "tea")]))["AGUI-Thread"]
        client = Client(headers=self.headers)
        snapshot = client.get(f"/agui/threads/{key}/snapshot").json()
        assert snapshot["state"] == {"greeted": "guest"}
        lines = client.get(f"/agui/threads/{key}/events").content.decode().splitlines()
        assert len(lines) == 6
        assert len(client.get("/agui/threads/").json()["threads"]) == 1

    async def test_an_async_client_gets_the_same(self) -> None:
        client = AsyncClient()
        response = await client.post(
            "/agui/agents/shopkeeper/",
            data=run_input(messages=[said("u1", "tea")]),
            content_type="application/json",
            headers=self.headers,
        )
        frames = scripts.frames(response.content)
        assert "you said tea" in frames[2].data
        key = response["AGUI-Thread"]
        snapshot = await client.get(f"/agui/threads/{key}/snapshot", headers=self.headers)
        assert snapshot.json()["messages"][-1]["id"] == "m-r1"
        assert await Run.objects.acount() == 1

    def test_without_http(self) -> None:
        run = engine.run_now("shopkeeper", run_input(messages=[said("u1", "x")]), user=self.user)
        assert run.status == "success"
        assert RunEvent.objects.filter(run=run).exists()

    def test_a_rollback_leaves_nothing(self) -> None:
        with transaction.atomic():
            self.post(run_input(messages=[said("u1")]))
            assert Thread.objects.count() == 1
            transaction.set_rollback(True)
        assert not Thread.objects.exists()
        assert not RunEvent.objects.exists()

    def test_the_tests_before_left_nothing(self) -> None:
        assert not Thread.objects.exists()
        assert not Run.objects.exists()
        assert not RunEvent.objects.exists()

    def test_a_long_run_is_written_in_pieces(self) -> None:
        async def long(run: RunContext) -> None:
            for _ in range(3000):
                await run.emit({"type": "CUSTOM", "name": "n", "value": "x" * 500})

        agents.agent("long")(long)
        self.addCleanup(agents.unregister, "long")
        run = engine.run_now("long", run_input(), user=self.user)
        assert (run.status, run.last_seq) == ("success", 3002)


@pytest.mark.django_db
@override_settings(AGUIAPP={"WRITER": "inline"})
def test_a_plain_database_fixture_is_enough(user: User) -> None:
    with scripts.registered("shopkeeper", shopkeeper):
        run = engine.run_now("shopkeeper", run_input(messages=[said("u1", "x")]), user=user)
    assert run.status == "success"
