"""Equal positions have equal digests, unequal ones do not, and nobody without the secret can make either."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.messages.digest import (
    BLOCK_SIZE,
    Chain,
    Secret,
    chain,
    root_digest,
    row_digests,
    with_digests,
)
from inlay.messages.prompt import Buffer, Prompt, RowField, Rows, Tokens
from tests.strategies import prompts, rows

SECRET = Secret(bytes(range(32)))
ROOT = root_digest(SECRET, weights_id="w", dtype="bfloat16")


@given(prompts)
def test_a_chain_has_one_digest_for_each_full_block(prompt: Prompt) -> None:
    assert len(chain(prompt, ROOT, SECRET)) == len(prompt) // BLOCK_SIZE


@given(prompts, prompts)
def test_a_common_prefix_has_common_digests(prefix: Prompt, rest: Prompt) -> None:
    prefix = with_digests(prefix, SECRET)
    blocks = chain(prefix, ROOT, SECRET)
    assert chain(prefix + rest, ROOT, SECRET)[: len(blocks)] == blocks


@given(prompts, st.data())
def test_a_chain_grown_in_pieces_equals_one_grown_at_once(
    prompt: Prompt, data: st.DataObject
) -> None:
    prompt = with_digests(prompt, SECRET)
    cut = data.draw(st.integers(0, len(prompt)))
    grown = Chain(ROOT, SECRET)
    grown.extend(prompt.slice(0, cut))
    grown.extend(prompt.slice(cut, len(prompt)))
    assert grown.blocks == chain(prompt, ROOT, SECRET)
    assert grown.length == len(prompt)


@given(st.lists(st.integers(0, 1000), max_size=50))
def test_generated_tokens_continue_a_chain_like_prompt_tokens(ids: list[int]) -> None:
    grown = Chain(ROOT, SECRET)
    grown.extend_tokens(ids)
    assert grown.blocks == chain(Prompt.of(Tokens(ids)), ROOT, SECRET)


@given(rows(plain=True), st.data())
def test_changing_one_bit_of_a_row_changes_the_digests_of_its_group_alone(
    whole: Rows, data: st.DataObject
) -> None:
    bit = data.draw(st.integers(0, 8 * len(whole.data) - 1))
    changed = bytearray(whole.data.view)
    changed[bit // 8] ^= 1 << bit % 8
    before = row_digests(whole, SECRET)
    after = row_digests(Rows(Buffer(changed), whole.dtype, whole.shape), SECRET)
    touched = bit // 8 // whole.row_bytes // BLOCK_SIZE
    for index in range(len(whole)):
        same = before[16 * index : 16 * index + 16] == after[16 * index : 16 * index + 16]
        assert same == (index // BLOCK_SIZE != touched)


@given(st.integers(0, 3 * BLOCK_SIZE), st.integers(0, 40), st.booleans())
def test_rows_that_begin_a_prompt_share_all_full_blocks_of_their_common_prefix(
    common: int, more: int, equal: bool
) -> None:
    short = Rows(Buffer(bytes(4 * common)), "float32", (common, 1))
    longer = Rows(
        Buffer(bytes(4 * common) + bytes([not equal, 1, 1, 1]) * more),
        "float32",
        (common + more, 1),
    )
    expected = chain(Prompt.of(short), ROOT, SECRET)
    assert chain(Prompt.of(longer), ROOT, SECRET)[: len(expected)] == expected


def test_equal_rows_have_unequal_digests_within_a_group() -> None:
    digests = row_digests(Rows(Buffer(bytes(4 * 40)), "float32", (40, 1)), SECRET)
    found = [digests[start : start + 16] for start in range(0, len(digests), 16)]
    # Two full groups of the same rows, and one of eight.
    assert found[:16] == found[16:32]
    assert len(set(found)) == 16 + 8


def test_a_bundle_field_is_part_of_a_rows_identity() -> None:
    plain = Rows(Buffer(bytes(8)), "float32", (2, 1))
    fields = [RowField("positions", Buffer(bytes([0] * 3 + [n])), "int16", (2,)) for n in (0, 1)]
    digests = [
        row_digests(msgspec.structs.replace(plain, bundle=(field,)), SECRET) for field in fields
    ]
    assert len({row_digests(plain, SECRET)[16:], *(d[16:] for d in digests)}) == 3


def test_atomic_rows_are_named_by_the_whole_segment() -> None:
    first = Rows(Buffer(bytes(8)), "float32", (2, 1), atomic=True)
    longer = Rows(Buffer(bytes(12)), "float32", (3, 1), atomic=True)
    assert row_digests(first, SECRET)[:16] != row_digests(longer, SECRET)[:16]
    assert len({row_digests(longer, SECRET)[i : i + 16] for i in (0, 16, 32)}) == 3
    plain = Rows(first.data, first.dtype, first.shape)
    assert row_digests(first, SECRET)[:16] != row_digests(plain, SECRET)[:16]


def test_tokens_and_rows_with_the_same_bytes_are_told_apart() -> None:
    row = Rows(Buffer(bytes(4 * BLOCK_SIZE)), "float32", (BLOCK_SIZE, 1))
    assert chain(Prompt.of(row), ROOT, SECRET) != chain(
        Prompt.of(Tokens([0] * BLOCK_SIZE)), ROOT, SECRET
    )


def test_dtype_and_width_are_part_of_a_rows_identity() -> None:
    data = Buffer(bytes(16))
    shapes = [("float32", (2, 2)), ("bfloat16", (2, 4)), ("float16", (2, 4)), ("float32", (1, 4))]
    digests = [row_digests(Rows(data, dtype, shape), SECRET)[:16] for dtype, shape in shapes]
    assert len(set(digests)) == len(shapes)


def test_the_root_depends_on_everything_that_changes_keys_and_values() -> None:
    base = {"weights_id": "w", "dtype": "bfloat16", "adapter": None, "salt": None}
    variants = [base, *({**base, key: "x"} for key in base), {**base, "adapter": "", "salt": None}]
    roots = {root_digest(SECRET, **variant) for variant in variants}  # type: ignore[arg-type]
    assert len(roots) == len(variants)
    assert root_digest(Secret.random(), weights_id="w", dtype="bfloat16") != ROOT


def test_another_secret_gives_other_digests() -> None:
    row = Rows(Buffer(bytes(4)), "float32", (1, 1))
    other = Secret(bytes(32))
    assert row_digests(row, SECRET) != row_digests(row, other)
    assert SECRET.fingerprint != other.fingerprint
    assert SECRET.root.hex() not in repr(SECRET)


def test_a_secret_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Secret(b"short")
