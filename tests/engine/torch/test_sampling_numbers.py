"""Numerical building blocks of the sampler.

Ranks of logits, a look-up in cumulated weights, and uniform numbers that never change.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from inlay.engine.torch.sampling.draws import (
    CDF_BLOCK,
    FEW,
    TruncationParams,
    inverse_cdf,
    ranked,
    ranked_by_key,
    uniform,
)
from inlay.messages.request import Sampling

values = st.floats(-50, 50, width=16) | st.sampled_from([0.0, -0.0, -torch.inf, 1.0, -1.0])


@given(st.lists(values, min_size=1, max_size=60))
def test_ranking_is_by_value_and_then_by_id(row: list[float]) -> None:
    expected = sorted(range(len(row)), key=lambda id_: (-row[id_], id_))
    for count in {1, len(row) // 9 + 1, len(row) // 2 + 1, len(row)}:
        both = ranked(torch.tensor([row, row[::-1]]), count)
        assert both[0].tolist() == expected[:count]


class Sorted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers of values that are sorted while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.sort.stable:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 20, 256])
def test_a_row_of_equal_values_makes_no_other_row_sort_more(count: int) -> None:
    size = 50_000
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(7, size, generator=generator)
    few = torch.randint(2, (1, size), generator=generator, dtype=torch.float32)
    rows = torch.cat([torch.zeros(1, size), others, few, -torch.zeros(1, size)])
    expected = rows.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    with Sorted() as counted:
        found = ranked(rows, count)
    assert found.equal(expected)
    assert sum(counted.sizes) <= len(rows) * max(FEW, 4 * count)
    assert counted.sizes


@given(
    st.sampled_from([1, 5, CDF_BLOCK - 1, CDF_BLOCK, CDF_BLOCK + 1, 3 * CDF_BLOCK + 7]),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 1e-12, 0.3, 0.999999, 1 - 2.0**-53]),
    st.sampled_from([0.0, 0.5, 0.99]),
)
def test_a_number_is_looked_up_where_the_cumulated_weights_pass_it(
    size: int, seed: int, number: float, emptiness: float
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 100, size).astype(np.float32) * (rng.random(size) >= emptiness)
    weights[rng.integers(size)] = 1.0
    place = int(
        inverse_cdf(torch.from_numpy(weights)[None], torch.tensor([number], dtype=torch.float64))[0]
    )
    assert weights[place] > 0
    # Whole weights below 2**53 cumulate without rounding, so the place is exact.
    cumulated = weights.cumsum(dtype=np.float64)
    target = min(number * cumulated[-1], np.nextafter(cumulated[-1], 0))
    assert place == int((cumulated <= target).sum())


def test_a_whole_block_of_impossible_tokens_is_passed_over() -> None:
    weights = torch.zeros(1, 3 * CDF_BLOCK)
    weights[0, 2 * CDF_BLOCK + 5] = 2.0
    assert int(inverse_cdf(weights, torch.zeros(1, dtype=torch.float64))[0]) == 2 * CDF_BLOCK + 5


def test_the_uniform_numbers_are_pinned_and_uniform() -> None:
    """Workers of different versions resume each other's streams.

    These numbers must never change.
    """
    assert [uniform(seed, index) for seed, index in ((0, 0), (0, 1), (1, 0), (-1, 0))] == PINNED
    assert uniform(2**64 + 5, 0) == uniform(5, 0)
    draws = np.array([uniform(seed, index) for seed in range(200) for index in range(100)])
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() / 49 < 1.35
    # Neither along a stream nor between the same positions of neighbouring seeds is there a
    # pattern.
    grid = draws.reshape(200, 100)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02


PINNED = [0.044677981169000125, 0.9898504479606106, 0.9034437813307019, 0.7941932349525695]


@settings(max_examples=200)
@given(
    rows=st.lists(
        st.lists(
            st.one_of(
                st.floats(width=32, allow_nan=False),
                st.sampled_from([0.0, -0.0, torch.inf, -torch.inf, 1.0, -1.0]),
            ),
            min_size=12,
            max_size=12,
        ),
        min_size=1,
        max_size=3,
    ),
    count=st.integers(1, 12),
)
def test_ranks_as_integers_are_those_of_values_and_ids(rows: list[list[float]], count: int) -> None:
    values = torch.tensor(rows)
    assert ranked_by_key(values, count).tolist() == ranked(values, count).tolist()


truncations = st.builds(
    Sampling,
    max_tokens=st.just(1),
    temperature=st.just(1.0),
    top_k=st.sampled_from([0, 1, 3, 7, 1000]),
    top_p=st.sampled_from([1.0, 0.97, 0.83, 0.31, 1e-6]),
    min_p=st.sampled_from([0.0, 0.013, 0.37, 1.0]),
)


@given(
    st.lists(st.tuples(st.lists(values, min_size=40, max_size=40), truncations), min_size=1),
    st.integers(0, 2**32 - 1),
)
def test_truncation_without_a_wait_for_the_device_keeps_the_same_tokens(
    rows: list[tuple[list[float], Sampling]], seed: int
) -> None:
    logits = torch.tensor([[*row, 2.0] for row, _ in rows])
    # No sum of these is exactly at a limit, where the order of the sum would decide.
    logits += (logits.isfinite() * logits.round() * 0.0137).nan_to_num(0.0)
    params = TruncationParams.of(
        [sampling for _, sampling in rows], logits.shape[1], torch.device("cpu")
    )
    ranking = ranked(logits, logits.shape[1])
    weights, settled = params.weigh(logits, ranking)
    assert settled.all()
    expected = torch.zeros_like(weights).scatter(1, ranking, weights)
    found = params.truncated(logits)
    assert (found > 0).tolist() == (expected > 0).tolist()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    uniforms = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed)).double()
    assert inverse_cdf(found, uniforms).tolist() == params.draw(logits, uniforms).tolist()
