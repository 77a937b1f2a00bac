"""What attention over pages is, behind transformers' attention interface.

A forward pass gets a `PagedAttention` for its batch as a keyword argument, which transformers hands to every attention
layer; nothing about a request lives in a module or a global.

Shapes: T positions in the step, Q query heads, H key/value heads, D head size.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from inlay.errors import EngineError

IMPLEMENTATION = "inlay_paged"
"""The name transformers knows this attention by."""

_NOT_OPTIONS = frozenset({"dropout", "is_causal", "position_ids", "use_cache", "past_key_values"})
"""Keyword arguments of attention layers that do not change the result here."""


class Scoring(NamedTuple):
    """How one layer's queries and keys become the weights of its values.

    Attributes:
        scaling: factor of the scores.
        window: a position sees itself and the `window - 1` before it; None for all before it.
    """

    scaling: float
    window: int | None = None


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
            value: [H, T, D].
            scoring: how queries and keys become weights.

        Returns:
            [T, Q, D].
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
    paged: PagedAttention | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, Q, T, D], key and value [1, H, T, D]; returns [1, T, Q, D].

    Raises:
        EngineError: an option that would change the result and is not honoured here.
    """
    if paged is None:
        raise EngineError(f"{IMPLEMENTATION} attention runs inside the torch engine only")
    dropped = [name for name, option in options.items() if option is not None and name not in _NOT_OPTIONS]
    if dropped or attention_mask is not None:
        names = ", ".join(sorted([*dropped, *([] if attention_mask is None else ["attention_mask"])]))
        raise EngineError(f"{type(module).__name__} asks for {names}, which this attention does not do")
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return paged.attend(layer, query[0], key[0], value[0], Scoring(factor, sliding_window))[None], None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)
