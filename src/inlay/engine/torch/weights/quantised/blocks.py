"""Weights that stay in GGUF's blocks, and their products with activations of eight bits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from inlay.engine.torch.native.integers import IntegerPanels, Integers, quantised

_ROWS = 8192
"""Rows of a matrix that are dequantised at a time."""

_SAMPLED = 32
"""Rows that products of few rows take at a time; three such runs of a matrix are a sample of it."""


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """A matrix [O, I] in blocks: several, of any types, one below another.

    Attributes:
        parts: the matrices, each as `native` lays it out.
        native: products with them.
    """

    parts: tuple[IntegerPanels, ...]
    native: Integers

    @classmethod
    def of(
        cls, native: Integers, type: int, runs: Iterable[Tensor], outputs: int, inputs: int
    ) -> "BlockWeight":
        """Lay out blocks as a file has them; arguments and errors as of `Integers.panels`."""
        return cls((native.panels(type, runs, outputs, inputs),), native)

    @cached_property
    def outputs(self) -> int:
        """Outputs of the matrix."""
        return sum(part.outputs for part in self.parts)

    @property
    def inputs(self) -> int:
        """Inputs of the matrix."""
        return self.parts[0].inputs

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return self.outputs, self.inputs

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return sum(part.data.nbytes for part in self.parts)

    def joins(self, other: object) -> bool:
        """Return True if `other` can stand below this matrix in one."""
        return isinstance(other, BlockWeight) and other.inputs == self.inputs

    @staticmethod
    def joined(weights: "Sequence[BlockWeight]") -> "BlockWeight":
        """Return the matrices one below another; each joins the next."""
        return BlockWeight(tuple(p for weight in weights for p in weight.parts), weights[0].native)

    def dense(self) -> Tensor:
        """Return the matrix, float32 [O, I]."""
        return torch.cat(
            [self.native.rows(part, torch.arange(part.outputs)) for part in self.parts]
        )

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [N] int64 of a matrix of one part, float32 [N, I]."""
        (part,) = self.parts
        return self.native.rows(part, ids)

    def sample(self) -> Tensor:
        """Return rows to compare, int64: of each part the first, the middle and the last ones."""
        first, found = 0, []
        for part in self.parts:
            ids = torch.arange(part.outputs)
            if part.outputs > 3 * _SAMPLED:
                middle = part.outputs // 2
                runs = ids[:_SAMPLED], ids[middle : middle + _SAMPLED], ids[-_SAMPLED:]
                ids = torch.cat(runs)
            found.append(first + ids)
            first += part.outputs
        return torch.cat(found)

    def product(self, x: Tensor, bias: Tensor | None, only: Tensor | None = None) -> Tensor:
        """Multiply [..., I] by the definition, in float32: [..., O], in the dtype of `x`.

        Args:
            x: the input.
            bias: [O], or None.
            only: ascending rows of the matrix, int64 [K]: gives [..., K].
        """
        codes, scales = quantised(x)
        given = (codes * scales[..., None]).flatten(-2)
        first, found = 0, []
        for part in self.parts:
            ids = torch.arange(first, first + part.outputs)
            if only is not None:
                ids = only[(only >= first) & (only < first + part.outputs)]
            found += [
                F.linear(given, self.native.rows(part, run - first))
                for run in torch.split(ids, _ROWS)
            ]
            first += part.outputs
        whole = torch.cat(found, -1)
        if bias is not None:
            whole += bias if only is None else bias[only]
        return whole.to(x.dtype)


@dataclass(frozen=True, eq=False)
class ExpertBlocks:
    """The matrices of a layer's experts in blocks.

    Attributes:
        experts: each expert's, [O, I].
        across: the model has [E, I, O], not [E, O, I].
    """

    experts: tuple[BlockWeight, ...]
    across: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the model's parameter."""
        outputs, inputs = self.experts[0].shape
        return len(self.experts), *((inputs, outputs) if self.across else (outputs, inputs))

    def dense(self) -> Tensor:
        """Return the model's parameter, float32."""
        found = torch.stack([weight.dense() for weight in self.experts])
        return found.mT.contiguous() if self.across else found
