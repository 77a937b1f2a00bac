"""Interface of attention over pages, behind transformers' attention interface.

A forward pass gets the `PagedAttention` of its batch as a keyword argument, which transformers
passes to every attention layer; no state of a request is in a module or a global.

Shapes: T positions in the step, Q query heads, H key/value heads, D key size, E value size.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from inlay.base.errors import EngineError
from inlay.engine.torch.attention.chunks import Temperature
from inlay.engine.torch.weights.latent import LatentWeights
from inlay.engine.torch.windows import Window

IMPLEMENTATION = "inlay_paged"
"""Name of this attention in transformers."""

_WITHOUT_EFFECT = frozenset(
    {
        "dropout", "is_causal", "output_router_logits", "past_key_values", "position_ids", "states",
        "use_cache",
    }
)  # fmt: skip
"""Keyword arguments of attention layers that have no effect on the result here."""


class Scoring(NamedTuple):
    """Parameters of one layer's scores.

    Attributes:
        scaling: factor of the scores, above 0.
        window: positions that a position sees.
        softcap: a scaled score s becomes softcap * tanh(s / softcap); None for s itself.
        sinks: [Q], for each query head the score of one more position that every query sees and
            that has no value; or None.
        latent: weights by which keys become those of all heads, and values; None for keys and
            values that are themselves.
    """

    scaling: float
    window: Window = None
    softcap: float | None = None
    sinks: Tensor | None = None
    latent: LatentWeights | None = None


class Projection(NamedTuple):
    """Output of the fused query-key-value product, and the steps to apply before attention.

    Attributes:
        heads: [T, (Q + 2 H) * D], query, key and value heads of each position, contiguous.
        cosine: [T, R] of the rotary embedding, R <= D; halves, as in transformers' Llama, of which
            the second is as the first. On CUDA [T, R / 2] suffices.
        sine: likewise.
        norms: weights [D] of the norms of query heads and key heads, or None; float32 but on CUDA.
        eps: epsilon of the norms.
        query_heads: Q.
        rotated: R.
    """

    heads: Tensor
    cosine: Tensor
    sine: Tensor
    norms: tuple[Tensor, Tensor] | None
    eps: float
    query_heads: int
    rotated: int


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
        """Store the batch's keys and values, then attend causally within each sequence.

        Positions after the batch's own are padding: neither stored nor seen.

        Args:
            layer: index of the layer.
            query: [Q, T, D].
            key: [H, T, D].
            value: [H, T, E].
            scoring: parameters of the scores.

        Returns:
            [T, Q, E].
        """


class WithLargestWindow:
    """A `PagedAttention` whose windows have at most so many positions.

    Attributes:
        paged: the attention itself.
    """

    def __init__(self, paged: Any, largest: int) -> None:
        self.paged = paged
        self._largest = largest

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does."""
        found: Tensor = self.paged.attend(layer, query, key, value, self.narrowed(scoring))
        return found

    def attend_projected(self, layer: int, projection: Projection, scoring: Scoring) -> Tensor:
        """Attend with the queries, keys and values of `projection`; returns [T, Q, D]."""
        found: Tensor = self.paged.attend_projected(layer, projection, self.narrowed(scoring))
        return found

    def narrowed(self, scoring: Scoring) -> Scoring:
        """Return the scoring of a layer with such a window."""
        if not isinstance(scoring.window, int):
            return scoring
        return scoring._replace(window=min(scoring.window, self._largest))


class WithOutputsTold:
    """A `PagedAttention` that tells what it gives: `tell(layer, [T, Q, E])`."""

    def __init__(self, paged: Any, tell: Callable[[int, Tensor], None]) -> None:
        self._paged = paged
        self._tell = tell

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does."""
        found: Tensor = self._paged.attend(layer, query, key, value, scoring)
        self._tell(layer, found)
        return found

    def attend_projected(self, layer: int, projection: Projection, scoring: Scoring) -> Tensor:
        """Attend with the queries, keys and values of `projection`; returns [T, Q, D]."""
        found: Tensor = self._paged.attend_projected(layer, projection, scoring)
        self._tell(layer, found)
        return found


def check_options(
    module: nn.Module, options: Mapping[str, object], without_effect: Collection[str]
) -> None:
    """Refuse unsupported options.

    Raises:
        EngineError: lists the unsupported options.
    """
    asked = sorted(
        name
        for name, option in options.items()
        if option is not None and name not in without_effect
    )
    if asked:
        raise EngineError(
            f"{type(module).__name__} asks for {', '.join(asked)}, which this attention does not do"
        )


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
    places: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers.

    Query [1, Q, T, D], key [1, H, T, D], value [1, H, T, E]; `places` [1, T], positions of the
    queries in their sequences.

    Returns [1, T, Q, E].

    Raises:
        EngineError: an unsupported option that would change the result.
    """
    if paged is None:
        raise EngineError(f"{IMPLEMENTATION} attention runs inside the torch engine only")
    check_options(module, {"attention_mask": attention_mask, **options}, _WITHOUT_EFFECT)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    latent: Any = getattr(module, "latent", None)
    window: Window = getattr(module, "chunk", sliding_window)
    temperature: Temperature | None = getattr(module, "temperature", None)
    if temperature is not None and places is not None:
        query = temperature.of(query, places)
    scoring = Scoring(factor, window, softcap, s_aux, latent)
    return paged.attend(layer, query[0], key[0], value[0], scoring)[None], None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)
