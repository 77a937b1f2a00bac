"""The routing chain names what an engine may have cached, and what is told of caches survives the way."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.messages.card import Limits, ModelCard
from inlay.messages.digest import BLOCK_SIZE, Secret, row_digests
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.routing import (
    KEY_SIZE,
    Cleared,
    FrontendLoad,
    KvEvents,
    Removed,
    Stored,
    WorkerLoad,
    routing_chain,
)
from tests.strategies import prompts

SECRET = Secret(bytes(32))
CARD = ModelCard(
    name="m", path="m", weights_id="w", dtype="float32", vocab_size=9, hidden_size=4,
    limits=Limits(max_model_len=99, max_num_seqs=2), engine="echo", engine_version="1",
)  # fmt: skip
TEXT = Prompt.of(Tokens(range(40)))
MIXED = TEXT + Prompt.of(Rows(Buffer(bytes(16 * 20)), "float32", (20, 4)))


def sharing(*, shares: bool) -> ModelCard:
    return msgspec.structs.replace(CARD, shares_text_prefix=shares)


@given(prompts, st.lists(st.integers(0, 99), max_size=40))
def test_a_routing_chain_has_a_key_for_each_full_block_of_prompt_and_output(
    prompt: Prompt, output: list[int]
) -> None:
    whole = routing_chain(prompt, CARD, SECRET, output=tuple(output))
    assert len(whole) == (len(prompt) + len(output)) // BLOCK_SIZE * KEY_SIZE
    assert whole.startswith(routing_chain(prompt, CARD, SECRET))


def test_a_text_prefix_is_shared_with_a_mixed_prompt_only_where_the_engine_can() -> None:
    for shares in (True, False):
        card = sharing(shares=shares)
        text, mixed = routing_chain(TEXT, card, SECRET), routing_chain(MIXED, card, SECRET)
        assert len(mixed) > len(text) == 2 * KEY_SIZE
        assert mixed.startswith(text) == shares


def test_rows_that_carry_their_digests_make_the_same_chain() -> None:
    known = Prompt(
        tuple(
            msgspec.structs.replace(segment, digests=row_digests(segment, SECRET))
            if isinstance(segment, Rows)
            else segment
            for segment in MIXED.segments
        )
    )
    assert routing_chain(known, CARD, SECRET) == routing_chain(MIXED, CARD, SECRET)


@pytest.mark.parametrize(("salt", "adapter"), [("s", None), (None, "a")])
def test_another_salt_or_adapter_shares_nothing(salt: str | None, adapter: str | None) -> None:
    plain = routing_chain(TEXT, CARD, SECRET)
    apart = routing_chain(TEXT, CARD, SECRET, salt=salt, adapter=adapter)
    keys = [
        {chain[at : at + KEY_SIZE] for at in range(0, len(chain), KEY_SIZE)}
        for chain in (plain, apart)
    ]
    assert keys[0].isdisjoint(keys[1])


def test_what_routers_are_told_survives_the_way() -> None:
    events = KvEvents(7, (Stored(b"12345678"), Removed(b"abcdefgh"), Cleared()))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=KvEvents) == events
    load = FrontendLoad(
        frontend="f", sequence=1, loads={"w": WorkerLoad(1, 20, 3)}, routed={"w": b"12345678"}
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(load), type=FrontendLoad) == load
