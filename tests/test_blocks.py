"""Memory that was freed is used again, is bounded, and is given back after a while."""

import asyncio
import gc

import numpy as np
import pytest

from inlay.base.blocks import MIN_BYTES, BlockPool
from inlay.transport import ReceiveMemory

SIZE = 4 * MIN_BYTES


def address(array: object) -> int:
    return int(np.frombuffer(array, np.uint8).ctypes.data)  # type: ignore[call-overload]


async def test_what_is_freed_is_used_again_and_what_is_in_use_is_not() -> None:
    pool = BlockPool()
    first, second = pool.take(SIZE), pool.take(SIZE)
    where = address(first)
    view = first[100:].data
    del first
    await asyncio.sleep(0)
    assert pool.kept_bytes == 0, "a view of it is left"
    assert address(pool.take(SIZE)) != where
    del view
    await asyncio.sleep(0)
    third = pool.take(SIZE - 7)
    assert third.shape == (SIZE - 7,)
    assert address(third) == where
    second[:], third[:] = 2, 3
    assert (second == 2).all()


async def test_a_block_is_not_wasted_on_little_and_small_ones_are_not_kept() -> None:
    pool = BlockPool()
    where = address(pool.take(SIZE))
    await asyncio.sleep(0)
    assert address(pool.take(SIZE // 2)) != where
    small = pool.take(MIN_BYTES - 1)
    del small
    await asyncio.sleep(0)
    assert pool.kept_bytes == SIZE + SIZE // 2


async def test_no_more_is_kept_than_is_allowed() -> None:
    pool = BlockPool(2 * SIZE)
    blocks = [pool.take(SIZE) for _ in range(5)]
    del blocks
    await asyncio.sleep(0)
    assert pool.kept_bytes == 2 * SIZE
    assert len(pool.take(3 * SIZE)) == 3 * SIZE
    await asyncio.sleep(0)
    assert pool.kept_bytes == 0, "what is larger than all takes the place of all, and is not kept"


async def test_what_nobody_uses_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.base.blocks.KEPT_SECONDS", 0.05)
    pool = BlockPool()
    pool.take(SIZE)
    await asyncio.sleep(0)
    assert pool.kept_bytes == SIZE
    async with asyncio.timeout(10):
        while pool.kept_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    pool.take(SIZE)
    await asyncio.sleep(0)
    assert pool.kept_bytes == SIZE, "and it keeps again"


async def test_threads_share_a_pool() -> None:
    pool = BlockPool()

    def some() -> bool:
        ok = True
        for number in range(200):
            block = pool.take(SIZE)
            block[::4096] = number % 251
            ok &= bool((block[::4096] == number % 251).all())
        return ok

    assert all(await asyncio.gather(*(asyncio.to_thread(some) for _ in range(3))))
    await asyncio.sleep(0)
    assert pool.kept_bytes


async def test_memory_of_messages_is_used_again() -> None:
    memory = ReceiveMemory(1 << 26)
    got: list[list[memoryview]] = []
    memory.request([100, SIZE], got.append)
    where = address(got[0][1])
    got.clear()
    gc.collect()
    await asyncio.sleep(0)
    assert memory.used == 0
    memory.request([100, SIZE], got.append)
    assert address(got[0][1]) == where
