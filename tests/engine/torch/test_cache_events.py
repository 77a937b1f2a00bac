"""Reported events match the prefix cache after any arrivals, steps, evictions, failures, aborts."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inlay.base.errors import ContextLengthError
from inlay.engine.kv_events import BlockStored, Event, EventBatch, decode, encode
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.messages.digest import Chain, root_digest
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.routing import KEY_SIZE, KvEvent, keys_of
from inlay.worker.kv_feed import KvFeed
from tests.engine.kv_view import View
from tests.engine.torch.simulation import SECRET, Simulation, bounds, rows
from tests.engine.torch.test_scheduler_machine import build, part


class Listener:
    """Collects all events, as bytes where they go over a wire."""

    def __init__(self) -> None:
        self.view = View()
        self.feed = KvFeed()
        self.batches: list[EventBatch] = []

    def publish(self, ts: float, events: Sequence[Event]) -> None:
        batch = decode(encode(EventBatch(ts, list(events), 0)))
        self.batches.append(batch)
        self.view.read(batch)

    def close(self) -> None:
        pass

    @property
    def keys(self) -> set[bytes]:
        data = bytes(self.feed.snapshot().keys.view)
        return {data[start : start + KEY_SIZE] for start in range(0, len(data), KEY_SIZE)}


def listened(limits: Any, **options: Any) -> tuple[Simulation, Listener, CacheEventQueue]:
    """A simulation whose cache is listened to."""
    listener = Listener()
    told = EngineSettings.of(
        model="m", block_size=limits.page_size, kv_events_token_ids=options.pop("token_ids", False)
    )
    events = CacheEventQueue(told, SECRET)
    events.publisher = listener
    events.tell = listener.feed.take
    events.begin(limits.windows, limits.page_size)
    return Simulation(limits, events=events, **options), listener, events


def published(digest: bytes) -> bytes:
    return blake3(digest, key=SECRET.events).digest(16)


class EventsMachine(RuleBasedStateMachine):
    limits = bounds(num_pages=9, max_model_len=144)
    overlap = False

    def __init__(self) -> None:
        super().__init__()
        self.simulation, self.listener, self.events = listened(
            self.limits, overlap=self.overlap, ends=True
        )

    @rule(
        parts=st.lists(part, min_size=1, max_size=4),
        max_tokens=st.integers(1, 40),
        salt=st.sampled_from([None, None, "other"]),
    )
    def admit(self, parts: list[tuple[str, int, int]], max_tokens: int, salt: str | None) -> None:
        with suppress(ContextLengthError):
            self.simulation.admit(*build(parts), max_tokens=max_tokens, salt=salt)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    @precondition(lambda self: self.simulation.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.simulation.abort(data.draw(st.sampled_from(self.simulation.live)))

    @rule()
    def reset(self) -> None:
        self.simulation.scheduler.table.reset_cache()

    @rule()
    def sleep(self) -> None:
        self.events.end()
        self.simulation, listener, self.events = listened(
            self.limits, overlap=self.overlap, ends=True
        )
        assert not self.listener.view.blocks
        assert not self.listener.keys
        self.listener = listener

    @invariant()
    def view_is_the_cache(self) -> None:
        self.events.flush()
        cached = self.simulation.scheduler.cache.names()
        assert self.listener.view.blocks.keys() == {
            (group, published(digest)) for group, digest in cached
        }
        windows = list(self.limits.windows)
        routed = windows.index(None) if None in windows else 0
        blocks = self.limits.page_size // 16
        keys = self.listener.keys
        assert {digest[:KEY_SIZE] for group, digest in cached if group == routed} <= keys
        assert len(keys) == blocks * sum(group == routed for group, _ in cached)


class OverlappingEventsMachine(EventsMachine):
    limits = bounds(num_pages=8, max_model_len=144, page_size=32)
    overlap = True


class GroupedEventsMachine(EventsMachine):
    limits = bounds(num_pages=22, max_model_len=144, windows=(20, None, 40))


TestEvents = EventsMachine.TestCase
TestEvents.settings = settings(max_examples=40, stateful_step_count=20)
TestOverlappingEvents = OverlappingEventsMachine.TestCase
TestOverlappingEvents.settings = settings(max_examples=30, stateful_step_count=20)
TestGroupedEvents = GroupedEventsMachine.TestCase
TestGroupedEvents.settings = settings(max_examples=25, stateful_step_count=20)


def stored(listener: Listener) -> list[BlockStored]:
    return [
        event
        for batch in listener.batches
        for event in batch.events
        if isinstance(event, BlockStored)
    ]


def test_an_event_names_blocks_by_digests_alone_unless_token_ids_are_asked_for() -> None:
    for token_ids in (False, True):
        simulation, listener, events = listened(bounds(), token_ids=token_ids)
        sequence = simulation.admit(Tokens(range(1, 21)), rows(*[3] * 12), Tokens([5]))
        simulation.drain()
        events.flush()
        (event,) = stored(listener)
        digests = [sequence.page_digest(index, 16) for index in (0, 1)]
        assert event.block_hashes == [published(digest) for digest in digests if digest is not None]
        assert (event.parent_block_hash, event.block_size, event.medium) == (None, 16, "GPU")
        assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
        assert event.token_ids == ([*range(1, 21), *[0] * 12] if token_ids else [])


def test_a_block_that_continues_another_names_it() -> None:
    simulation, listener, events = listened(bounds())
    simulation.admit(Tokens([1] * 16), Tokens([2]))
    simulation.drain()
    events.flush()
    simulation.admit(Tokens([1] * 16), Tokens([3] * 17))
    simulation.drain()
    events.flush()
    first, second = stored(listener)
    assert second.parent_block_hash == first.block_hashes[0]


def test_routing_keys_are_those_of_the_prompts_own_chain() -> None:
    limits = bounds(page_size=32, num_pages=8)
    simulation, listener, events = listened(limits)
    prompt = Prompt.of(Tokens(range(1, 60)), rows(*[1] * 40), Tokens([3] * 3))
    simulation.admit(*prompt.segments)
    simulation.drain()
    events.flush()
    chain = Chain(root_digest(SECRET, weights_id="w", dtype="float32"), SECRET)
    chain.extend(prompt)
    keys = keys_of(chain.blocks[:6])
    assert listener.keys == {
        keys[start : start + KEY_SIZE] for start in range(0, len(keys), KEY_SIZE)
    }


def test_nothing_is_kept_where_nobody_listens() -> None:
    events = CacheEventQueue(EngineSettings.of(model="m"), SECRET)
    events.begin((None,), 32)
    simulation = Simulation(bounds(), events=events)
    simulation.admit(Tokens([1] * 40))
    simulation.drain()
    heard: list[tuple[KvEvent, ...]] = []
    events.tell = heard.append
    events.flush()
    assert heard == []
