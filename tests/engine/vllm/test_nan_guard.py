"""Requests with NaN logits, also with several rows of logits for drafts.

What stands for a model runner is no vLLM: those are run in `tests/engines`.
"""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.engine.vllm.nan_guard import guard, reduced


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6).flatmap(
        lambda drafts: st.tuples(
            st.just(drafts), st.sets(st.integers(0, len(drafts) + sum(drafts) - 1), max_size=4)
        )
    )
)
def test_a_request_is_marked_if_and_only_if_a_row_of_its_own_holds_nan(
    case: tuple[list[int], set[int]],
) -> None:
    drafts, bad = case
    owners = [request for request, count in enumerate(drafts) for _ in range(count + 1)]
    logits = torch.zeros(len(owners), 5)
    for row in bad:
        logits[row, row % 5] = torch.nan
    found = reduced(logits, drafts)
    assert found.shape == (len(drafts), 1)
    assert {index for index, value in enumerate(found[:, 0]) if value.isnan()} == {
        owners[row] for row in bad
    }


def test_where_rows_are_not_those_of_the_requests_all_are_marked() -> None:
    logits = torch.zeros(4, 5)
    assert not reduced(logits, [0, 1]).isnan().any()
    logits[0, 0] = torch.nan
    assert reduced(logits, [0, 1]).isnan().all()


def test_what_the_second_runner_counts_by_row_is_added_up_unless_it_does_so_itself() -> None:
    def sampler(logits: torch.Tensor, batch: Any, *, nans: bool) -> Any:
        return SimpleNamespace(num_nans=logits.isnan().sum(-1) if nans else None)

    logits = torch.zeros(6, 5)
    logits[3, 1] = logits[4, :2] = torch.nan
    batch = SimpleNamespace(cu_num_logits=torch.tensor([0, 3, 5, 6], dtype=torch.int32))
    runner = SimpleNamespace(batch_sharder=None, rejection_sampler=sampler)
    guard(runner)
    assert runner.rejection_sampler(logits, batch, nans=True).num_nans.tolist() == [0, 3, 0]
    assert runner.rejection_sampler(logits, batch, nans=False).num_nans is None
    assert runner.rejection_sampler.__name__ == "sampler"
    for settled in (
        SimpleNamespace(batch_sharder=object(), rejection_sampler=sampler),
        SimpleNamespace(batch_sharder=None, rejection_sampler=None),
    ):
        before = settled.rejection_sampler
        guard(settled)
        assert settled.rejection_sampler is before


def test_what_is_not_finite_is_gone_with_the_step_that_found_it_and_its_request_stays_marked() -> (
    None
):
    def book(scheduled: Any, sampled: Any, logits: torch.Tensor) -> Any:
        counts = logits.isnan().sum(-1).tolist()
        return dict(zip(runner.input_batch.req_ids, counts, strict=True)), None

    cache = torch.ones(2, 3)
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["a", "b"]),
        requests={"a": 1, "b": 2},
        kv_caches=[cache],
        _bookkeeping_sync=book,
    )
    guard(runner)
    scheduled = SimpleNamespace(scheduled_spec_decode_tokens={})
    cache[1, 0] = torch.inf
    bad, good = torch.zeros(2, 5), torch.zeros(2, 5)
    bad[1, 4] = torch.nan
    assert runner._bookkeeping_sync(scheduled, None, good)[0] == {"a": 0, "b": 0}
    assert cache.isinf().any()
    assert runner._bookkeeping_sync(scheduled, None, bad)[0] == {"a": 0, "b": 1}
    assert cache.isfinite().all()
    assert runner._bookkeeping_sync(scheduled, None, good)[0] == {"a": 0, "b": 1}
    # Another that comes by the name of one that is gone.
    del runner.requests["b"]
    runner._bookkeeping_sync(scheduled, None, good)
    runner.requests["b"] = 3
    assert runner._bookkeeping_sync(scheduled, None, good)[0] == {"a": 0, "b": 0}
