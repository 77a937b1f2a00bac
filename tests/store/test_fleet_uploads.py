"""Uploads to a fleet that are cut off, come second, or come many at once."""

import asyncio

import pytest

from inlay.errors import OverloadedError
from tests.store.frontends import Frontends
from tests.store.making import plain


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
