"""Uploading, using, pinning, deleting and expiring, in memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from inlay.base.errors import (
    BodyTooLargeError,
    EmbeddingsError,
    InlayError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RateLimitedError,
)
from inlay.messages.digest import Secret, row_digests
from inlay.messages.prompt import Buffer, Rows
from inlay.store import PromptStore
from inlay.store.entry import cost
from inlay.tensors import ReadLimits, read, to_rows, write
from tests.store.making import HIDDEN, TTL, Clock, elements, put, target, upload_of

SECRET = Secret(bytes(range(32)))
ONE = cost(16 * HIDDEN * 4)
"""Cost of an upload of `making.put`."""


@pytest.fixture
def store(clock: Clock) -> PromptStore:
    return PromptStore(SECRET, memory_bytes=64 * ONE, ttl=TTL, clock=clock)


def small(
    clock: Clock, places: int, *, share: int | None = None, max_entries: int = 100
) -> PromptStore:
    return PromptStore(
        SECRET,
        memory_bytes=places * ONE,
        ttl=TTL,
        max_per_tenant_bytes=None if share is None else share * ONE,
        max_entries=max_entries,
        clock=clock,
    )


def test_what_was_uploaded_comes_back_as_rows_with_their_digests(
    store: PromptStore, clock: Clock
) -> None:
    data, tensor = upload_of(1)
    stored = store.put("alice", data, tensor)
    assert (stored.num_prompts, stored.num_tokens, stored.hidden_size) == (1, 16, HIDDEN)
    assert (stored.dtype, stored.bytes, stored.pinned) == ("float32", len(tensor.data), False)
    assert stored.expires_at == clock.now + TTL
    (rows,) = store.rows("alice", stored.id, target())
    plain = to_rows(tensor, hidden_size=HIDDEN, dtype="float32")
    assert rows == Rows(plain.data, "float32", (16, HIDDEN), digests=row_digests(plain, SECRET))


def test_adopted_memory_is_kept_and_not_copied_unless_it_holds_much_else(
    store: PromptStore,
) -> None:
    data, tensor = upload_of(1)
    stored = store.put("alice", data, tensor, adopt=True)
    (rows,) = store.rows("alice", stored.id, target())
    assert rows.data.view.obj is data.view.obj
    (copied,) = store.rows("bob", store.put("bob", data, tensor).id, target())
    assert copied.data.view.obj is not data.view.obj
    roomy = bytes(data.view) + bytes(5000)
    large = read(Buffer(roomy).slice(0, len(data)), limits=ReadLimits())
    assert large.data.view.obj is roomy
    (moved,) = store.rows("carol", store.put("carol", data, large, adopt=True).id, target())
    assert moved.data.view.obj is not roomy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_are_cast_to_the_models_dtype_and_named_in_it(store: PromptStore, dtype: str) -> None:
    data, tensor = upload_of(1)
    stored = store.put("alice", data, tensor)
    plain = to_rows(tensor, hidden_size=HIDDEN, dtype=dtype)
    expected = Rows(plain.data, dtype, (16, HIDDEN), digests=row_digests(plain, SECRET))
    assert store.rows("alice", stored.id, target(dtype)) == (expected,)
    assert store.rows("alice", stored.id, target(dtype)) == (expected,)
    assert store.digests("alice", stored.id, target(dtype)) == (expected.digests,)


def test_the_second_use_for_a_model_gives_the_rows_of_the_first_without_making_them(
    store: PromptStore,
) -> None:
    id_ = put(store, "alice", 1).id
    for wanted in (target(), target("bfloat16")):
        assert store.ready("alice", id_, wanted) is None
        first = store.rows("alice", id_, wanted)
        assert store.rows("alice", id_, wanted) is first
        assert store.ready("alice", id_, wanted) is first
    # Going back to the stored dtype views the kept elements again.
    again = store.ready("alice", id_, target())
    assert again is not None
    assert again == store.rows("alice", id_, target())
    assert store.digests("alice", id_, target("float16")) is None


def test_a_batch_is_several_prompts(store: PromptStore) -> None:
    array = np.arange(3 * 5 * HIDDEN, dtype=np.float32).reshape(3, 5, HIDDEN)
    data = write(array, "npy")
    stored = store.put("alice", Buffer(data), read(data, limits=ReadLimits()))
    assert (stored.num_prompts, stored.num_tokens) == (3, 5)
    for wanted in (target(), target("bfloat16"), target()):
        made = store.rows("alice", stored.id, wanted)
        assert [rows.shape for rows in made] == [(5, HIDDEN)] * 3
        assert all(
            rows.digests == row_digests(Rows(rows.data, rows.dtype, rows.shape), SECRET)
            for rows in made
        )
    assert elements(store, "alice", stored.id) == array.tobytes()


def test_the_store_does_not_keep_the_memory_it_was_given(store: PromptStore) -> None:
    data, tensor = upload_of(1)
    room = bytearray(data.view)
    expected = bytes(tensor.data.view)
    stored = store.put("alice", Buffer(room), read(room, limits=ReadLimits()))
    room[:] = bytes(len(room))
    assert elements(store, "alice", stored.id) == expected


def test_a_use_for_another_model_is_checked_again(store: PromptStore) -> None:
    data, tensor = upload_of(1, table_id="table-a")
    id_ = store.put("alice", data, tensor).id
    store.rows("alice", id_, target(table_id="table-a"))
    with pytest.raises(EmbeddingsError, match="embedding table"):
        store.rows("alice", id_, target(table_id="table-b"))
    with pytest.raises(EmbeddingsError, match="size of tensor must match"):
        store.rows("alice", id_, target(hidden=HIDDEN + 1))
    with pytest.raises(EmbeddingsError, match="magnitude"):
        store.rows("alice", id_, target(table_id="table-a", max_abs=0.5))
    assert store.ready("alice", id_, target(table_id="table-a")) is not None
    assert store.ready("alice", id_, target(table_id="table-a", max_abs=10.0)) is None
    store.rows("alice", id_, target(table_id="table-a", max_abs=10.0))
    assert store.ready("alice", id_, target(table_id="table-a", max_abs=11.0)) is not None
    assert store.ready("alice", id_, target(table_id="table-a", max_abs=9.0)) is None


def test_rows_that_are_not_finite_are_refused_at_every_use(store: PromptStore) -> None:
    array = np.full((16, HIDDEN), np.nan, np.float32)
    data = write(array, "safetensors")
    id_ = store.put("alice", Buffer(data), read(data, limits=ReadLimits())).id
    for _ in range(2):
        with pytest.raises(EmbeddingsError, match="must be finite"):
            store.rows("alice", id_, target())


def test_uploading_the_same_bytes_again_starts_the_ttl_again_and_stores_nothing(
    store: PromptStore, clock: Clock
) -> None:
    first = put(store, "alice", 1)
    held = store.stats().memory_bytes
    clock.now += TTL / 2
    second = put(store, "alice", 1)
    assert second.id == first.id
    assert second.expires_at == clock.now + TTL
    assert (store.stats().count, store.stats().memory_bytes) == (1, held)


def test_the_same_bytes_have_another_id_for_another_tenant_and_under_another_secret(
    clock: Clock,
) -> None:
    store = PromptStore(SECRET, memory_bytes=64 * ONE, ttl=TTL, clock=clock)
    other = PromptStore(Secret(bytes(32)), memory_bytes=64 * ONE, ttl=TTL, clock=clock)
    ids = {
        put(store, "alice", 1).id,
        put(store, "bob", 1).id,
        put(store, "", 1).id,
        put(other, "alice", 1).id,
    }
    assert len(ids) == 4
    assert all(id_.startswith("pe-") and len(id_) == 35 for id_ in ids)


def test_moving_a_byte_from_the_tenant_to_the_data_makes_another_id() -> None:
    from inlay.store.names import Names

    names = Names(SECRET)
    assert names.id("ab", Buffer(b"c")) != names.id("a", Buffer(b"bc"))


Use = Callable[[PromptStore, str, str], object]
USES: dict[str, Use] = {
    "get": lambda store, tenant, id_: store.get(tenant, id_),
    "rows": lambda store, tenant, id_: store.rows(tenant, id_, target()),
    "ready": lambda store, tenant, id_: store.ready(tenant, id_, target()),
    "digests": lambda store, tenant, id_: store.digests(tenant, id_, target()),
    "pin": lambda store, tenant, id_: store.pin(tenant, id_, True),
    "unpin": lambda store, tenant, id_: store.pin(tenant, id_, False),
    "delete": lambda store, tenant, id_: store.delete(tenant, id_),
}


def refusal(use: Use, store: PromptStore, tenant: str, id_: str) -> tuple[object, ...]:
    before = store.stats()
    with pytest.raises(InlayError) as raised:
        use(store, tenant, id_)
    error, after = raised.value, store.stats()
    assert after.misses == before.misses + 1
    assert (after.count, after.pinned, after.hits) == (before.count, before.pinned, before.hits)
    text = error.message.replace(id_, "ID")
    assert str(error) == error.message
    assert error.__cause__ is None
    return type(error), text, error.status, error.param, error.code, error.retry_after


@pytest.mark.parametrize("name", USES)
def test_anothers_id_is_refused_exactly_as_one_that_was_never_given(
    store: PromptStore, clock: Clock, name: str
) -> None:
    stored = put(store, "alice", 1)
    store.rows("alice", stored.id, target())
    missing = "pe-" + "a" * 32
    assert refusal(USES[name], store, "bob", stored.id) == refusal(
        USES[name], store, "bob", missing
    )
    assert refusal(USES[name], store, "bob", stored.id)[0] is NotFoundError
    assert "not found" in str(refusal(USES[name], store, "bob", stored.id)[1])
    assert store.get("alice", stored.id).expires_at == stored.expires_at
    clock.now += TTL
    assert refusal(USES[name], store, "alice", missing)[:2] == (
        NotFoundError,
        "prompt_embeds 'ID' not found",
    )


@pytest.mark.parametrize("name", USES)
def test_an_expired_id_is_refused_as_one_that_was_never_given(
    store: PromptStore, clock: Clock, name: str
) -> None:
    stored = put(store, "alice", 1)
    clock.now += TTL
    with pytest.raises(NotFoundError, match="not found"):
        USES[name](store, "alice", stored.id)
    assert store.stats().count == 0
    assert store.stats().memory_bytes == 0
    assert store.stats().expirations == 1


def test_an_id_is_quoted_and_cut_in_the_message(store: PromptStore) -> None:
    with pytest.raises(NotFoundError) as raised:
        store.get("alice", "pe-\n" + "x" * 10_000)
    assert len(raised.value.message) < 200
    assert "\n" not in raised.value.message


def test_every_use_starts_the_ttl_again_and_looking_does_not(
    store: PromptStore, clock: Clock
) -> None:
    id_ = put(store, "alice", 1).id
    for _ in range(5):
        clock.now += TTL * 0.75
        store.rows("alice", id_, target())
    clock.now += TTL * 0.75
    assert store.ready("alice", id_, target()) is not None
    clock.now += TTL * 0.75
    assert store.digests("alice", id_, target()) is not None
    clock.now += TTL * 0.75
    store.get("alice", id_)
    clock.now += TTL * 0.75
    with pytest.raises(NotFoundError):
        store.get("alice", id_)


def test_a_pinned_prompt_does_not_expire_and_an_unpinned_one_does_again(
    store: PromptStore, clock: Clock
) -> None:
    id_ = put(store, "alice", 1).id
    assert store.pin("alice", id_, True).expires_at is None
    clock.now += 10 * TTL
    assert store.sweep() == 0
    assert store.get("alice", id_).pinned
    assert store.pin("alice", id_, False).expires_at == clock.now + TTL
    clock.now += TTL
    assert store.sweep() == 1
    assert store.stats().count == 0


def test_the_least_recently_used_goes_first_and_never_a_pinned_one(clock: Clock) -> None:
    store = small(clock, 4)
    ids = [put(store, "alice", seed).id for seed in range(4)]
    store.pin("alice", ids[0], True)
    put(store, "alice", 1)
    put(store, "bob", 4)
    for index in (0, 1, 3):
        assert store.get("alice", ids[index]).id == ids[index]
    with pytest.raises(NotFoundError):
        store.get("alice", ids[2])
    assert store.stats().evictions == 1


def test_a_full_store_still_remembers_what_a_use_found_out(clock: Clock) -> None:
    store = small(clock, 3)
    ids = [put(store, "alice", seed).id for seed in range(3)]
    store.pin("alice", ids[0], True)
    store.rows("alice", ids[1], target())
    assert store.ready("alice", ids[1], target()) is not None
    with pytest.raises(NotFoundError):
        store.get("alice", ids[2])
    # A cast is not worth anybody's place, nor are digests that of a pinned prompt.
    store = small(clock, 2)
    ids = [put(store, "alice", seed).id for seed in range(2)]
    store.pin("alice", ids[0], True)
    store.rows("alice", ids[1], target())
    assert store.ready("alice", ids[1], target()) is None
    assert store.stats().count == 2


def test_a_store_full_of_pinned_prompts_says_so_and_keeps_them(clock: Clock) -> None:
    store = small(clock, 2)
    ids = [put(store, "alice", seed).id for seed in range(2)]
    for id_ in ids:
        store.pin("alice", id_, True)
    with pytest.raises(OverloadedError, match="pinned") as raised:
        put(store, "bob", 3)
    assert raised.value.retry_after is not None
    assert all(store.get("alice", id_).pinned for id_ in ids)
    store.delete("alice", ids[0])
    put(store, "bob", 3)


def test_an_upload_that_finds_no_room_evicts_nobody_in_vain(clock: Clock) -> None:
    store = small(clock, 4)
    pinned = put(store, "alice", 1).id
    store.pin("alice", pinned, True)
    other = put(store, "alice", 2).id
    with pytest.raises(OverloadedError):
        put(store, "bob", 3, rows=768)
    assert store.get("alice", other).id == other


def test_a_tenants_share_is_its_own(clock: Clock) -> None:
    store = small(clock, 10, share=2)
    ids = [put(store, "alice", seed).id for seed in range(2)]
    with pytest.raises(RateLimitedError, match="share") as raised:
        put(store, "alice", 2)
    assert raised.value.retry_after is not None
    put(store, "alice", 0)  # the same bytes need no more of it
    put(store, "bob", 2)
    store.delete("alice", ids[0])
    put(store, "alice", 2)
    clock.now += TTL
    put(store, "alice", 3)
    put(store, "alice", 4)


def test_an_upload_larger_than_the_store_or_the_share_is_too_large(clock: Clock) -> None:
    with pytest.raises(BodyTooLargeError, match="may hold"):
        put(small(clock, 2), "alice", 1, rows=16 * 300)
    with pytest.raises(BodyTooLargeError, match="for one caller"):
        put(small(clock, 1000, share=1), "alice", 1, rows=16 * 300)


def test_the_number_of_entries_is_bounded(clock: Clock) -> None:
    store = small(clock, 50, max_entries=2)
    first, second = put(store, "alice", 1).id, put(store, "alice", 2).id
    store.pin("alice", first, True)
    put(store, "alice", 3)
    with pytest.raises(NotFoundError):
        store.get("alice", second)
    store.pin("alice", put(store, "alice", 3).id, True)
    with pytest.raises(OverloadedError):
        put(store, "alice", 4)
    assert store.stats().count == 2


def test_a_deleted_prompt_can_be_uploaded_again(store: PromptStore) -> None:
    id_ = put(store, "alice", 1).id
    store.delete("alice", id_)
    with pytest.raises(NotFoundError):
        store.delete("alice", id_)
    assert store.stats().memory_bytes == 0
    assert put(store, "alice", 1).id == id_
    elements(store, "alice", id_)


def test_rows_in_use_outlive_their_entry(store: PromptStore) -> None:
    data, tensor = upload_of(1)
    id_ = store.put("alice", data, tensor).id
    (rows,) = store.rows("alice", id_, target())
    store.delete("alice", id_)
    assert rows.data == tensor.data


def test_casts_and_digests_count_and_give_way_to_uploads(clock: Clock) -> None:
    store = PromptStore(SECRET, memory_bytes=cost(1 << 20) * 2, ttl=TTL, clock=clock)
    first = put(store, "alice", 1, rows=(1 << 20) // (4 * HIDDEN)).id
    alone = store.stats().memory_bytes
    store.rows("alice", first, target("bfloat16"))
    assert store.stats().memory_bytes == alone + (1 << 19) + 16 * (1 << 20) // (4 * HIDDEN)
    put(store, "alice", 2, rows=(1 << 19) // (4 * HIDDEN))
    assert store.stats().memory_bytes <= cost(1 << 20) * 2


def test_threads_that_upload_equal_bytes_store_them_once(store: PromptStore) -> None:
    data, tensor = upload_of(1, rows=20_000)
    start = threading.Barrier(8)
    store = PromptStore(SECRET, memory_bytes=1 << 24, ttl=TTL)

    def upload() -> str:
        start.wait()
        return store.put("alice", data, tensor).id

    with ThreadPoolExecutor(8) as pool:
        ids = {future.result() for future in [pool.submit(upload) for _ in range(8)]}
    assert len(ids) == 1
    assert store.stats().count == 1
    assert store.stats().memory_bytes == cost(len(tensor.data))


def test_threads_that_want_the_same_rows_get_the_same_rows() -> None:
    store = PromptStore(SECRET, memory_bytes=1 << 24, ttl=TTL)
    data, tensor = upload_of(1, rows=20_000)
    id_ = store.put("alice", data, tensor).id
    start = threading.Barrier(8)

    def use() -> tuple[Rows, ...]:
        start.wait()
        return store.rows("alice", id_, target("bfloat16"))

    with ThreadPoolExecutor(8) as pool:
        made = [future.result() for future in [pool.submit(use) for _ in range(8)]]
    assert all(rows is made[0] for rows in made)


def test_a_tensor_that_is_no_prompt_is_not_stored(store: PromptStore) -> None:
    data = write(np.zeros(64, np.float32), "npy")
    with pytest.raises(EmbeddingsError, match=r"must be a torch\.Tensor"):
        store.put("alice", Buffer(data), read(data, limits=ReadLimits()))
    assert store.stats().count == 0


def test_a_closed_store_does_nothing_more(store: PromptStore) -> None:
    id_ = put(store, "alice", 1).id
    store.close()
    store.close()
    for use in USES.values():
        with pytest.raises(OverloadedError, match="closed"):
            use(store, "alice", id_)
    with pytest.raises(OverloadedError, match="closed"):
        put(store, "alice", 1)


@pytest.mark.parametrize(
    ("memory", "disk", "ttl", "entries"),
    [(-1, 0, 1.0, 1), (1, 5, 1.0, 1), (1, 0, 0.0, 1), (1, 0, 1.0, 0)],
)
def test_bounds_that_make_no_sense_are_refused(
    memory: int, disk: int, ttl: float, entries: int
) -> None:
    with pytest.raises(InvalidRequestError, match="got"):
        PromptStore(SECRET, memory_bytes=memory, disk_bytes=disk, ttl=ttl, max_entries=entries)


def test_a_touch_starts_the_time_to_live_again(store: PromptStore, clock: Clock) -> None:
    stored = put(store, "alice", 1)
    for _ in range(3):
        clock.now += TTL * 0.9
        assert store.touch("alice", stored.id).expires_at == clock.now + TTL
    with pytest.raises(NotFoundError):
        store.touch("bob", stored.id)
    clock.now += TTL
    with pytest.raises(NotFoundError):
        store.touch("alice", stored.id)
