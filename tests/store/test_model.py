"""A store against a plain dictionary, over any sequence of operations."""

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle as IdBundle
from hypothesis.stateful import (
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inlay.base.errors import NotFoundError, OverloadedError, RateLimitedError
from inlay.messages.digest import Secret
from inlay.store import PromptStore
from inlay.store.entry import cost
from tests.store.making import HIDDEN, TTL, Clock, target, upload_of

SECRET = Secret(bytes(range(32)))
TENANTS = ("alice", "bob", "carol")
SIZES = (1, 100, 300)
UPLOADS = {seed: upload_of(seed, rows=SIZES[seed % len(SIZES)]) for seed in range(12)}
COSTS = {seed: cost(len(tensor.data)) for seed, (_, tensor) in UPLOADS.items()}
SHARE = sum(COSTS.values()) // 2
KEY = bytes(range(32, 64))

seeds = st.sampled_from(sorted(UPLOADS))
tenants = st.sampled_from(TENANTS)
dtypes = st.sampled_from(["float32", "bfloat16"])


class Kept:
    """A prompt in the dictionary: the least that the store must know."""

    def __init__(self, seed: int, used_at: float) -> None:
        self.seed = seed
        self.used_at = used_at
        self.pinned = False


class StoreAgainstDict(RuleBasedStateMachine):
    """The store may forget an unpinned prompt early, for room, and only then.

    Nothing else may differ.
    """

    ids: IdBundle[tuple[str, str]] = IdBundle("ids")
    memory = 0
    disk = 0
    key: bytes | None = None

    def __init__(self) -> None:
        super().__init__()
        self.room = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.model: dict[tuple[str, str], Kept] = {}
        self.full = False
        self.store = self.opened()

    def opened(self) -> PromptStore:
        return PromptStore(
            SECRET,
            memory_bytes=self.memory,
            disk_bytes=self.disk,
            directory=Path(self.room.name) / "store" if self.disk else None,
            ttl=TTL,
            max_per_tenant_bytes=SHARE,
            max_entries=20,
            encryption_key=self.key,
            clock=self.clock,
        )

    def teardown(self) -> None:
        self.store.close()
        self.room.cleanup()

    def live(self, name: tuple[str, str]) -> Kept | None:
        kept = self.model.get(name)
        if kept is not None and not kept.pinned and self.clock.now >= kept.used_at + TTL:
            del self.model[name]
            return None
        return kept

    def forgotten(self, name: tuple[str, str]) -> None:
        """The store does not know `name`.

        It must have expired, been deleted, or made room unpinned.
        """
        kept = self.live(name)
        if kept is not None:
            assert not kept.pinned
            assert self.store.stats().evictions > 0
            del self.model[name]

    @initialize(target=ids, tenant=tenants)
    def an_id_that_was_never_given(self, tenant: str) -> tuple[str, str]:
        return tenant, "pe-" + "a" * 32

    @rule(target=ids, tenant=tenants, seed=seeds)
    def put(self, tenant: str, seed: int) -> Any:
        # For the share only what the store really holds counts.
        for name in list(self.model):
            if self.live(name) is not None:
                try:
                    self.store.get(*name)
                except NotFoundError:
                    self.forgotten(name)
        held = sum(COSTS[kept.seed] for name, kept in self.model.items() if name[0] == tenant)
        present = {(name[0], kept.seed) for name, kept in self.model.items()}
        try:
            stored = self.store.put(tenant, *UPLOADS[seed])
        except RateLimitedError:
            assert (tenant, seed) not in present
            assert held + COSTS[seed] > SHARE
            return multiple()
        except OverloadedError:
            pinned = [kept for kept in self.model.values() if kept.pinned]
            assert (tenant, seed) not in present
            assert pinned
            return multiple()
        assert (tenant, seed) in present or held + COSTS[seed] <= SHARE
        name = (tenant, stored.id)
        kept = self.live(name)
        if kept is None:
            kept = self.model[name] = Kept(seed, self.clock.now)
        kept.used_at = self.clock.now
        assert stored.expires_at == (None if kept.pinned else self.clock.now + TTL)
        return name

    @rule(name=ids, dtype=dtypes)
    def use(self, name: tuple[str, str], dtype: str) -> None:
        try:
            (rows,) = self.store.rows(*name, target(dtype))
        except NotFoundError:
            self.forgotten(name)
            return
        kept = self.live(name)
        assert kept is not None
        tensor = UPLOADS[kept.seed][1]
        assert rows.shape == tensor.shape
        if dtype == "float32":
            assert rows.data == tensor.data
        ready = self.store.ready(*name, target(dtype))
        assert ready is None or ready == (rows,)
        assert self.store.digests(*name, target(dtype)) in (None, (rows.digests,))
        kept.used_at = self.clock.now

    @rule(name=ids)
    def look(self, name: tuple[str, str]) -> None:
        try:
            stored = self.store.get(*name)
        except NotFoundError:
            self.forgotten(name)
            return
        kept = self.live(name)
        assert kept is not None
        assert stored.pinned is kept.pinned
        assert stored.expires_at == (None if kept.pinned else kept.used_at + TTL)
        assert stored.num_tokens * HIDDEN * 4 == stored.bytes == len(UPLOADS[kept.seed][1].data)

    @rule(name=ids, pinned=st.booleans())
    def pin(self, name: tuple[str, str], pinned: bool) -> None:
        try:
            self.store.pin(*name, pinned)
        except NotFoundError:
            self.forgotten(name)
            return
        kept = self.live(name)
        assert kept is not None
        kept.pinned, kept.used_at = pinned, self.clock.now

    @rule(name=consumes(ids))
    def delete(self, name: tuple[str, str]) -> None:
        try:
            self.store.delete(*name)
        except NotFoundError:
            self.forgotten(name)
        else:
            assert self.live(name) is not None
            del self.model[name]
        with pytest.raises(NotFoundError):
            self.store.get(*name)

    @rule(name=ids, tenant=tenants)
    def try_anothers(self, name: tuple[str, str], tenant: str) -> None:
        if tenant == name[0]:
            return
        with pytest.raises(NotFoundError):
            self.store.rows(tenant, name[1], target())

    @rule(seconds=st.sampled_from([1.0, TTL / 4, TTL]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def sweep(self) -> None:
        self.store.sweep()

    @precondition(lambda self: self.disk)
    @rule()
    def flush(self) -> None:
        self.store.flush()

    @precondition(lambda self: self.disk >= 2 * sum(COSTS.values()))
    @rule()
    def restart(self) -> None:
        """With room for all on disk, nothing is lost."""
        for name in list(self.model):
            if self.live(name) is not None:
                self.look(name)
        self.store.close()
        self.store = self.opened()
        for name in list(self.model):
            if self.live(name) is not None:
                self.look(name)

    @invariant()
    def bounds_hold(self) -> None:
        stats = self.store.stats()
        assert stats.memory_bytes <= self.memory
        assert stats.disk_bytes <= self.disk
        assert stats.count <= 20
        self.store.flush()
        # The books are private: no caller may see them, and nothing else shows that they are wrong
        # before it is late.
        self.store._index.check()


class MemoryOnly(StoreAgainstDict):
    memory = sum(COSTS.values()) // 2


class SmallMemoryLargeDisk(StoreAgainstDict):
    memory = sum(COSTS.values()) // 4
    disk = 3 * sum(COSTS.values())


class LargeMemorySmallDisk(StoreAgainstDict):
    memory = sum(COSTS.values())
    disk = sum(COSTS.values()) // 3


class SealedDiskWithoutMemory(StoreAgainstDict):
    disk = sum(COSTS.values())
    key = KEY


@pytest.mark.parametrize(
    "machine", [MemoryOnly, SmallMemoryLargeDisk, LargeMemorySmallDisk, SealedDiskWithoutMemory]
)
def test_a_store_agrees_with_a_dictionary(machine: type[StoreAgainstDict]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40))
