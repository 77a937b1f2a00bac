"""Bounds of what is kept, and of what a request for it may take."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace

from inlay.base.errors import InvalidRequestError, OverloadedError, RateLimitedError
from inlay.http.bodies.accounting import ByteBudget, EmbedsLimits, RequestMemory, Reservation
from inlay.http.settings import FrontendSettings
from inlay.messages.prompt import Buffer
from inlay.store.kept.contents import Contents
from inlay.store.kept.memory import MemoryStorage
from inlay.store.kept.rounds import rounds
from inlay.store.settings import BatchSettings, ResponseSettings
from inlay_state.items import encoded
from inlay_state.kept import Kept
from inlay_state.records import ConversationRecord, encode
from tests.live import Fleet
from tests.payloads import embeds_of, error, saved
from tests.state.place import Interrupted
from tests.state.test_responses import ASK, client_of, ended

MIB = 1024 * 1024
USER: Any = {"type": "message", "role": "user"}


@pytest.fixture(scope="module")
def small(llama: Fleet, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A server whose tenants may keep 20,000 bytes each."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(json.dumps([{"key": f"key-of-{name}", "name": name} for name in "acde"]))
    return llama.serve(
        responses=ResponseSettings(response_store="memory", responses_tenant_bytes=20_000),
        api_key_file=keys,
    )


def fill(client: openai.OpenAI) -> None:
    """Begin conversations until the tenant has room for none."""

    def begin(size: int) -> None:
        while True:
            client.conversations.create(items=[USER | {"content": "x" * size}])

    for size in (2000, 100):
        with pytest.raises(openai.RateLimitError):
            begin(size)


def test_a_tenant_at_its_limit_may_remove_an_item(llama: Fleet, small: str) -> None:
    with client_of(small, "key-of-a") as client:
        made = client.conversations.create(items=[USER | {"content": "x" * 1000}] * 3)
        fill(client)
        records = llama.run(llama.apps[small].server.parts["state"].kept.storage.size())[1]
        fill(client)
        assert llama.run(llama.apps[small].server.parts["state"].kept.storage.size())[1] == records
        items = client.conversations.items.list(made.id).data
        client.conversations.items.delete(str(items[0].id), conversation_id=made.id)
        assert len(client.conversations.items.list(made.id).data) == 2


def test_a_tenant_at_its_limit_may_cancel(small: str) -> None:
    with client_of(small, "key-of-c") as client:
        made = client.responses.create(
            input="count",
            background=True,
            extra_body={"ignore_eos": True},
            **{**ASK, "max_output_tokens": 400},
        )
        fill(client)
        # It may have ended by now: whatever it is, it is no error.
        assert client.responses.cancel(made.id).id == made.id


def test_records_count_against_their_owner(small: str) -> None:
    with client_of(small, "key-of-d") as client:
        metadata = {f"{index:064}": "x" * 512 for index in range(16)}
        first = client.conversations.create(metadata=metadata)
        client.conversations.create(metadata=metadata)
        with pytest.raises(openai.RateLimitError):
            client.conversations.create(metadata=metadata)
        small_one = client.conversations.create()
        with pytest.raises(openai.RateLimitError):
            client.conversations.update(small_one.id, metadata=metadata)
        client.conversations.delete(first.id)
        client.conversations.create(metadata=metadata)


def test_what_takes_another_place_needs_room_for_the_rest_alone() -> None:
    async def main() -> None:
        storage = MemoryStorage(MIB)
        kept = Kept(storage, Contents(storage), max_bytes=MIB, owner_bytes=1000, ttl=60)
        pieces = await kept.write("owner", "output", b"x" * 900)
        with pytest.raises(RateLimitedError):
            await kept.write("owner", "output", b"y" * 901)
        with pytest.raises(RateLimitedError):
            await kept.write("owner", "output", b"y" * 1001, instead_of=pieces)
        more = await kept.write("owner", "output", b"y" * 1000, instead_of=pieces)
        await kept.erase("owner", pieces)
        assert await kept.read(more) == b"y" * 1000
        with pytest.raises(RateLimitedError):
            kept.check_room("owner", 1)

    asyncio.run(main())


def test_what_is_being_written_takes_room_and_what_is_refused_gives_it_back() -> None:
    async def main() -> None:
        storage = Interrupted(MIB)
        kept = Kept(storage, Contents(storage), max_bytes=MIB, owner_bytes=1000, ttl=60)

        async def another() -> None:
            with pytest.raises(RateLimitedError):
                await kept.write("owner", "input", b"y" * 500)

        async def refuse() -> None:
            raise OverloadedError("full")

        storage.on_write = another
        await kept.write("owner", "output", b"x" * 600)
        storage.on_write = refuse
        with pytest.raises(OverloadedError):
            await kept.write("owner", "output", b"x" * 400)
        await kept.write("owner", "output", b"x" * 400)

    asyncio.run(main())


def test_what_is_kept_expires_and_leaves_nothing() -> None:
    async def act() -> None:
        now, storage = 1000.0, MemoryStorage(MIB)
        contents = Contents(storage)
        kept = Kept(storage, contents, max_bytes=MIB, owner_bytes=MIB, ttl=60, clock=lambda: now)
        items = await kept.write("owner", "items", b"[]")
        record = ConversationRecord(
            id="conv_a", created_at=1000, expires_at=kept.expiry(), items=items
        )
        await kept.add("owner", record)
        now += 59
        assert (await kept.find("owner", "conv_a", ConversationRecord))[1] == record
        now += 1
        assert (await kept.find("owner", "conv_a", ConversationRecord))[1] is None
        await kept.sweep(0)
        assert await storage.list() == []
        assert await storage.contents() == set()

    asyncio.run(act())


def test_a_sweep_counts_records_as_they_were_counted_before() -> None:
    async def main() -> None:
        storage = MemoryStorage(MIB)
        kept = Kept(storage, Contents(storage), max_bytes=MIB, owner_bytes=1000, ttl=60)
        record = ConversationRecord(
            id="conv_a", created_at=0, expires_at=kept.expiry(), metadata={"a": "x" * 400}
        )
        await kept.add("owner", record)
        left = 1000 - len(encode(record))
        for _ in range(2):
            kept.check_room("owner", left)
            with pytest.raises(RateLimitedError):
                kept.check_room("owner", left + 1)
            await kept.sweep(0.0)
        await kept.drop("owner", "conv_a", ConversationRecord)
        kept.check_room("owner", 1000)

    asyncio.run(main())


def test_a_sweep_keeps_the_count_of_what_is_under_way() -> None:
    async def main() -> None:
        record = ConversationRecord(
            id="conv_a", created_at=0, expires_at=2**40, metadata={"a": "x" * 400}
        )

        class Listing(Interrupted):
            """Storage where a record comes while records are listed."""

            on_list: Callable[[], Awaitable[object]] | None = None

            async def list(self, under: str = "*") -> "list[tuple[str, int, bytes]]":
                found, act, self.on_list = await super().list(under), self.on_list, None
                if act is not None:
                    await act()
                return found

        storage = Listing(MIB)
        kept = Kept(storage, Contents(storage), max_bytes=MIB, owner_bytes=1000, ttl=60)

        def left() -> int:
            return next(size for size in range(1000, -1, -1) if not _refused(kept, "owner", size))

        # While it is written, and while no record names it yet.
        storage.on_write = lambda: kept.sweep(3600)
        pieces = await kept.write("owner", "output", b"x" * 600)
        assert left() == 400
        await kept.sweep(3600)
        assert left() == 400
        # Named by a record, it counts once; erased, or gone by another frontend, not at all.
        named = replace(record, items=pieces, metadata={})
        await kept.add("owner", named)
        await kept.sweep(3600)
        assert left() == 400 - len(encode(named))
        await kept.drop("owner", record.id, ConversationRecord)
        assert left() == 1000
        pieces = await kept.write("owner", "output", b"x" * 600)
        await Contents(storage).erase(pieces)
        await kept.sweep(3600)
        assert left() == 1000
        storage.on_list = lambda: kept.add("owner", record)
        await kept.sweep(3600)
        assert left() == 1000 - len(encode(record))

    asyncio.run(main())


def _refused(kept: Kept, owner: str, size: int) -> bool:
    try:
        kept.check_room(owner, size)
    except RateLimitedError:
        return True
    return False


def test_background_responses_are_one_client_with_the_limits_of_their_key(
    llama: Fleet, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('[{"key": "key-of-b", "name": "b", "max_requests": 1}]')
    url = llama.serve(responses=ResponseSettings(response_store="memory"), api_key_file=keys)
    with client_of(url, "key-of-b") as client:
        options: Any = {"background": True, "extra_body": {"ignore_eos": True}}
        first = client.responses.create(
            input="count", **options, **{**ASK, "max_output_tokens": 300}
        )
        while client.responses.retrieve(first.id).status == "queued":
            time.sleep(0.05)
        second = client.responses.create(
            input="count", **options, **{**ASK, "max_output_tokens": 1}
        )
        ended(client, second.id)
        assert client.responses.retrieve(first.id).status in ("completed", "incomplete")


def test_reading_a_conversation_takes_memory_of_its_client(llama: Fleet) -> None:
    url = llama.serve(responses=ResponseSettings(response_store="memory"), max_client_bytes=4 * MIB)
    with client_of(url) as client:
        made = client.conversations.create(items=[USER | {"content": "x" * MIB}])
        for path in ("/items", "/items/msg_1"):
            refused = httpx.get(f"{url}/v1/conversations/{made.id}{path}")
            assert refused.status_code == 413
            assert "--max-client-bytes" in error(refused)["message"]
        less = client.conversations.create(items=[USER | {"content": "x" * 100_000}])
        assert client.conversations.items.list(less.id).data
        while llama.apps[url].server.budget.used:
            time.sleep(0.01)


def test_what_a_request_holds_stays_until_its_end() -> None:
    settings = FrontendSettings()
    reservation = Reservation(ByteBudget(MIB))
    memory = RequestMemory(reservation, EmbedsLimits(settings, list))
    memory.hold(1000)
    memory.parsing(b"{}")
    memory.settle([], 10)
    assert reservation.size == 1010


def test_data_goes_back_into_its_own_place() -> None:
    lifted = {f"key.{index}": Buffer(bytes([index]) * 300_000) for index in range(12)}
    sent = [{"image_url": f"data:image/png;base64,{name}"} for name in lifted]
    made = encoded(sent, lifted).decode()
    for index, found in enumerate(made.split("data:image/png;base64,")[1:]):
        whole = encoded(f"key.{index}", lifted).decode().strip('"')
        assert found.split('"')[0] == whole
        assert len(whole) == 400_000


def test_responses_and_batches_do_not_share_a_directory(llama: Fleet, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--batch-store"):
        llama.serve(
            batches=BatchSettings(batch_store=str(tmp_path / "store")),
            responses=ResponseSettings(response_store=f"{tmp_path}/./store"),
        )


def test_a_round_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        begun, more = asyncio.Event(), asyncio.Event()
        times = 0

        async def act() -> None:
            nonlocal times
            times += 1
            begun.set()
            if times == 1:
                raise OSError("the disk is gone")

        task = asyncio.create_task(rounds(act, 3600.0, more))
        for _ in range(2):
            await begun.wait()
            begun.clear()
            more.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert times >= 2

    asyncio.run(main())
    assert "the disk is gone" in caplog.text


def test_input_items_outlive_what_came_before(small: str) -> None:
    with client_of(small, "key-of-e") as client:
        conversation = client.conversations.create()
        of_one = client.responses.create(input="one", conversation=conversation.id, **ASK)
        client.conversations.delete(conversation.id)
        first = client.responses.create(input="one", **ASK)
        second = client.responses.create(input="two", previous_response_id=first.id, **ASK)
        client.responses.delete(first.id)
        for made in (of_one, second):
            (item,) = client.responses.input_items.list(made.id).data
            assert item.type == "message"


@pytest.mark.parametrize("limit", ["000000000005999999", "00000000005" + "9" * 5000, "0", "101"])
def test_a_limit_out_of_range_is_refused(small: str, limit: str) -> None:
    headers = {"authorization": "Bearer key-of-e"}
    with httpx.Client(base_url=small, headers=headers) as client:
        made = client.post("/v1/conversations", json={}).json()
        refused = client.get(f"/v1/conversations/{made['id']}/items?limit={limit}")
        assert refused.status_code == 400
        assert error(refused)["param"] == "limit"


def test_an_item_that_is_refused_is_named_by_its_path(small: str) -> None:
    headers = {"authorization": "Bearer key-of-e"}
    with httpx.Client(base_url=small, headers=headers) as client:
        bad = [{**USER, "content": "x"}, {"type": "computer_call"}]
        refused = client.post("/v1/responses", json={"model": "tiny", "input": bad})
        assert error(refused)["param"] == "input[1].type"
        refused = client.post("/v1/conversations", json={"items": bad})
        assert error(refused)["param"] == "items[1].type"
        bad[1] = {"role": "tool", "content": "x"}
        refused = client.post("/v1/conversations", json={"items": bad})
        assert error(refused)["param"] == "items[1].role"
        assert error(refused)["message"].startswith("items[1].role")


def test_the_copy_of_an_input_that_is_kept_is_reserved(llama: Fleet) -> None:
    rows = saved(embeds_of(llama).repeat(30, 1))
    assert len(rows) > 64 * 1024, "it is taken out of the JSON"
    part = {"type": "prompt_embeds", "data": rows}
    body = {"model": "tiny", "input": [USER | {"content": [part]}], "max_output_tokens": 1}
    url = llama.serve(
        responses=ResponseSettings(response_store="memory"),
        enable_prompt_embeds=True,
        max_client_bytes=len(rows) * 7 // 5,
    )
    assert httpx.post(f"{url}/v1/responses", json=body | {"store": False}).status_code == 200
    refused = httpx.post(f"{url}/v1/responses", json=body)
    assert refused.status_code == 413
    assert "--max-client-bytes" in error(refused)["message"]
