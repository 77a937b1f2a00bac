"""Two frontends of a fleet against one plain dictionary, over any sequence of operations and a real NATS server."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle as IdBundle
from hypothesis.stateful import (
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)

from inlay.base.errors import NotFoundError, OverloadedError
from inlay.store.shared import LATE
from tests.store.frontends import Frontend, Frontends
from tests.store.making import TTL, Clock, upload_of
from tests.transport.nats_server import NatsServer

T = TypeVar("T")

TENANTS = ("alice", "bob")
SEEDS = range(6)
ROWS = (1, 100, 300)

seeds = st.sampled_from(SEEDS)
tenants = st.sampled_from(TENANTS)
which = st.integers(0, 1)


class Kept:
    """A prompt in the dictionary."""

    def __init__(self, seed: int, used_at: float) -> None:
        self.seed = seed
        self.used_at = used_at
        self.pinned = False


class FleetAgainstDict(RuleBasedStateMachine):
    """A fleet may keep a prompt a little longer than its TTL, and forget an unpinned one for room.

    Nothing else may differ.
    """

    server: NatsServer
    max_bytes = 1 << 24
    memory = (1 << 20, 20_000)
    ids: IdBundle[tuple[str, str]] = IdBundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = Clock()
        self.model: dict[tuple[str, str], Kept] = {}
        self.fleet = Frontends(self.server, self.clock)
        self.pair = [self.run(self.joined(number)) for number in range(2)]

    def run(self, request: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(request)

    async def joined(self, number: int) -> Frontend:
        return await self.fleet.frontend(memory_bytes=self.memory[number], max_bytes=self.max_bytes)

    def teardown(self) -> None:
        for frontend in self.pair:
            self.run(frontend.settled())
        self.run(self.fleet.close())
        self.runner.close()

    def state(self, name: tuple[str, str]) -> tuple[bool, bool]:
        """(it must be there, it may be there)."""
        kept = self.model.get(name)
        if kept is None:
            return False, False
        age = self.clock.now - kept.used_at
        full = self.max_bytes < 1 << 24
        return kept.pinned or (age < TTL and not full), kept.pinned or age < TTL * (1 + LATE)

    def absent(self, name: tuple[str, str]) -> None:
        assert not self.state(name)[0]
        self.model.pop(name, None)

    def present(self, name: tuple[str, str]) -> Kept:
        assert self.state(name)[1]
        return self.model[name]

    @initialize(target=ids, tenant=tenants)
    def an_id_that_was_never_given(self, tenant: str) -> tuple[str, str]:
        return tenant, "pe-" + "a" * 32

    @rule(target=ids, tenant=tenants, seed=seeds, at=which)
    def put(self, tenant: str, seed: int, at: int) -> Any:
        try:
            stored = self.run(self.pair[at].put(tenant, seed, rows=ROWS[seed % 3]))
        except OverloadedError:
            assert self.max_bytes < 1 << 24
            assert any(kept.pinned for kept in self.model.values())
            return multiple()
        name = (tenant, stored.id)
        kept = self.model.get(name)
        if kept is None or not stored.pinned:
            # It had expired, or gone for others.
            kept = self.model[name] = Kept(seed, self.clock.now)
        assert kept.pinned is stored.pinned
        kept.used_at = self.clock.now
        assert stored.expires_at == (None if kept.pinned else self.clock.now + TTL)
        return name

    @rule(name=ids, at=which)
    def use(self, name: tuple[str, str], at: int) -> None:
        try:
            found = self.run(self.pair[at].elements(*name))
        except NotFoundError:
            self.absent(name)
            return
        self.run(self.pair[at].settled())
        kept = self.present(name)
        assert found == bytes(upload_of(kept.seed, rows=ROWS[kept.seed % 3])[1].data.view)
        kept.used_at = self.clock.now

    @rule(name=ids, at=which)
    def look(self, name: tuple[str, str], at: int) -> None:
        try:
            stored = self.run(self.pair[at].store.get(*name))
        except NotFoundError:
            self.absent(name)
            return
        kept = self.present(name)
        assert stored.pinned is kept.pinned
        if stored.expires_at is not None:
            assert kept.used_at + TTL * (1 - LATE) <= stored.expires_at <= kept.used_at + TTL

    @rule(name=ids, pinned=st.booleans(), at=which)
    def pin(self, name: tuple[str, str], pinned: bool, at: int) -> None:
        try:
            stored = self.run(self.pair[at].store.pin(*name, pinned))
        except NotFoundError:
            self.absent(name)
            return
        kept = self.present(name)
        kept.pinned, kept.used_at = pinned, self.clock.now
        assert stored.pinned is pinned

    @rule(name=consumes(ids), at=which)
    def delete(self, name: tuple[str, str], at: int) -> None:
        try:
            self.run(self.pair[at].store.delete(*name))
        except NotFoundError:
            self.absent(name)
        else:
            self.present(name)
            del self.model[name]
        for frontend in self.pair:
            with pytest.raises(NotFoundError):
                self.run(frontend.elements(*name))

    @rule(name=ids, tenant=tenants, at=which)
    def try_anothers(self, name: tuple[str, str], tenant: str, at: int) -> None:
        if tenant != name[0] and (tenant, name[1]) not in self.model:
            with pytest.raises(NotFoundError):
                self.run(self.pair[at].elements(tenant, name[1]))

    @rule(seconds=st.sampled_from([1.0, TTL / 4, TTL]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(at=which)
    def reap(self, at: int) -> None:
        self.run(self.pair[at].store._reaper.reap())

    @rule(at=which)
    def die_and_another_joins(self, at: int) -> None:
        self.run(self.pair[at].settled())
        self.run(self.pair[at].close())
        self.pair[at] = self.run(self.joined(at))


class SmallFleet(FleetAgainstDict):
    max_bytes = 45_000


@pytest.mark.slow
@pytest.mark.parametrize("machine", [FleetAgainstDict, SmallFleet])
def test_two_frontends_agree_with_a_dictionary(
    machine: type[FleetAgainstDict], nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FleetAgainstDict, "server", nats_server, raising=False)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=5, stateful_step_count=20, deadline=None)
    )
