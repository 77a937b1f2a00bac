"""The graph ring: decode steps as they were captured, against the same steps as they are launched.

What is launched was compared with the model's own code before.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.self_check.judgement import FLOOR, mean_ratio
from inlay.engine.torch.self_check.prompts import scattered_pages
from inlay.engine.torch.self_check.reference import centred, relative
from inlay.messages.prompt import Tokens

if TYPE_CHECKING:
    from inlay.engine.torch.attention.pages import Pages
    from inlay.engine.torch.model import CausalModel

_LENGTHS = (5, 3, 7)
"""Positions before the one that is decoded, of one sequence after another."""

Decode = Callable[[Batch], tuple[Tensor, Tensor]]
"""Computes hidden states and logits of a batch on the host, one position of each sequence."""


def graph_distance(
    model: "CausalModel", pages: "Pages", decode: Decode, counts: Sequence[int], noise: float
) -> float:
    """Return the largest distance of logits that `decode` computes, over the model's rounding.

    Args:
        model: the model.
        pages: unused by others; some are written.
        decode: by graphs.
        counts: numbers of sequences in a step; of more than there are pages for, none is computed.
        noise: of the model's own logits.

    Returns:
        0 if there are too few pages; not a number if a logit is not.
    """
    groups = len(model.page_groups)
    found = [0.0]
    for count in counts:
        # The last page is padding's.
        if count * groups >= pages.num_pages:
            continue
        runs = scattered_pages(count, groups, 1)
        with torch.inference_mode():
            logits = []
            for compute in (_launched(model, pages), decode):
                before, step = _batches(model, runs, pages.page_size)
                model.hidden(model.upload(before), pages)
                logits.append(centred(compute(step)[1].clone()))
        launched, captured = logits
        error = relative(captured, launched, launched)
        found.append(mean_ratio(error, torch.full_like(error, noise), FLOOR[model.dtype]))
    return max(found, key=lambda each: (each != each, each))


def _launched(model: "CausalModel", pages: "Pages") -> Decode:
    def decode(batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = model.hidden(model.upload(batch), pages)
        return hidden, model.logits(hidden)

    return decode


def _batches(
    model: "CausalModel", runs: Sequence[Sequence[list[int]]], page_size: int
) -> tuple[Batch, Batch]:
    """Return a batch of the first positions of sequences, and one of the next of each."""
    generator = torch.Generator().manual_seed(22)
    firsts: list[BatchItem] = []
    nexts: list[BatchItem] = []
    for index, own in enumerate(runs):
        length = min(_LENGTHS[index % len(_LENGTHS)], page_size - 1)
        ids = torch.randint(model.vocab_size, (length + 1,), generator=generator).tolist()
        held = [PageRun(pages) for pages in own]
        firsts.append(BatchItem([(0, Tokens(ids[:-1]))], 0, length, held, 0))
        nexts.append(BatchItem([(length, Tokens(ids[-1:]))], length, 1, held, 1, decoding=True))
    return _placed(model, firsts, page_size), _placed(model, nexts, page_size)


def _placed(model: "CausalModel", items: Sequence[BatchItem], page_size: int) -> Batch:
    batch = Batch.pack(items, page_size)
    if model.rope_axes == 1:
        return batch
    return batch._replace(rope=batch.positions.expand(model.rope_axes, -1))
