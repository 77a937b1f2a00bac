"""MPNet's attention: scores have a bias for each head and distance of two positions.

transformers computes the bias over the length of its input, which here is a whole batch of
sequences. Here a sequence has that of its own length, the corner of a longer one's.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from inlay.engine.embed.attention import PackedAttention

_STEP = 64
"""Lengths are rounded up to a multiple of it, so that few are computed."""


class RelativeBias:
    """The bias of a model, which all its layers share.

    Attributes:
        packed: attention of the batch that is computed; for one forward pass at a time.
    """

    def __init__(self, encoder: Any) -> None:
        """Take the bias of `encoder`, an `MPNetEncoder`, and compute no more of its own."""
        self.packed: PackedAttention | None = None
        # A function of the class: the layers can be dropped.
        self._bucket = encoder.relative_position_bucket
        self._table: Tensor = encoder.relative_attention_bias.weight
        self._known: Tensor = self._table.new_empty(0, 0, 0)
        encoder.compute_position_bias = lambda _: None

    def of(self, length: int) -> Tensor:
        """Return the bias [H, length, length] of a position (row) and one that it sees (column)."""
        if self._known.shape[-1] < length:
            longest = -(-length // _STEP) * _STEP
            places = torch.arange(longest, device=self._table.device)
            self._known = self.by_distance(longest)[:, places - places[:, None] + longest - 1]
        found: Tensor = self._known[:, :length, :length]
        return found

    def by_distance(self, reach: int) -> Tensor:
        """Return the bias [H, 2 reach - 1] of distances from 1 - reach on, column less row."""
        distances = torch.arange(1 - reach, reach, device=self._table.device)
        return self._table[self._bucket(distances)].T.contiguous()

    def begin(self, _: nn.Module, __: Any, given: dict[str, Any]) -> None:
        """Take the attention that a forward pass is `given`: the model passes it on to no layer."""
        self.packed = given["packed"]


class BiasedAttention(nn.Module):
    """Replacement of `MPNetSelfAttention`, with its products."""

    def __init__(self, own: Any, bias: RelativeBias) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = own.q, own.k, own.v, own.o
        self._size: int = own.attention_head_size
        self._bias = bias

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
        """Attend within each sequence: [1, T, C] to the same shape."""
        packed = self._bias.packed
        assert packed is not None, "a forward pass has an attention"
        query, key, value = (
            product(hidden_states)[0].unflatten(-1, (-1, self._size)).transpose(0, 1)
            for product in (self.q, self.k, self.v)
        )
        states = packed.attend(
            query,
            key,
            value,
            scaling=self._size**-0.5,
            causal=False,
            window=None,
            bias=self._bias,
        )
        return (self.o(states.flatten(1)[None]),)


def bias_scores(base: Any) -> RelativeBias:
    """Let the layers of an `MPNetModel` attend within each sequence of a batch."""
    bias = RelativeBias(base.encoder)
    for layer in base.encoder.layer:
        layer.attention.attn = BiasedAttention(layer.attention.attn, bias)
    base.register_forward_pre_hook(bias.begin, with_kwargs=True)
    return bias
