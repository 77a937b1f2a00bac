"""BERT-like encoders on a CPU's tile registers (AMX), all layers in one native call.

For batches of this size, oneDNN's products reach half the throughput of the tiles, and every
product's input and output pass through memory.
"""

import ctypes
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from inlay.engine.embed.attention import PackedAttention
from inlay.engine.torch.native.build import load
from inlay.errors import EngineError

_logger = logging.getLogger(__name__)

Parts = Literal[1, 2, 3]
"""Number of bfloat16 values that represent one element in a product.

One; two for about 16 bits; or three for a float32's 24.
"""

_TOLERANCE: Mapping[Parts, float] = {1: 1e-1, 2: 1e-3, 3: 1e-4}
"""Largest allowed difference from torch's layers on random input, relative to the largest state."""

_pointer = ctypes.c_void_p


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, _pointer)
        for name in (
            "qkv", "out", "up", "down", "qkv_bias", "out_bias", "up_bias", "down_bias",
            "attention_norm", "attention_norm_bias", "norm", "norm_bias",
        )
    ]  # fmt: skip


class _Encode(ctypes.Structure):
    _fields_ = [
        *(
            (name, _pointer)
            for name in ("layers", "first_norm", "first_norm_bias", "starts", "states", "workspace")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("num_layers", "sequences", "hidden", "inner", "heads")
        ),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
    ]


class LayerSizes(NamedTuple):
    """Sizes shared by all layers."""

    hidden: int
    inner: int
    heads: int
    eps: float


class TiledEncoder(nn.Module):
    """All layers of a transformers model's `encoder`."""

    def __init__(
        self,
        encoder: nn.Module,
        shape: LayerSizes,
        parts: Parts,
        library: ctypes.CDLL,
        first_norm: nn.LayerNorm | None = None,
    ) -> None:
        """Pack the weights of `encoder`; it can be dropped afterwards.

        `first_norm` is applied before its first layer.
        """
        super().__init__()
        self._shape = shape
        self._run = getattr(library, f"inlay_encode_{parts}")
        self._bytes = getattr(library, f"inlay_encode_bytes_{parts}")
        self._bytes.restype = ctypes.c_int64
        self._tensors: list[Tensor] = []
        layers = [self._layer(layer, parts) for layer in cast("Any", encoder).layer]
        self._layers = (_Layer * len(layers))(*layers)
        self._first_norm: tuple[int | None, int | None] = (
            (None, None)
            if first_norm is None
            else (self._kept(first_norm.weight.float()), self._kept(first_norm.bias.float()))
        )
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def _layer(self, layer: Any, parts: Parts) -> _Layer:
        attention = layer.attention.self
        weights: dict[str, list[nn.Linear]] = {
            "qkv": [attention.query, attention.key, attention.value],
            "out": [layer.attention.output.dense],
            "up": [layer.intermediate.dense],
            "down": [layer.output.dense],
        }
        found = _Layer()
        for name, linears in weights.items():
            weight = torch.cat([linear.weight.detach() for linear in linears])
            setattr(found, name, self._kept(_packed(weight, parts)))
            setattr(
                found,
                f"{name}_bias",
                self._kept(torch.cat([linear.bias for linear in linears]).float()),
            )
        for name, norm in (
            ("attention_norm", layer.attention.output.LayerNorm),
            ("norm", layer.output.LayerNorm),
        ):
            setattr(found, name, self._kept(norm.weight.float()))
            setattr(found, f"{name}_bias", self._kept(norm.bias.float()))
        return found

    def _kept(self, tensor: Tensor) -> int:
        """Copy `tensor` for the lifetime of this object; return its address."""
        own = tensor.detach().clone().contiguous()
        self._tensors.append(own)
        return own.data_ptr()

    def forward(self, hidden_states: Tensor, packed: PackedAttention) -> Tensor:
        """Compute [1, T, C] to float32 [1, T, C]; the input may be overwritten."""
        states = hidden_states[0].float().contiguous()
        starts = np.concatenate(([0], np.cumsum(packed.lengths, dtype=np.int64)))
        if starts[-1] != len(states):
            raise EngineError(f"{len(states)} positions were given for sequences of {starts[-1]}")
        shape = self._shape
        call = _Encode(
            ctypes.addressof(self._layers), *self._first_norm, starts.ctypes.data,
            states.data_ptr(), None, len(self._layers), len(packed.lengths), shape.hidden,
            shape.inner, shape.heads, shape.eps, torch.get_num_threads(),
        )  # fmt: skip
        needed = self._bytes(ctypes.byref(call))
        if len(self._workspace) < needed:
            self._workspace = torch.empty(needed, dtype=torch.uint8)
        call.workspace = self._workspace.data_ptr()
        self._run(ctypes.byref(call))
        return states[None]


def _packed(weight: Tensor, parts: Parts) -> Tensor:
    """Return `weight` [out, in] flat, in the layout of `encoder.cpp`.

    Bfloat16 for tiles, or float32, which the kernel splits itself.
    """
    outside, inside = weight.shape
    if parts > 1:
        return weight.float().view(outside // 16, 16, inside).transpose(1, 2).flatten()
    tiles = weight.to(torch.bfloat16).view(outside // 16, 16, inside // 32, 16, 2)
    return tiles.permute(0, 2, 3, 1, 4).flatten()


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library, or None if it, or the tiles, are not available."""
    found = load("encoder")
    return None if found is None or found.inlay_tiles() < 0 else found


def tiles_serve() -> bool:
    """Return True if this CPU has tiles; without them the loops are correct but slow."""
    found = library()
    return found is not None and bool(found.inlay_tiles())


class TiledBody:
    """A BERT-like model whose layers run on tiles.

    Has its own forward pass, without branches for other uses.
    """

    def __init__(self, base: Any, encoder: TiledEncoder) -> None:
        self._embeddings = base.embeddings
        self._project: nn.Module | None = getattr(base, "embeddings_project", None)
        self._encoder = encoder

    def __call__(
        self,
        *,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        packed: PackedAttention,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the last states, float32 [1, T, C], of embeddings [1, T, E], in place."""
        embeddings = self._embeddings
        states = inputs_embeds + embeddings.position_embeddings(position_ids)
        types = embeddings.token_type_embeddings
        states += types.weight[0] if token_type_ids is None else types(token_type_ids)
        if self._project is not None:
            states = self._project(embeddings.LayerNorm(states))
        found: Tensor = self._encoder(states, packed)
        return found


def tile(base: Any, parts: Parts) -> TiledBody | None:
    """Replace the `encoder` of a BERT-like model by native loops if the results agree.

    Returns None if it was not replaced.

    Args:
        base: on a CPU, in its final dtype, with `PackedAttention` as its attention.
        parts: number of bfloat16 values for an element of a product.
    """
    loops = library()
    shape = None if loops is None else _shape(base)
    if loops is None or shape is None:
        return None
    projected = hasattr(base, "embeddings_project")
    swapped = TiledEncoder(
        base.encoder, shape, parts, loops, None if projected else base.embeddings.LayerNorm
    )
    body = TiledBody(base, swapped)
    lengths = (70, 33, 5)
    width = base.embeddings.word_embeddings.embedding_dim
    x = torch.randn(1, sum(lengths), width, generator=torch.Generator().manual_seed(1)).to(
        base.dtype
    )
    places = (torch.arange(x.shape[1]) % base.config.max_position_embeddings)[None]
    given = {"position_ids": places, "packed": PackedAttention(lengths, x.device)}
    with torch.inference_mode():
        expected = base(inputs_embeds=x, **given).last_hidden_state[0].float()
        error = (body(inputs_embeds=x, **given)[0] - expected).abs().max() / expected.abs().max()
    if not error <= _TOLERANCE[parts]:
        _logger.warning("layers over tiles differ by %.3g and are not used", float(error))
        return None
    base.encoder = swapped
    return body


def _shape(base: Any) -> LayerSizes | None:
    """Return the sizes of a model's layers, or None if the loops do not support them."""
    config = base.config
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    size = hidden // heads
    if (
        config.hidden_act != "gelu"
        or hidden % 32
        or inner % 32
        or size % 32
        or size * heads != hidden
    ):
        return None
    return LayerSizes(hidden, inner, heads, float(config.layer_norm_eps))
