"""Loss of a model by rounding, on a text, for `inlay doctor --quality`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.kv_layout import pages_for
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.model import CausalModel
from inlay.messages.prompt import Tokens

_PAGE = 16


class Quality(NamedTuple):
    """Numbers of a text with weights and activations as in the files, and rounded.

    Attributes:
        tokens: of the text, all but the first of each window.
        rounding: what is rounded, by the model's card.
        exact: perplexity without rounding.
        rounded: perplexity with it.
        divergence: KL from exact to rounded, nats a token.
        same: share of tokens of which the likeliest is the same.
    """

    tokens: int
    rounding: str
    exact: float
    rounded: float
    divergence: float
    same: float


def logprobs(model: CausalModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of every token at each position of a window, [positions, vocabulary]."""
    each = pages_for(len(ids), _PAGE)
    groups = len(model.page_groups)
    runs = [PageRun(range(1 + g * each, 1 + (g + 1) * each)) for g in range(groups)]
    item = BatchItem([(0, Tokens(ids))], 0, len(ids), runs, len(ids))
    pages: Pages = model.new_pages(each * groups, _PAGE)
    return model.forward(Batch.pack([item], _PAGE), pages).float().log_softmax(-1)


def quality_of(settings: EngineSettings, windows: Sequence[list[int]]) -> Quality:
    """Compute a text with a model as it is served, and as its files have it.

    Both are in memory at once.

    Args:
        settings: of the engine; the model without rounding has neither quantization nor
            activations in int8.
        windows: ids of a text, at least two in each.

    Raises:
        InvalidRequestError: it cannot be loaded, or nothing is rounded.
    """
    rounded = CausalModel.load(settings)
    if not rounded.activations:
        raise InvalidRequestError(
            "nothing is rounded: --quality compares a GGUF file on a CPU, or a checkpoint with "
            "--quantization, with what its files hold"
        )
    plain = {"activations": "exact", "quantization": None}
    exact = CausalModel.load(settings.replace(**plain))
    losses, divergence, same, tokens = [0.0, 0.0], 0.0, 0, 0
    for window in windows:
        one, two = (logprobs(model, window)[:-1] for model in (exact, rounded))
        nexts = torch.tensor(window[1:])[:, None]
        for which, found in enumerate((one, two)):
            losses[which] -= float(found.gather(1, nexts).sum())
        divergence += float((one.exp() * (one - two)).sum())
        same += int((one.argmax(-1) == two.argmax(-1)).sum())
        tokens += len(nexts)
    first, second = (float(torch.tensor(loss / tokens).exp()) for loss in losses)
    return Quality(tokens, rounded.activations, first, second, divergence / tokens, same / tokens)
