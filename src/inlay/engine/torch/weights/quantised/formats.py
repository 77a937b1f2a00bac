"""Quantised weights as they are published: the tensors of each, and their meaning.

A weight [O, I] has G groups of inputs. Beside each other lie, for
- fp8: `weight` [O, I] F8_E4M3, `weight_scale_inv` [O / rows, I / columns];
- compressed-tensors, not packed: `weight` [O, I] I8 or F8_E4M3, `weight_scale` [O, G], [O, 1], [1]
  or of blocks, `weight_zero_point` I8;
- compressed-tensors, packed: `weight_packed` [O, I / n] I32, `weight_shape`, `weight_scale` [O, G],
  `weight_zero_point` [O / n, G] I32, `weight_g_idx` [I];
- AWQ: `qweight` [I, O / 8] I32, `qzeros` [G, O / 8] I32, `scales` [G, O];
- GPTQ: `qweight` [I / n, O] I32, `qzeros` [G, O / n] I32, `scales` [G, O], `g_idx` [I].

A word of 32 bits has n codes, the first in its lowest bits; but AWQ's has 0, 2, 4, 6, 1, 3, 5, 7.
Shapes and dtypes are checked by the headers of files, before anything is read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.weights.quantised.scheme import Scheme
from inlay.engine.torch.weights.quantised.weight import QuantisedWeight, QuantKind
from inlay.tensors.stored import StoredTensor

Read: TypeAlias = Callable[[str], Tensor]
"""A stored tensor, by name."""

_SCALES = ("F32", "BF16", "F16")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place within a word of each of eight outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight that was read: W[o, i] = (value of codes[o, i] - zeros[o, g]) * scales[o, g].

    Attributes:
        kind: kind of the codes.
        codes: [O, I] uint8.
        scales: [O, G].
        zeros: [O, G] int32, or None for 0.
        group: inputs that share a scale; the last group may have fewer.
        order: [I] int64, input of each column; None for their own order.
    """

    kind: QuantKind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    order: Tensor | None = None

    @property
    def fits(self) -> bool:
        """True if `kept` can hold it: groups end where words do."""
        count, inputs = self.kind.per_word, self.codes.shape[1]
        return inputs % count == 0 and (self.group % count == 0 or self.group >= inputs)

    def kept(self) -> QuantisedWeight:
        """Return it as products take it; only if it `fits`."""
        group = min(self.group, self.codes.shape[1])
        return QuantisedWeight.of(self.kind, self.codes, self.scales, self.zeros, group, self.order)

    def dense(self) -> Tensor:
        """Return W, float32 [O, I]."""
        if self.kind is QuantKind.INT4:
            values = self.codes.float() - 8
        elif self.kind is QuantKind.INT8:
            values = self.codes.view(torch.int8).float()
        else:
            values = self.codes.view(torch.float8_e4m3fn).float()
        for group in range(self.scales.shape[1]):
            part = values[:, group * self.group : (group + 1) * self.group]
            if self.zeros is not None:
                part -= self.zeros[:, group, None]
            part *= self.scales[:, group, None].float()
        if self.order is None:
            return values
        placed = torch.empty_like(values)
        placed[:, self.order] = values
        return placed


@dataclass(frozen=True, slots=True)
class QuantisedFiles:
    """A quantised weight in the files."""

    parts: frozenset[str]
    read: Callable[[Read], Codes]


def find(scheme: Scheme, stored: Mapping[str, StoredTensor]) -> dict[str, QuantisedFiles]:
    """Return the quantised weights of a checkpoint, by the names they have in the model.

    Raises:
        InvalidRequestError: a weight lacks a tensor, or one has another dtype or shape; the message
            names it.
    """
    found = {}
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        files = _Files(stored, module)
        if last == "weight" and tensor.dtype in ("F8_E4M3", "F8_E5M2", "I8"):
            found[name] = _whole(scheme, files)
        elif last == "weight_packed" and scheme.method == "compressed-tensors":
            found[f"{module}.weight"] = _packed(files)
        elif last == "qweight" and scheme.method == "awq":
            found[f"{module}.weight"] = _awq(scheme, files)
        elif last == "qweight" and scheme.method == "gptq":
            found[f"{module}.weight"] = _gptq(scheme, files)
    return found


@dataclass(frozen=True, slots=True)
class _Files:
    """Tensors of one module, by the last part of their names."""

    stored: Mapping[str, StoredTensor]
    module: str

    def has(self, last: str) -> bool:
        return f"{self.module}.{last}" in self.stored

    def check(self, last: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
        """Return a tensor of one of `dtypes` and `shapes` (any if none are given)."""
        name = f"{self.module}.{last}"
        tensor = self.stored.get(name)
        if tensor is None:
            raise InvalidRequestError(f"{self.module} is quantised and has no {name}")
        if tensor.dtype not in dtypes or (shapes and tensor.shape not in shapes):
            allowed = f" of shape {' or '.join(map(str, shapes))}" if shapes else ""
            raise InvalidRequestError(
                f"{name} is {tensor.dtype} of shape {tensor.shape}; allowed: "
                f"{', '.join(dtypes)}{allowed}"
            )
        return tensor

    def found(
        self, lasts: Iterator[str], read: Callable[["_ModuleTensors"], Codes]
    ) -> QuantisedFiles:
        parts = frozenset(f"{self.module}.{last}" for last in lasts if self.has(last))
        return QuantisedFiles(parts, lambda tensor: read(_ModuleTensors(tensor, self.module)))


@dataclass(frozen=True, slots=True)
class _ModuleTensors:
    """Reads tensors of one module by the last part of their names."""

    read: Read
    module: str

    def __call__(self, last: str) -> Tensor:
        return self.read(f"{self.module}.{last}")


def _whole(scheme: Scheme, files: _Files) -> QuantisedFiles:
    """Weights of one byte an element, with scales of blocks, groups, rows or all."""
    last = "weight_scale_inv" if scheme.method == "fp8" else "weight_scale"
    allowed = ("F8_E4M3",) if scheme.method == "fp8" else ("F8_E4M3", "I8")
    weight = files.check("weight", allowed)
    if len(weight.shape) != 2:
        raise InvalidRequestError(f"{weight.name} has shape {weight.shape}; allowed: matrices")
    rows, columns = weight.shape
    if scheme.method == "fp8":
        grid = (-(-rows // scheme.block[0]), -(-columns // scheme.block[1]))
        block = scheme.block
        files.check(last, _SCALES, grid)
    else:
        block = _block(scheme, files.check(last, _SCALES), rows, columns)
    has_zeros = files.has("weight_zero_point")
    if has_zeros:
        files.check("weight_zero_point", ("I8",), files.check(last, _SCALES).shape)

    def read(tensor: _ModuleTensors) -> Codes:
        kind = QuantKind.INT8 if weight.dtype == "I8" else QuantKind.FP8
        scales = _by_rows(tensor(last), rows, block[0])
        zeros = None
        if has_zeros and kind is QuantKind.INT8:
            zeros = _by_rows(tensor("weight_zero_point").int(), rows, block[0])
        return Codes(kind, tensor("weight").view(torch.uint8), scales, zeros, block[1])

    return files.found(iter(("weight", last, "weight_zero_point")), read)


def _block(scheme: Scheme, scale: StoredTensor, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns that share a scale, by the scales' shape."""
    shape = scale.shape
    if shape in ((), (1,)):
        return rows, columns
    if len(shape) == 2 and shape[0] == rows and shape[1] and columns % shape[1] == 0:
        return 1, columns // shape[1]
    down, across = scheme.block
    if down and shape == (-(-rows // down), -(-columns // across)):
        return scheme.block
    raise InvalidRequestError(
        f"{scale.name} has shape {shape}, which does not divide a weight of shape {(rows, columns)}"
    )


def _by_rows(of_blocks: Tensor, rows: int, block: int) -> Tensor:
    """[R, G], [1] or [] to [rows, G], each of the R standing for `block` rows."""
    grid = of_blocks.view(1, 1) if of_blocks.dim() < 2 else of_blocks
    return grid.repeat_interleave(block, dim=0)[:rows]


def _packed(files: _Files) -> QuantisedFiles:
    packed = files.check("weight_packed", ("I32",))
    files.check("weight_shape", ("I64", "I32"), (2,))
    scale = files.check("weight_scale", _SCALES)
    rows, words = packed.shape
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if has_zeros := files.has("weight_zero_point"):
        shapes = [(-(-rows * bits // 32), groups) for bits in (4, 8)]
        files.check("weight_zero_point", ("I32",), *shapes)
    ordered = files.has("weight_g_idx")

    def read(tensor: _ModuleTensors) -> Codes:
        shape = tuple(tensor("weight_shape").tolist())
        bits = next((b for b in (4, 8) if shape == (rows, words * 32 // b)), None)
        if bits is None:
            raise InvalidRequestError(
                f"{packed.name} has shape {packed.shape} and weight_shape is {shape}: not 4 or 8 "
                "bits in whole words"
            )
        kind, middle = (QuantKind.INT4, 8) if bits == 4 else (QuantKind.INT8, 128)
        codes = _unpack(tensor("weight_packed"), bits)
        scales = tensor("weight_scale")
        scales = scales.view(-1, 1) if scales.dim() < 2 else scales
        zeros = None
        if has_zeros:
            zeros = _unpack(tensor("weight_zero_point").T, bits).T[:rows].int() - middle
        group, order = shape[1] // scales.shape[1], None
        if group * scales.shape[1] != shape[1]:
            raise InvalidRequestError(
                f"{scale.name} has shape {scale.shape}, which does not divide {shape}"
            )
        if ordered:
            order = _order(f"{files.module}.weight_g_idx", tensor("weight_g_idx"), group)
        return _placed(kind, codes, scales.expand(rows, -1), zeros, group, order)

    lasts = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
    return files.found(iter(lasts), read)


def _awq(scheme: Scheme, files: _Files) -> QuantisedFiles:
    packed = files.check("qweight", ("I32",))
    inputs, outputs = packed.shape[0], packed.shape[1] * 8
    group = inputs if scheme.group == -1 else scheme.group
    groups = -(-inputs // group)
    files.check("qzeros", ("I32",), (groups, outputs // 8))
    files.check("scales", _SCALES, (groups, outputs))

    def read(tensor: _ModuleTensors) -> Codes:
        codes = _unpack(tensor("qweight"), 4, _AWQ_PLACES).T
        zeros = _unpack(tensor("qzeros"), 4, _AWQ_PLACES).T.int() - 8
        return _placed(QuantKind.INT4, codes, tensor("scales").T, zeros, group, None)

    return files.found(iter(("qweight", "qzeros", "scales")), read)


def _gptq(scheme: Scheme, files: _Files) -> QuantisedFiles:
    packed = files.check("qweight", ("I32",))
    count = 32 // scheme.bits
    inputs, outputs = packed.shape[0] * count, packed.shape[1]
    group = inputs if scheme.group == -1 else scheme.group
    groups = -(-inputs // group)
    files.check("scales", _SCALES, (groups, outputs))
    files.check("qzeros", ("I32",), (groups, -(-outputs // count)))
    if ordered := files.has("g_idx"):
        files.check("g_idx", ("I32", "I64"), (inputs,))
    # 1 in every code: with its carries the inverse of taking 1 from each.
    ones = sum(1 << (scheme.bits * place) for place in range(count))
    ones -= (ones >> 31) << 32
    kind, middle = (QuantKind.INT4, 8) if scheme.bits == 4 else (QuantKind.INT8, 128)

    def read(tensor: _ModuleTensors) -> Codes:
        stored = tensor("qzeros")
        zeros = _unpack(stored + ones if scheme.zeros_less_one else stored, scheme.bits)
        codes = _unpack(tensor("qweight").T, scheme.bits)
        order = _order(f"{files.module}.g_idx", tensor("g_idx"), group) if ordered else None
        return _placed(
            kind, codes, tensor("scales").T, zeros.T[:outputs].int() - middle, group, order
        )

    return files.found(iter(("qweight", "qzeros", "scales", "g_idx")), read)


def _unpack(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """[R, W] int32 to [R, W * 32 / bits] uint8; `places` within a word if not in order."""
    shifts = torch.tensor(places or range(32 // bits), dtype=torch.int32) * bits
    codes = (words[..., None] >> shifts & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(1)


def _order(name: str, of_inputs: Tensor, group: int) -> Tensor | None:
    """Return the inputs by their groups; None if they are in that order already."""
    count = len(of_inputs)
    expected = torch.arange(count) // group
    if bool((of_inputs == -1).all()):
        return None
    order = of_inputs.argsort(stable=True)
    if not torch.equal(of_inputs[order].long(), expected):
        raise InvalidRequestError(
            f"{name} does not give {group} inputs to each of {-(-count // group)} groups"
        )
    return None if torch.equal(of_inputs.long(), expected) else order


def _placed(
    kind: QuantKind,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    order: Tensor | None,
) -> Codes:
    """Return codes stored from 0 as `Codes` has them, columns in `order`."""
    if kind is QuantKind.INT8:
        codes = codes ^ 128
    codes = codes if order is None else codes[:, order]
    return Codes(kind, codes, scales, zeros, group, order)
