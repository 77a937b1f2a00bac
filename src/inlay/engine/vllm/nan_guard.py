"""NaN in vLLM's worker processes: requests whose logits hold it, and its traces in the cache.

vLLM counts NaN by row of its logits and takes row i for request i. Where drafts are verified a
request has a row for each and one more, so that others would be named. And it says so with a step's
output, when the blocks of what has ended may be another's in the next step.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn


def overwrite_not_finite(caches: Any) -> int:
    """Put zeros where keys and values are NaN or infinite; the number of layers looked at.

    A block vLLM gives to the next request still holds what the last one wrote, and its attention
    kernels multiply what they mask by zero: NaN stays NaN. See upstream's issues 50283 and 44211.
    """
    seen = 0
    for tensor in _tensors(caches):
        if tensor.is_floating_point():
            # Layer by layer: a mask of the whole cache would need its memory once more.
            torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)
            seen += 1
    return seen


def per_request(rows: Tensor, bounds: Tensor) -> Tensor:
    """Sums of `rows`, int (rows), between consecutive `bounds`, int (requests + 1).

    Int (requests).
    """
    sums = nn.functional.pad(rows.cumsum(0), (1, 0))
    return sums[bounds[1:]] - sums[bounds[:-1]]


def reduced(logits: Tensor, drafts: list[int]) -> Tensor:
    """Logits (requests, 1) that are NaN where any row of a request is.

    Args:
        logits: (rows, vocabulary).
        drafts: how many each request has verified; it has one row more. Where that is not the
            number of rows, nobody's can be told from another's, and all are NaN if any is.
    """
    not_numbers = logits.isnan().any(dim=-1).int()
    bounds = [0, *accumulate(1 + count for count in drafts)]
    if bounds[-1] == len(not_numbers):
        where = torch.tensor(bounds, pin_memory=logits.is_cuda).to(logits.device, non_blocking=True)
        counts = per_request(not_numbers, where)
    else:
        counts = not_numbers.sum().expand(len(drafts))
    return torch.where(counts > 0, torch.nan, 0.0).unsqueeze(1)


def guard(runner: Any) -> None:
    """Have a model runner of vLLM's count by request.

    Raises `AttributeError` for one that is not known.

    The first model runner also overwrites what is not finite in the step that finds it, where its
    scheduling waits for that step: before any block is free. Otherwise that is left to who reads
    the outputs.
    """
    if hasattr(runner, "_bookkeeping_sync"):
        runner._bookkeeping_sync = _Bookkeeping(runner)
    elif runner.batch_sharder is None and runner.rejection_sampler is not None:
        # A sharder adds them up itself; there is no sampler without drafts, or where another
        # process has the last layers.
        runner.rejection_sampler = _Summing(runner.rejection_sampler)


class _Bookkeeping:
    """The step of vLLM's first model runner that counts NaN, among other things.

    Of the logits it does nothing else.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._book = runner._bookkeeping_sync
        self._spoiled: set[str] = set()

    def __call__(self, scheduled: Any, sampled: Any, logits: Tensor | None, *rest: Any) -> Any:
        drafts = scheduled.scheduled_spec_decode_tokens
        if logits is not None and drafts:
            ids = self._runner.input_batch.req_ids
            logits = reduced(logits, [len(drafts.get(id_, ())) for id_ in ids])
        booked = self._book(scheduled, sampled, logits, *rest)
        counts: dict[str, int] = booked[0]
        self._spoiled.intersection_update(self._runner.requests)
        self._spoiled.update(id_ for id_, count in counts.items() if count)
        here = self._spoiled & counts.keys()
        if here:
            overwrite_not_finite(self._runner.kv_caches)
        for id_ in here:
            # Zeros in the place of what its first chunk wrote make numbers of its next: wrong ones,
            # of which nothing is said.
            counts[id_] = max(1, counts[id_])
        return booked


class _Summing:
    """A sampler of vLLM's second model runner that verifies drafts."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: Tensor, batch: Any, *arguments: Any, **more: Any) -> Any:
        output = self._sampler(logits, batch, *arguments, **more)
        if output.num_nans is not None:
            output.num_nans = per_request(output.num_nans, batch.cu_num_logits)
        return output


def _tensors(caches: Any) -> Iterator[Tensor]:
    if isinstance(caches, Tensor):
        yield caches
    elif isinstance(caches, list | tuple):
        for cache in caches:
            yield from _tensors(cache)
