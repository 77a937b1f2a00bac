"""Weights of four or eight bits, in the layout of the native kernel.

W[o, i] = (code[o, i] - zero[o, g]) * scale[o, g], where g is the group of input i. Products with
them are those of the exact W, rounded once: activations are not quantised.

Shapes: O outputs, I inputs, G groups, P panels of 64 outputs, n inputs in a word of 32 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.engine.torch.weights.quantised.blocks import BlockWeight, ExpertBlocks

_WIDTH = 64


class QuantKind(IntEnum):
    """Codes: of four bits, whose 0 stands for -8; of eight, in two's complement; float8 e4m3.

    The numbers are those of `native/quantised.cpp`.
    """

    INT4 = 0
    INT8 = 1
    FP8 = 2

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self is QuantKind.INT4 else 8

    @property
    def per_word(self) -> int:
        """Codes in a word of 32 bits."""
        return 32 // self.bits


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """A matrix [O, I] of codes and their scales.

    Attributes:
        kind: kind of the codes.
        words: [P, I / n, 64] int32, codes of even inputs in the low halves of words, lowest bits
            first, those of odd inputs in the high halves.
        scales: [P, G, 64] float32.
        shifts: [P, G, 64] float32, zeros times scales; None if all zeros are 0.
        outputs: O; the rest of the last panel is 0.
        group: inputs that share a scale; the last group may have fewer.
        order: [I] int64, which input each column is; None for their own order.
    """

    kind: QuantKind
    words: Tensor
    scales: Tensor
    shifts: Tensor | None
    outputs: int
    group: int
    order: Tensor | None = None

    @classmethod
    def of(
        cls,
        kind: QuantKind,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        group: int,
        order: Tensor | None = None,
    ) -> "QuantisedWeight":
        """Pack codes.

        Args:
            kind: kind of the codes.
            codes: [O, I] uint8, columns already in the order of `order`.
            scales: [O, G].
            zeros: [O, G], in units of the codes' values; None for 0.
            group: inputs that share a scale, a multiple of `kind.per_word`, as I is.
            order: as the attribute.
        """
        outputs, inputs = codes.shape
        padding = -outputs % _WIDTH
        count = kind.per_word
        panels = F.pad(codes, (0, 0, 0, padding)).view(-1, _WIDTH, inputs // count, count)
        words = torch.zeros(panels.shape[:3], dtype=torch.int32)
        for place in range(count):
            # Codes are unsigned: the highest bits of a word wrap to its sign.
            shift = kind.bits * (place // 2) + 16 * (place % 2)
            words |= panels[..., place].to(torch.int32) << shift
        scales = scales.float()
        shifts = None
        if zeros is not None and bool(zeros.any()):
            shifts = _panelled(scales * zeros, padding)
        return cls(
            kind,
            words.transpose(1, 2).contiguous(),
            _panelled(scales, padding),
            shifts,
            outputs,
            group,
            order,
        )

    @property
    def inputs(self) -> int:
        """Inputs of the matrix."""
        return self.words.shape[1] * self.kind.per_word

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        parts = (self.words, self.scales, self.shifts)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return self.outputs, self.inputs

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply [..., I] with what the codes stand for: [..., O], in the dtype of `x`."""
        return F.linear(x, self.dense().to(x.dtype), bias)

    def joins(self, other: "QuantisedWeight") -> bool:
        """Return True if `other` can stand below this matrix in one."""
        return (
            (self.kind, self.group, self.inputs) == (other.kind, other.group, other.inputs)
            and self.order is None
            and other.order is None
            and self.outputs % _WIDTH == 0
        )

    @staticmethod
    def joined(weights: "Sequence[QuantisedWeight]") -> "QuantisedWeight":
        """Return the matrices one below another; each joins the next."""
        first = weights[0]
        if len(weights) == 1:
            return first
        shifts = None
        if any(weight.shifts is not None for weight in weights):
            shifts = torch.cat(
                [torch.zeros_like(w.scales) if w.shifts is None else w.shifts for w in weights]
            )
        return replace(
            first,
            words=torch.cat([weight.words for weight in weights]),
            scales=torch.cat([weight.scales for weight in weights]),
            shifts=shifts,
            outputs=sum(weight.outputs for weight in weights),
        )

    def dense(self) -> Tensor:
        """Return W, float32 [O, I]."""
        panels, _, _ = self.words.shape
        count, mask = self.kind.per_word, (1 << self.kind.bits) - 1
        codes = torch.stack(
            [
                self.words >> (self.kind.bits * (place // 2) + 16 * (place % 2)) & mask
                for place in range(count)
            ],
            dim=2,
        ).flatten(1, 2)
        values = _values(self.kind, codes)
        for start in range(0, self.inputs, self.group):
            part = values[:, start : start + self.group]
            part *= self.scales[:, None, start // self.group]
            if self.shifts is not None:
                part -= self.shifts[:, None, start // self.group]
        found = values.transpose(1, 2).reshape(panels * _WIDTH, -1)[: self.outputs]
        if self.order is None:
            return found
        placed = torch.empty_like(found)
        placed[:, self.order] = found
        return placed


def _panelled(of_groups: Tensor, padding: int) -> Tensor:
    """[O, G] to [P, G, 64]."""
    padded = F.pad(of_groups, (0, 0, 0, padding))
    return padded.view(-1, _WIDTH, padded.shape[1]).transpose(1, 2).contiguous()


def _values(kind: QuantKind, codes: Tensor) -> Tensor:
    """Return the values of codes, float32."""
    if kind is QuantKind.INT4:
        return codes.float() - 8
    narrow = codes.to(torch.uint8)
    return narrow.view(torch.int8 if kind is QuantKind.INT8 else torch.float8_e4m3fn).float()


AnyQuantised: TypeAlias = QuantisedWeight | BlockWeight


class KeptWeight(nn.Parameter):
    """A weight of a model as it is loaded, in place of the numbers it stands for.

    It has the shape, dtype and device of the weight, and the memory of one element. `F.linear`
    multiplies with it; `F.embedding` gives rows of a `BlockWeight`; an index is that of one of the
    `ExpertBlocks`, and gives a parameter in its place, by which `@` multiplies if they are across.
    """

    quantised: AnyQuantised | ExpertBlocks

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with what it stands for; all else is done with the numbers in its place."""
        held = [given.quantised for given in args if isinstance(given, KeptWeight)]
        if func is F.embedding and held and isinstance(held[0], BlockWeight):
            ids, weight = args[:2]
            return held[0].rows(ids.flatten()).to(weight.dtype).view(*ids.shape, -1)
        if func is F.linear and held and not isinstance(held[0], ExpertBlocks):
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return held[0].product(args[0], bias)
        if func is Tensor.matmul and held and isinstance(held[0], BlockWeight):
            return held[0].product(args[0], None)
        if func is Tensor.__getitem__ and held and isinstance(held[0], ExpertBlocks):
            return KeptWeight.of(held[0].experts[int(args[1])], args[0].dtype)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @staticmethod
    def of(quantised: AnyQuantised | ExpertBlocks, dtype: torch.dtype) -> "KeptWeight":
        """Return a parameter in place of `quantised`, of `dtype`."""
        kept = cast("KeptWeight", torch.zeros((), dtype=dtype).expand(quantised.shape))
        found = KeptWeight(kept, requires_grad=False)
        found.quantised = quantised
        return found
