"""What attention over pages is, behind transformers' attention interface.

A forward pass gets a `PagedAttention` for its batch as a keyword argument, which transformers hands
to every attention layer; nothing about a request lives in a module or a global.

Shapes: T positions in the step, Q query heads, H key/value heads, D key size, E value size.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from inlay.engine.torch.attention.options import check_options
from inlay.errors import EngineError

IMPLEMENTATION = "inlay_paged"
"""The name transformers knows this attention by."""

_WITHOUT_EFFECT = frozenset(
    {"dropout", "is_causal", "output_router_logits", "past_key_values", "position_ids", "use_cache"}
)
"""Keyword arguments of attention layers that do not change the result here."""


class Scoring(NamedTuple):
    """How one layer's queries and keys become the weights of its values.

    Attributes:
        scaling: factor of the scores.
        window: a position sees itself and the `window - 1` before it; None for all before it.
        softcap: a scaled score s becomes softcap * tanh(s / softcap); None for s itself.
        sinks: [Q], for each query head the score of one more position that all see and that has no
            value; or None.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class PagedAttention(Protocol):
    """Attention over the pages, for one batch."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Store the batch's keys and values, then attend causally to each sequence's own positions.

        Positions after the batch's own are padding, which is neither stored nor seen.

        Args:
            layer: whose pages.
            query: [Q, T, D].
            key: [H, T, D].
            value: [H, T, E].
            scoring: how queries and keys become weights.

        Returns:
            [T, Q, E].
        """
        ...


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged: PagedAttention | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, Q, T, D], key [1, H, T, D], value [1, H, T, E].

    Returns [1, T, Q, E].

    Raises:
        EngineError: an option that would change the result and is not honoured here.
    """
    if paged is None:
        raise EngineError(f"{IMPLEMENTATION} attention runs inside the torch engine only")
    check_options(module, {"attention_mask": attention_mask, **options}, _WITHOUT_EFFECT)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    scoring = Scoring(factor, sliding_window, softcap, s_aux)
    return paged.attend(layer, query[0], key[0], value[0], scoring)[None], None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)
