"""Uploads to a fleet that are cut off, come second, or come many at once."""

import asyncio

import nats.errors
import pytest

from inlay.base.errors import OverloadedError, RateLimitedError
from inlay.store import StoredPrompt
from inlay.store.entry import cost
from tests.store.frontends import Frontends
from tests.store.making import plain, upload_of


async def test_who_leaves_while_its_record_is_kept_leaves_the_content_too(
    frontends: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await frontends.frontend(), await frontends.frontend()
    swap, placed, go_on = one.shared.swap, asyncio.Event(), asyncio.Event()

    async def slow(key: str, record: bytes, revision: int) -> bool:
        done = await swap(key, record, revision)
        placed.set()
        await go_on.wait()
        return done

    with monkeypatch.context() as patched:
        patched.setattr(one.shared, "swap", slow)
        leaving = asyncio.create_task(one.put("alice", 1))
        await placed.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    go_on.set()
    await one.settled()
    again = await one.put("alice", 1)
    assert await other.elements("alice", again.id) == plain(1)
    assert len(await one.shared.contents()) == 1


async def test_an_upload_of_which_nats_did_not_say_whether_it_was_kept_keeps_its_content(
    frontends: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await frontends.frontend(), await frontends.frontend()
    swap = one.shared.swap

    async def unheard(key: str, record: bytes, revision: int) -> bool:
        await swap(key, record, revision)
        raise OverloadedError("NATS does not keep a stored prompt at the moment")

    with monkeypatch.context() as patched:
        patched.setattr(one.shared, "swap", unheard)
        with pytest.raises(OverloadedError):
            await one.put("alice", 1)
    await one.settled()
    again = await one.put("alice", 1)
    assert await other.elements("alice", again.id) == plain(1)


@pytest.mark.parametrize("uploads", [1, 2], ids=["gone", "uploaded again by another"])
async def test_an_upload_whose_answer_is_lost_and_that_is_deleted_before_it_is_tried_again_is_whole(
    frontends: Frontends, monkeypatch: pytest.MonkeyPatch, uploads: int
) -> None:
    one, other = await frontends.frontend(), await frontends.frontend()
    id_ = (await one.put("alice", 1)).id
    await one.store.delete("alice", id_)
    update, lost = one.shared._records.update, False

    async def unheard(key: str, value: bytes, last: int | None = None) -> int:
        nonlocal lost
        revision = await update(key, value, last)
        if not lost:
            lost = True
            await other.store.delete("alice", id_)
            for _ in range(1, uploads):
                await other.put("alice", 1)
            raise nats.errors.TimeoutError
        return revision

    with monkeypatch.context() as patched:
        patched.setattr(one.shared._records, "update", unheard)
        again = await one.put("alice", 1)
    assert lost
    assert again.id == id_
    third = await frontends.frontend()
    assert await third.elements("alice", id_) == plain(1)
    await one.settled()
    assert len(await one.shared.contents()) == 1


async def test_who_leaves_after_another_was_first_leaves_no_content(
    frontends: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await frontends.frontend(), await frontends.frontend()
    swap, asked, go_on = one.shared.swap, asyncio.Event(), asyncio.Event()

    async def slow(key: str, record: bytes, revision: int) -> bool:
        asked.set()
        await go_on.wait()
        return await swap(key, record, revision)

    with monkeypatch.context() as patched:
        patched.setattr(one.shared, "swap", slow)
        leaving = asyncio.create_task(one.put("alice", 1))
        await asked.wait()
        stored = await other.put("alice", 1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    go_on.set()
    await one.settled()
    assert len(await one.shared.contents()) == 1
    assert await one.elements("alice", stored.id) == plain(1)


async def test_uploads_at_once_keep_to_their_tenants_share(frontends: Frontends) -> None:
    one = await frontends.frontend(max_per_tenant_bytes=3 * cost(len(plain(1))))
    told = await asyncio.gather(
        *(one.put("alice", seed) for seed in range(1, 21)),
        one.put("bob", 1),
        return_exceptions=True,
    )
    assert isinstance(told.pop(), StoredPrompt)
    kept = [found for found in told if isinstance(found, StoredPrompt)]
    refused = [found for found in told if isinstance(found, RateLimitedError)]
    assert (len(kept), len(refused)) == (3, 17)
    await one.settled()
    await one.store.delete("alice", kept[0].id)
    assert (await one.put("alice", 21)).bytes == len(plain(21))
    assert not one.store._shares._under_way


async def test_the_same_prompt_many_times_at_once_takes_one_part_of_a_share(
    frontends: Frontends,
) -> None:
    one = await frontends.frontend(max_per_tenant_bytes=cost(len(plain(1))))
    told = await asyncio.gather(*(one.put("alice", 1) for _ in range(8)))
    assert len({stored.id for stored in told}) == 1
    with pytest.raises(RateLimitedError, match="your share"):
        await one.put("alice", 2)
    await one.settled()
    assert len(await one.shared.contents()) == 1


async def test_an_upload_that_comes_to_nothing_gives_its_part_of_the_share_back(
    frontends: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await frontends.frontend(max_per_tenant_bytes=cost(len(plain(1))))

    def refuse(num_bytes: int) -> None:
        raise OverloadedError(f"{num_bytes} bytes are too many")

    with pytest.raises(OverloadedError, match="too many"):
        await one.store.put("alice", *upload_of(1), hold=refuse)
    writing, never = asyncio.Event(), asyncio.Event()

    async def stuck(*_: object) -> int:
        writing.set()
        await never.wait()
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(one.shared, "write", stuck)
        leaving = asyncio.create_task(one.put("alice", 2))
        await writing.wait()
        with pytest.raises(RateLimitedError, match="your share"):
            await one.put("alice", 3)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    assert (await one.put("alice", 3)).bytes == len(plain(3))
