"""vLLM's events, made here as vLLM makes them, in blocks of the routing chain."""

import hashlib
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.engine.kv_chain import KvChain, NotedItem, blocks_of
from inlay.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    decode,
    encode,
)
from inlay.messages.card import Limits, ModelCard
from inlay.messages.digest import Secret, row_digests, with_digests
from inlay.messages.prompt import Buffer, Media, Prompt, Rows, Segment, Tokens
from inlay.messages.routing import KEY_SIZE, Stored, routing_chain
from inlay.worker.kv_feed import KvFeed

SECRET = Secret(bytes(range(32)))
PLACEHOLDER = 3


def card() -> ModelCard:
    return ModelCard(
        name="m",
        path="m",
        weights_id="w",
        dtype="bfloat16",
        vocab_size=1000,
        hidden_size=2,
        limits=Limits(max_model_len=4096, max_num_seqs=8),
        engine="vllm",
        engine_version="0.32",
        tasks=(),
        shares_text_prefix=False,
    )


def embeds_of(prompt: Prompt) -> bytes:
    """Bytes of vLLM's input: embedding vectors, and zeros for tokens."""
    return b"".join(
        bytes(segment.data.view) if isinstance(segment, Rows) else bytes(4 * len(segment))
        for segment in prompt.segments
    )


class Vllm:
    """vLLM's prefix cache, as its events describe it.

    Any block hash that depends on all that vLLM's does.
    """

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.cached: dict[bytes, tuple[Any, ...]] = {}
        self.last: list[bytes] = []

    def run(
        self,
        prompt: Prompt,
        output: tuple[int, ...] = (),
        *,
        salt: str | None = None,
        lora: str | None = None,
    ) -> list[Event]:
        ids: list[int] = []
        embeds = embeds_of(prompt)
        for segment in prompt.segments:
            ids += segment.ids if isinstance(segment, Tokens) else [PLACEHOLDER] * len(segment)
        ids += output
        events: list[Event] = []
        parent: bytes | None = None
        self.last = []
        for start in range(0, len(ids) - self.size + 1, self.size):
            extra: tuple[Any, ...] = () if lora is None else (lora,)
            if start == 0 and salt:
                extra += (salt,)
            if prompt.has_rows:
                extra += (hashlib.sha256(embeds[4 * start : 4 * (start + self.size)]).digest(),)
            key = (parent, tuple(ids[start : start + self.size]), extra)
            name = hashlib.sha256(repr(key).encode()).digest()
            if name not in self.cached:
                self.cached[name] = key
                events.append(
                    BlockStored(
                        [name],
                        parent,
                        list(key[1]),
                        self.size,
                        None if lora is None else 1,
                        "GPU",
                        lora,
                        [extra] if extra else None,
                        group_idx=0,
                        kv_cache_spec_kind="full_attention",
                    )
                )
            self.last.append(name)
            parent = name
        return events

    def evict(self, count: int) -> list[Event]:
        gone = list(self.cached)[-count:] if count else []
        for name in gone:
            del self.cached[name]
        return [BlockRemoved([name], "GPU", group_idx=0) for name in gone]


def rows(seed: int, count: int) -> Rows:
    return Rows(
        # No two segments have a row in common: vLLM names a block by its own rows alone, and their
        # digests are those of whole groups.
        Buffer(Random(f"{seed} {count}").randbytes(4 * count)),
        "bfloat16",
        (count, 2),
    )


def read(chain: KvChain, feed: KvFeed, events: list[Event]) -> None:
    feed.take(chain.read(decode(encode(EventBatch(0.0, events, 0)))))


def cut(keys: bytes) -> list[bytes]:
    return [keys[start : start + KEY_SIZE] for start in range(0, len(keys), KEY_SIZE)]


def held(feed: KvFeed) -> set[bytes]:
    return set(cut(bytes(feed.snapshot().keys.view)))


segment = st.one_of(
    st.tuples(st.integers(1, 3), st.integers(1, 50)).map(lambda of: Tokens([of[0]] * of[1])),
    st.tuples(st.integers(1, 3), st.integers(1, 50)).map(lambda of: rows(*of)),
)


@settings(max_examples=150)
@given(
    block_size=st.sampled_from([16, 32, 64]),
    requests=st.lists(
        st.tuples(
            st.lists(segment, min_size=1, max_size=4),
            st.lists(st.integers(0, 9), max_size=70),
            st.sampled_from([None, None, "tenant"]),
            st.sampled_from([None, None, "adapter"]),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_what_is_cached_is_told_in_the_keys_a_router_makes_of_the_same_prompts(
    block_size: int,
    requests: list[tuple[list[Segment], list[int], str | None, str | None, int]],
) -> None:
    model, engine, feed = card(), Vllm(block_size), KvFeed()
    chain = KvChain(model, SECRET, {"adapter": "content"}.get)
    keys_of_block: dict[bytes, set[bytes]] = {}
    for segments, output, salt, adapter, evicted in requests:
        prompt = with_digests(Prompt.of(*segments), SECRET)
        if prompt.has_rows:
            chain.note(blocks_of(prompt, SECRET, block_size, memoryview(embeds_of(prompt))))
        read(chain, feed, engine.run(prompt, tuple(output), salt=salt, lora=adapter))
        keys = cut(
            routing_chain(
                prompt,
                model,
                SECRET,
                adapter=None if adapter is None else "content",
                salt=salt,
                output=tuple(output),
            )
        )
        ratio = block_size // 16
        for index, name in enumerate(engine.last):
            keys_of_block[name] = set(keys[index * ratio : (index + 1) * ratio])
        assert len(engine.last) == (len(prompt) + len(output)) // block_size
        assert held(feed) == set().union(*(keys_of_block[name] for name in engine.cached))
        read(chain, feed, engine.evict(evicted))
        assert len(chain) == len(engine.cached)
        assert held(feed) == set().union(*(keys_of_block[name] for name in engine.cached))
    read(chain, feed, [AllBlocksCleared()])
    assert not len(feed.snapshot().keys.view)
    assert len(chain) == 0


class Item(NamedTuple):
    """Positions that vLLM names together: an image with a token between its runs, or vectors."""

    name: str
    segments: tuple[Segment, ...]

    @property
    def noted(self) -> NotedItem:
        known = [row_digests(part, SECRET) if isinstance(part, Rows) else part for part in self[1]]
        return NotedItem(self.name, tuple(known))

    @property
    def size(self) -> int:
        return sum(map(len, self.segments))


def image(seed: int, count: int) -> Item:
    digest = bytes([seed] * 16)
    runs = [Media("image", digest, count, start=start, total=2 * count) for start in (0, count)]
    return Item(f"image {seed} {count}", (runs[0], Tokens([7]), runs[1]))


item = st.one_of(
    st.tuples(st.integers(1, 3), st.integers(1, 30)).map(lambda of: image(*of)),
    st.tuples(st.integers(1, 3), st.integers(1, 50)).map(
        lambda of: Item(f"rows {of}", (rows(*of),))
    ),
    st.integers(1, 50).map(lambda count: Item("", (Tokens([5] * count),))),
)


@settings(max_examples=150)
@given(block_size=st.sampled_from([16, 32, 64]), items=st.lists(item, min_size=1, max_size=6))
def test_blocks_of_named_items_are_told_in_the_keys_a_router_makes(
    block_size: int, items: list[Item]
) -> None:
    model = msgspec.structs.replace(card(), shares_text_prefix=True)
    chain, feed = KvChain(model, SECRET), KvFeed()
    prompt = Prompt.of(*(part for each in items for part in each.segments))
    chain.note_items(each.noted for each in items if each.name)
    ids = [
        id_
        for part in prompt.segments
        for id_ in (part.ids if isinstance(part, Tokens) else [PLACEHOLDER] * len(part))
    ]
    starts = accumulate((each.size for each in items), initial=0)
    places = [(start, each) for start, each in zip(starts, items, strict=False) if each.name]
    parent = None
    for number in range(len(prompt) // block_size):
        begin, end = number * block_size, (number + 1) * block_size
        extra = [
            (each.name, start - begin)
            for start, each in places
            if start < end and begin < start + each.size
        ]
        event = stored(
            ids[begin:end], number, parent, block_size=block_size, extra_keys=[tuple(extra) or None]
        )
        read(chain, feed, [event])
        parent = number
    keys = cut(routing_chain(prompt, model, SECRET))
    whole = len(prompt) // block_size * block_size // 16
    assert held(feed) == set(keys[:whole])


def test_a_block_of_an_item_that_was_not_noted_is_left_out() -> None:
    chain, feed = KvChain(card(), SECRET), KvFeed()
    read(chain, feed, [stored([5] * 16, 1, extra_keys=[(("nobody's", 3),)])])
    assert not held(feed)
    assert len(chain) == 0


def stored(ids: list[int], name: int, parent: int | None = None, **options: Any) -> BlockStored:
    values: dict[str, Any] = {
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | options
    return BlockStored([name], parent, ids, **values)


def told(chain: KvChain, *events: Event) -> int:
    """Blocks of the routing chain that events report as stored."""
    found = chain.read(EventBatch(0.0, list(events)))
    return sum(len(event.keys) // KEY_SIZE for event in found if isinstance(event, Stored))


def test_several_blocks_in_one_event_follow_one_another() -> None:
    chain = KvChain(card(), SECRET)
    event = BlockStored([1, 2, 3], None, [5] * 48, 16, None, None, None)
    assert told(chain, event, event) == 3
    assert told(chain, stored([6] * 16, 4, 3)) == 1


def test_what_cannot_be_understood_is_not_told_nor_what_follows_it() -> None:
    unknown: list[BlockStored] = [
        stored([1] * 16, 1, 99),
        stored([1] * 8, 1, block_size=8),
        stored([], 1),
        stored([1] * 16, 1, extra_keys=[(["image", 3],)]),
        stored([3] * 16, 1, extra_keys=[(b"x" * 32,)]),
        stored([1] * 16, 1, lora_name="stranger", extra_keys=[("stranger",)]),
        stored([1] * 16, 1, medium="CPU"),
        stored([1] * 16, 1, locality="REMOTE"),
        stored([1] * 16, 1, ownership="disk"),
        stored([1] * 16, 1, kv_cache_spec_kind="sliding_window", group_idx=1),
    ]
    for event in unknown:
        chain = KvChain(card(), SECRET)
        assert told(chain, event, stored([2] * 16, 2, 1)) == 0, event


def test_one_group_of_layers_is_followed() -> None:
    chain = KvChain(card(), SECRET)
    windowed = stored([1] * 16, 1, group_idx=0, kv_cache_spec_kind="sliding_window")
    whole = stored([1] * 16, 1, group_idx=1, kv_cache_spec_kind="full_attention")
    assert told(chain, windowed, whole) == 1
    assert chain.read(EventBatch(0.0, [BlockRemoved([1], "GPU", group_idx=0)])) == ()
    assert len(chain.read(EventBatch(0.0, [BlockRemoved([1], "GPU", group_idx=1)]))) == 1


def test_after_events_were_lost_what_continues_the_unknown_is_not_told() -> None:
    chain = KvChain(card(), SECRET)
    assert told(chain, stored([1] * 16, 1)) == 1
    chain.forget()
    assert told(chain, stored([2] * 16, 2, 1)) == 0
    assert told(chain, stored([1] * 16, 1), stored([2] * 16, 2, 1)) == 2
