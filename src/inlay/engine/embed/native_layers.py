"""BERT-like encoders on a CPU with tile registers (AMX) or AVX-512, all layers in one native call.

For batches of this size, oneDNN's products reach half the throughput of the tiles, and every
product's input and output pass through memory. Of one short text in float32, half of the time was
what torch does between products.
"""

import ctypes
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from math import isnan
from operator import gt
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from inlay.base.errors import EngineError
from inlay.engine.embed.attention import PackedAttention
from inlay.engine.embed.relative_bias import RelativeBias
from inlay.engine.torch.native.build import load
from inlay.engine.torch.weights.linear_methods import differ

_logger = logging.getLogger(__name__)

Parts = Literal[0, 1, 2, 3]
"""Number of values that represent one element in a product over tiles; 0 for float32 without tiles.

One bfloat16; two for about 16 bits; or three signed bytes for a float32's 24 bits. Products of
bytes with I inputs differ from float64's by at most I * X * W / 2**20, X and W being the largest of
their row and column; in practice by no more than those of float32 do.
"""

_TOLERANCE: Mapping[Parts, float] = {0: 1e-4, 1: 2**-4, 2: 2**-11, 3: 1e-4}
"""Largest `differ` of a layer from torch's, given the same states.

In bfloat16 four roundings one after another, each as of one product (`TOLERANCE`).
"""

_MOST = 8_355_000
"""Largest number of three signed digits; `Digits::MOST`."""

MOST_INPUTS = 43_648
"""Largest number of inputs of a product: three products of digits each add up to 31 bits."""

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
            for name in (
                "layers", "first_norm", "first_norm_bias", "words", "places", "types", "distances",
                "ids", "seconds", "starts", "states", "workspace",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_layers", "sequences", "hidden", "inner", "heads", "first_place", "reach",
            )
        ),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
    ]  # fmt: skip


class LayerSizes(NamedTuple):
    """Sizes shared by all layers."""

    hidden: int
    inner: int
    heads: int
    eps: float


class _Embeddings(NamedTuple):
    """Embeddings of ids, of places and of types, [.., C] bfloat16 if the layers' weights are.

    Attributes:
        first: place of a sequence's first position.
    """

    words: Tensor
    places: Tensor
    types: Tensor
    first: int


class NativeEncoder(nn.Module):
    """All layers of a transformers model's `encoder`."""

    def __init__(
        self,
        encoder: nn.Module,
        shape: LayerSizes,
        parts: Parts,
        library: ctypes.CDLL,
        first_norm: nn.LayerNorm | None = None,
        distances: Tensor | None = None,
    ) -> None:
        """Pack the weights of `encoder`; it can be dropped afterwards.

        Args:
            encoder: its layers are BERT's, or MPNet's.
            shape: of its layers.
            parts: how products are computed.
            library: of `library()`.
            first_norm: applied before its first layer.
            distances: [H, 2 N - 1], added to scores: of distances from 1 - N on, column less row;
                sequences then have at most N positions.
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
        self._distances: tuple[int | None, int] = None, 0
        if distances is not None:
            # The loops add it before they scale scores.
            scaled = distances.float() * (shape.hidden // shape.heads) ** 0.5
            self._distances = self._kept(scaled), (distances.shape[1] + 1) // 2
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def _layer(self, layer: Any, parts: Parts) -> _Layer:
        *qkv, out, attention_norm = _attention(layer.attention)
        weights: dict[str, list[nn.Linear]] = {
            "qkv": qkv,
            "out": [out],
            "up": [layer.intermediate.dense],
            "down": [layer.output.dense],
        }
        found = _Layer()
        for name, linears in weights.items():
            # Query, key and value of one head follow each other.
            heads = self._shape.heads if name == "qkv" else 1
            weight, bias = (
                torch.cat([tensor.detach().unflatten(0, (heads, -1)) for tensor in given], 1)
                for given in zip(*((linear.weight, linear.bias) for linear in linears), strict=True)
            )
            setattr(found, name, self._kept(_packed(weight.flatten(0, 1), parts)))
            setattr(found, f"{name}_bias", self._kept(bias.flatten().float()))
        for name, norm in (
            ("attention_norm", attention_norm),
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
        self._encode(states, packed.lengths)
        return states[None]

    def layer(self, index: int, states: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute one layer alone: [T, C] to float32 [T, C]."""
        found = states.float().clone()
        self._encode(found, lengths, layers=range(index, index + 1))
        return found

    def of_ids(
        self,
        embeddings: _Embeddings,
        ids: Sequence[int],
        lengths: Sequence[int],
        second_from: Sequence[int],
        *,
        layers: range | None = None,
    ) -> Tensor:
        """Compute float32 [T, C] of [T] ids through some `layers`, or through all.

        Positions of a sequence from its `second_from` on have the second type; all have the first
        where it is empty.

        Raises:
            EngineError: an id, a place or a type that has no embedding.
        """
        given = np.array(ids, np.int64)
        states = torch.empty(len(given), self._shape.hidden)
        seconds = np.array(second_from, np.int64)
        words, places, types, first = embeddings
        needed = max(ids) + 1, first + max(lengths), 2 if second_from else 1
        if min(ids) < 0 or any(map(gt, needed, (len(words), len(places), len(types)))):
            raise EngineError(
                f"there are embeddings of {len(words)} ids, {len(places)} places and {len(types)} "
                f"types; {', '.join(map(str, needed))} are needed"
            )
        self._encode(
            states,
            lengths,
            words=words.data_ptr(),
            places=places.data_ptr(),
            types=types.data_ptr(),
            ids=given.ctypes.data,
            seconds=seconds.ctypes.data if len(seconds) else None,
            first_place=first,
            layers=layers,
        )
        return states

    def _encode(
        self,
        states: Tensor,
        lengths: Sequence[int],
        *,
        layers: range | None = None,
        **given: int | None,
    ) -> None:
        """Run `layers`, unless given all, over `states` [T, C] in place.

        `given` are fields of a call of ids, whose embeddings are normalised first.
        """
        starts = np.array([0, *accumulate(lengths)], np.int64)
        if starts[-1] != len(states):
            raise EngineError(f"{len(states)} positions were given for sequences of {starts[-1]}")
        shape, call = self._shape, _Encode(**given)
        wanted = range(len(self._layers)) if layers is None else layers
        call.layers = ctypes.addressof(self._layers) + wanted.start * ctypes.sizeof(_Layer)
        call.num_layers = len(wanted)
        if given:
            call.first_norm, call.first_norm_bias = self._first_norm
        call.starts, call.sequences = starts.ctypes.data, len(lengths)
        call.states = states.data_ptr()
        call.hidden, call.inner, call.heads, call.eps = shape
        call.distances, call.reach = self._distances
        if call.distances and max(lengths) > call.reach:
            raise EngineError(
                f"{max(lengths)} positions were given to layers that see {call.reach}"
            )
        call.threads = torch.get_num_threads()
        needed = self._bytes(ctypes.byref(call))
        if len(self._workspace) < needed:
            self._workspace = torch.empty(needed, dtype=torch.uint8)
        call.workspace = self._workspace.data_ptr()
        self._run(ctypes.byref(call))


def _attention(own: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return query, key, value, output and norm of a layer's attention: MPNet's, or BERT's."""
    if hasattr(own, "attn"):
        return own.attn.q, own.attn.k, own.attn.v, own.attn.o, own.LayerNorm
    products = own.self
    return products.query, products.key, products.value, own.output.dense, own.output.LayerNorm


def _packed(weight: Tensor, parts: Parts) -> Tensor:
    """Return `weight` [out, in] flat, in the layout of `activations.h`."""
    if parts == 0:
        return weight.float().view(-1, 32, weight.shape[1]).transpose(1, 2).flatten()
    if parts == 3:
        return _digits(weight)
    high = weight.to(torch.bfloat16)
    planes = [high] if parts == 1 else [high, (weight - high).to(torch.bfloat16)]
    outside, inside = weight.shape
    tiles = torch.stack(planes).view(parts, outside // 32, 2, 16, inside // 32, 16, 2)
    return tiles.permute(1, 0, 2, 4, 5, 3, 6).flatten()


def _digits(weight: Tensor) -> Tensor:
    """Return `weight` as three signed bytes an element, and a scale to each column.

    Every 64 elements of 16 columns are followed by their lower digits, and all of them by the
    columns' scales.
    """
    outside, inside = weight.shape
    top = weight.double().abs().amax(1, keepdim=True).clamp(min=1e-30)
    # Each digit is larger by 128 than it is meant to be.
    numbers = (weight.double() / top * _MOST).round().int() + 0x808080
    numbers = nn.functional.pad(numbers, (0, -inside % 64), value=0x808080)
    planes = torch.stack([(numbers >> shift & 255) - 128 for shift in (16, 8, 0)]).to(torch.int8)
    tiles = planes.view(3, outside // 16, 16, -1, 16, 4).permute(1, 3, 0, 4, 2, 5)
    scales = (top / _MOST * 2**16).float().view(outside // 16, 16).view(torch.int8)
    return torch.cat([tiles.reshape(outside // 16, -1), scales], dim=1).flatten()


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library; None if it, or the tiles it was compiled for, are missing."""
    found = load("encoder")
    return None if found is None or found.inlay_tiles() < 0 else found


def fastest(dtype: torch.dtype, *, exact: bool) -> Parts | None:
    """Return how native layers of `dtype` are computed here; None where torch's are to be used.

    With `exact`, float32 has all of its bits.
    """
    found = library()
    if found is None or dtype not in (torch.float32, torch.bfloat16):
        return None
    if found.inlay_tiles():
        return 1 if dtype == torch.bfloat16 else 3 if exact else 2
    return 0 if dtype == torch.float32 and found.inlay_wide() else None


class NativeBody:
    """A BERT-like model whose layers are one native call.

    Has its own forward pass, without branches for other uses.
    """

    def __init__(self, base: Any, encoder: NativeEncoder, parts: Parts, first: int) -> None:
        self._norm = base.embeddings.LayerNorm
        self._project: nn.Module | None = getattr(base, "embeddings_project", None)
        self._encoder = encoder
        dtype = torch.bfloat16 if parts == 1 else torch.float32
        own = base.embeddings
        tables = [own.word_embeddings.weight, own.position_embeddings.weight]
        # MPNet has no types.
        kinds = getattr(own, "token_type_embeddings", None)
        tables.append(tables[0].new_zeros(1, tables[0].shape[1]) if kinds is None else kinds.weight)
        words, places, types = (table.detach().to(dtype).contiguous() for table in tables)
        self._embeddings = _Embeddings(words, places, types, first)

    def __call__(
        self,
        ids: Sequence[int],
        lengths: Sequence[int],
        second_from: Sequence[int] = (),
        *,
        shift: int = 0,
    ) -> Tensor:
        """Compute the last states, float32 [T, C], of sequences laid end to end.

        Args:
            ids: [T], valid token ids.
            lengths: [S], of the sequences.
            second_from: [S], first position of each sequence of the second type; empty if all are
                of the first.
            shift: place of the first position of each sequence, beside the model's own.
        """
        embeddings = self._embeddings._replace(first=self._embeddings.first + shift)
        if self._project is None:
            return self._encoder.of_ids(embeddings, ids, lengths, second_from)
        states = self._projected(self._project, embeddings, ids, lengths, second_from)
        found: Tensor = self._encoder(states[None], PackedAttention(lengths, states.device))
        return found[0]

    def embedded(self, ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Compute what the first layer is given [T, C] of sequences of the first type."""
        if self._project is None:
            return self._encoder.of_ids(self._embeddings, ids, lengths, (), layers=range(0))
        return self._projected(self._project, self._embeddings, ids, lengths, ())

    def _projected(
        self,
        project: nn.Module,
        embeddings: _Embeddings,
        ids: Sequence[int],
        lengths: Sequence[int],
        second_from: Sequence[int],
    ) -> Tensor:
        words, places, types, first = embeddings
        own = torch.cat([torch.arange(length) for length in lengths])
        kinds = torch.zeros_like(own)
        if second_from:
            kinds = (
                own >= torch.tensor(second_from).repeat_interleave(torch.tensor(lengths))
            ).long()
        states: Tensor = words[torch.tensor(ids)] + places[own + first] + types[kinds]
        found: Tensor = project(self._norm(states))
        return found


def native_body(
    base: Any, parts: Parts, first: int = 0, bias: RelativeBias | None = None
) -> NativeBody | None:
    """Replace the `encoder` of a BERT-like model by native loops if the results agree.

    Returns None if it was not replaced.

    Args:
        base: on a CPU, in its final dtype, with `PackedAttention` as its attention.
        parts: number of values for an element of a product.
        first: place of a sequence's first position.
        bias: of its scores.
    """
    loops = library()
    shape = None if loops is None else _shape(base)
    if loops is None or shape is None:
        return None
    projected = hasattr(base, "embeddings_project")
    norm = None if projected else base.embeddings.LayerNorm
    longest = base.config.max_position_embeddings - first
    distances = None if bias is None else bias.by_distance(longest)
    swapped = NativeEncoder(base.encoder, shape, parts, loops, norm, distances)
    body = NativeBody(base, swapped, parts, first)
    error = _largest_difference(base, swapped, body, first)
    if not error <= _TOLERANCE[parts]:
        _logger.warning("native layers differ by %.3g and are not used", error)
        return None
    base.encoder = swapped
    return body


def _largest_difference(base: Any, swapped: NativeEncoder, body: NativeBody, first: int) -> float:
    """Return the largest `differ` of a layer given the states that torch's has, and of embeddings.

    One layer at a time: through several a fault and rounding grow alike.
    """
    longest = base.config.max_position_embeddings - first
    lengths = [min(length, longest) for length in (70, 33, 5)]
    words = base.embeddings.word_embeddings.num_embeddings
    ids = torch.randint(words, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    own = torch.cat([torch.arange(length) for length in lengths])
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...], found: Any) -> None:
        states: Tensor = found[0] if isinstance(found, tuple) else found
        kept.append((given[0][0], states.view(len(own), -1)))

    handles = [layer.register_forward_hook(keep) for layer in base.encoder.layer]
    packed = PackedAttention(lengths, ids.device)
    try:
        with torch.inference_mode():
            base(ids[None], position_ids=(own + first)[None], packed=packed)
            errors = [
                differ(swapped.layer(index, given, lengths), wanted)
                for index, (given, wanted) in enumerate(kept)
            ]
            errors.append(differ(body.embedded(ids.tolist(), lengths), kept[0][0]))
    finally:
        for handle in handles:
            handle.remove()
    # Not a number is the largest.
    return max(errors, key=lambda each: (isnan(each), each))


def _shape(base: Any) -> LayerSizes | None:
    """Return the sizes of a model's layers, or None if the loops do not support them."""
    config = base.config
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    size = hidden // heads
    if (
        not len(base.encoder.layer)
        or config.hidden_act != "gelu"
        or hidden % 32
        or inner % 32
        or max(hidden, inner) > MOST_INPUTS
        or size % 32
        or size * heads != hidden
    ):
        return None
    return LayerSizes(hidden, inner, heads, float(config.layer_norm_eps))
