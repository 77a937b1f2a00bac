"""Stored images and vectors: kept as files, by tenant, in every tier and over a fleet."""

from functools import partial

import msgspec
import numpy as np
import pytest

from inlay.base.errors import BodyTooLargeError, InvalidRequestError, NotFoundError
from inlay.messages.prompt import Buffer
from inlay.store import LocalStoredPrompts, NewImage, NewVectors, PromptStore
from inlay.store.entry import Description
from tests.store.directories import MANY, SEALED_OR_NOT, SECRET, Opened
from tests.store.frontends import Frontends, seen
from tests.store.making import TTL, Clock, plain, put, target, upload_of


def picture(seed: int, num_bytes: int = 5000) -> NewImage:
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).tobytes()
    return NewImage(Buffer(data), "PNG", 40, 30)


@SEALED_OR_NOT
def test_an_image_survives_a_restart(opened: Opened, key: bytes | None) -> None:
    store, one = opened(key=key), picture(1)
    stored = store.put("alice", one.data, one)
    assert (stored.kind, stored.format, stored.shape) == ("image", "PNG", (40, 30))
    assert (stored.bytes, stored.num_tokens) == (5000, 0)
    store = opened(key=key)
    assert store.get("alice", stored.id) == stored
    assert store.ready_file("alice", stored.id) is None
    assert store.file("alice", stored.id) == one.data
    assert store.ready_file("alice", stored.id) == one.data
    assert (store.stats().loads, store.stats().hits) == (1, 1)
    with pytest.raises(NotFoundError):
        store.file("bob", stored.id)


async def test_an_image_that_memory_has_no_room_for_is_read_when_it_is_used(
    opened: Opened, clock: Clock
) -> None:
    one = picture(1, 50_000)
    prompts = LocalStoredPrompts(opened(memory=8192, disk=MANY * 2))
    held: list[int] = []
    stored = await prompts.put("alice", one.data, one)
    found = await prompts.file("alice", stored.id, look=seen, hold=held.append)
    assert found == one.data
    assert held == [50_000]
    clock.now += TTL + 1
    with pytest.raises(NotFoundError):
        await prompts.file("alice", stored.id, look=seen)


def test_kinds_are_told_apart_even_with_equal_bytes(opened: Opened) -> None:
    store = opened()
    data, tensor = upload_of(1)
    rows = store.put("alice", data, tensor)
    image = store.put("alice", data, NewImage(data, "PNG", 1, 1))
    assert rows.id != image.id
    with pytest.raises(InvalidRequestError, match="is an image"):
        store.rows("alice", image.id, target())
    with pytest.raises(InvalidRequestError, match="holds embeddings"):
        store.file("alice", rows.id)


def test_images_count_in_the_share_of_a_tenant(clock: Clock) -> None:
    store = PromptStore(
        SECRET,
        memory_bytes=MANY,
        ttl=TTL,
        max_per_tenant_bytes=8192,
        clock=clock,
    )
    one = picture(1, 20_000)
    with pytest.raises(BodyTooLargeError):
        store.put("alice", one.data, one)


async def test_an_image_of_one_frontend_is_served_by_another(
    frontends: Frontends, clock: Clock
) -> None:
    one, other = await frontends.frontend(), await frontends.frontend()
    image = picture(1)
    stored = await one.store.put("alice", image.data, image)
    beside = await one.put("alice", 2)
    assert await other.store.get("alice", stored.id) == stored
    held: list[int] = []
    found = await other.store.file("alice", stored.id, look=seen, hold=held.append)
    assert found == image.data
    assert sum(held) > len(image.data)
    # By this name workers keep it.
    assert found.name.endswith(f"{stored.id}/file")
    again = await other.store.file("alice", stored.id, look=seen, hold=held.append)
    assert (again, again.name) == (found, found.name)
    assert other.store.stats().fetches == 1
    assert await other.elements("alice", beside.id) == plain(2)
    with pytest.raises(InvalidRequestError, match="is an image"):
        await other.rows("alice", stored.id)
    with pytest.raises(InvalidRequestError, match="holds embeddings"):
        await other.store.file("alice", beside.id, look=seen)
    with pytest.raises(NotFoundError):
        await other.store.file("bob", stored.id, look=seen)
    assert (await other.store.pin("alice", stored.id, True)).pinned
    clock.now += 2 * TTL
    assert await one.store.file("alice", stored.id, look=seen) == image.data
    await other.store.delete("alice", stored.id)
    with pytest.raises(NotFoundError):
        await one.store.file("alice", stored.id, look=seen)


async def test_vectors_are_kept_sealed_or_not_and_served_by_another_frontend(
    opened: Opened, frontends: Frontends
) -> None:
    data = picture(3, 9000).data
    vectors = NewVectors(data, (17, 128), "float16")
    stored = opened(key=b"k" * 32).put("alice", data, vectors)
    assert stored.id.startswith("pv-")
    assert (stored.kind, stored.shape, stored.dtype) == ("vectors", (17, 128), "float16")
    assert (stored.num_tokens, stored.hidden_size, stored.bytes) == (0, 0, 9000)
    store = opened(key=b"k" * 32)
    assert store.ready_file("alice", stored.id, "vectors") is None
    assert store.file("alice", stored.id, "vectors") == data
    for wrong in (partial(store.file, "alice"), partial(store.rows, "alice", target=target())):
        with pytest.raises(InvalidRequestError, match="holds vectors"):
            wrong(stored.id)
    one, other = await frontends.frontend(), await frontends.frontend()
    shared = await one.store.put("alice", data, vectors)
    assert await other.store.file("alice", shared.id, "vectors", look=seen) == data
    with pytest.raises(NotFoundError):
        await other.store.file("bob", shared.id, "vectors", look=seen)


def test_records_of_before_are_of_embeddings(opened: Opened) -> None:
    """A description without the field `kind`, as files and records of 0.2.0 have it."""
    store = opened()
    put(store, "alice", 1)
    (entry,) = store._index.entries
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(entry.description))[:-1]
    found = msgspec.convert(old, Description)
    assert found == entry.description
