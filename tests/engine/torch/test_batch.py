"""A plan's positions become tensors, each where its sequence and its page say."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import EngineError
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.table import PageRun
from inlay.messages.prompt import Buffer, Media, Prompt, RowField, Rows, Segment, Tokens


def rows_of(values: torch.Tensor) -> Rows:
    array = values.view(torch.uint8).numpy().tobytes()
    return Rows(
        Buffer(array), str(values.dtype).removeprefix("torch."), (values.shape[0], values.shape[1])
    )


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 70), st.integers(1, 40), st.booleans()), min_size=1, max_size=6
    ),
    page_size=st.sampled_from([16, 32]),
)
def test_every_position_has_its_token_its_number_and_its_slot(
    spans: list[tuple[int, int, bool]], page_size: int
) -> None:
    free = iter((1 + np.random.default_rng(0).permutation(400)).tolist())
    stretches = []
    for start, count, samples in spans:
        length = -(-(start + count) // page_size) + 1
        full, windowed = (PageRun(next(free) for _ in range(length)) for _ in range(2))
        del windowed.pages[: start // page_size]
        windowed.first = start // page_size
        tokens = Tokens([1000 * start + position for position in range(start, start + count)])
        stretches.append(BatchItem([(start, tokens)], start, count, (full, windowed), samples))

    batch = Batch.pack(stretches, page_size)

    first = 0
    sampled = []
    for index, stretch in enumerate(stretches):
        for offset in range(stretch.count):
            position = stretch.start + offset
            assert batch.token_ids[first + offset] == 1000 * stretch.start + position
            assert batch.positions[first + offset] == position
            for group, run in enumerate(stretch.pages):
                page = run.pages[position // page_size - run.first]
                assert batch.slots[group, first + offset] == page * page_size + position % page_size
                assert batch.block_table[group, index, position // page_size] == page
        assert not batch.block_table[1, index, : stretch.pages[1].first].any()
        first += stretch.count
        if stretch.sampled:
            sampled.append(first - 1)
    assert batch.sampled.tolist() == sampled
    assert batch.counts == tuple(stretch.count for stretch in stretches)
    assert batch.contexts == tuple(stretch.start + stretch.count for stretch in stretches)
    assert len(set(batch.slots.flatten().tolist())) == 2 * first
    assert batch.row_index.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_keep_their_bits_and_their_places(dtype: torch.dtype) -> None:
    values = torch.randn(5, 8).to(dtype)
    prompt = Prompt.of(Tokens([1, 2]), rows_of(values[:3]), Tokens([3]), rows_of(values[3:]))
    batch = Batch.pack(
        [
            BatchItem([(0, Tokens([9]))], 0, 1, [PageRun([4])], True),
            BatchItem(prompt.spans(1, 8), 1, 7, [PageRun([2])], True),
        ],
        16,
    )
    assert batch.token_ids.tolist() == [9, 2, 0, 0, 0, 3, 0, 0]
    assert batch.row_index.tolist() == [2, 3, 4, 6, 7]
    assert batch.row_values.dtype == dtype
    assert torch.equal(batch.row_values, values)


def test_rows_of_two_dtypes_are_an_error() -> None:
    first, second = rows_of(torch.randn(1, 4)), rows_of(torch.randn(1, 4).bfloat16())
    with pytest.raises(EngineError, match="bfloat16, float32"):
        Batch.pack([BatchItem([(0, first), (1, second)], 0, 2, [PageRun([0])], True)], 16)


def featured(name: str) -> Rows:
    """One row of ones with a field of twos."""
    one = np.ones((1, 4), ml_dtypes.bfloat16)
    field = RowField(name, Buffer((2 * one).tobytes()), "bfloat16", (1, 4))
    return Rows(Buffer(one.tobytes()), "bfloat16", (1, 4), (field,))


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Media("image", b"0" * 16, 1), "embeds tokens and rows; got media"),
        (featured("positions"), "reads no field 'positions'"),
        (featured("deepstack.1"), "reads no field 'deepstack.1'"),
    ],
)
def test_media_and_unknown_fields_are_an_error(segment: Segment, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Batch.pack([BatchItem([(0, segment)], 0, 1, [PageRun([0])], True)], 16)


def test_rows_without_inner_features_have_zeros_beside_those_that_have_them() -> None:
    plain = Rows(Buffer(np.ones((1, 4), ml_dtypes.bfloat16).tobytes()), "bfloat16", (1, 4))
    items: list[tuple[int, Segment]] = [(0, plain), (1, Tokens([1])), (2, featured("deepstack.0"))]
    batch = Batch.pack([BatchItem(items, 0, 3, [PageRun([0])], True)], 16)
    assert batch.features is not None
    assert batch.features.tolist() == [[[0.0] * 4, [2.0] * 4]]
    assert batch.row_index.tolist() == [0, 2]
    assert Batch.pack([BatchItem(items[:2], 0, 2, [PageRun([0])], True)], 16).features is None


def test_too_few_pages_are_an_error() -> None:
    with pytest.raises(EngineError, match="1 pages of 16 positions do not hold 17"):
        Batch.pack([BatchItem([(16, Tokens([1]))], 16, 1, [PageRun([0])], True)], 16)


def test_a_batch_goes_to_a_device_as_a_whole() -> None:
    rows = rows_of(torch.ones(2, 3))
    run = PageRun([1])
    batch = Batch.pack([BatchItem([(0, Tokens([1])), (1, rows)], 0, 3, [run], True)], 16)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    for before, after in zip(batch, moved, strict=True):
        if isinstance(before, torch.Tensor):
            assert isinstance(after, torch.Tensor)
            assert (after.shape, after.dtype, after.device.type) == (
                before.shape,
                before.dtype,
                "meta",
            )
        else:
            assert after == before


def test_known_ids_end_before_a_token_that_only_the_device_knows() -> None:
    items = [
        BatchItem((), 3, 3, [PageRun([1])], 1, pending=True, ids=[7, 8]),
        BatchItem((), 5, 1, [PageRun([2])], 1, ids=[9]),
        BatchItem([(0, Tokens([4]))], 0, 3, [PageRun([3])], 1, ids=[5, 6]),
    ]
    batch = Batch.pack(items, 16)
    assert batch.token_ids.tolist() == [7, 8, 0, 9, 4, 5, 6]
    assert batch.pending.tolist() == [2]
