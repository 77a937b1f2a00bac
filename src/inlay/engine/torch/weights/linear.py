"""Faster modules that replace a model's own after loading.

Three replacements, each compared with the original before it is used:
- projections of the same input become one product (query, key, value; gate, up);
- each becomes the `LinearMethod` that suits its weight and device (`linear_methods.py`), and a
  router multiplies with its weight by one;
- root-mean-square norms, in transformers two casts and six operations over whole activations,
  become one native pass, or a reduction and two operations where there are no native kernels; on a
  GPU, torch's own kernel. `F.rms_norm` is no faster on a CPU than what it would replace.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.engine.torch.lora import LoraBank
from inlay.engine.torch.native import Kernels, kernels
from inlay.engine.torch.self_check.modules import MADE, MADE_FOR_BLOCKS, ModuleCheck
from inlay.engine.torch.weights.experts import (
    BlockExperts,
    RouterWeight,
    faster_experts,
    routed,
)
from inlay.engine.torch.weights.linear_methods import (
    BlockLinear,
    LinearMethod,
    PackedLinear,
    PlainLinear,
    QuantisedLinear,
    differ,
    packs,
)
from inlay.engine.torch.weights.quantised.blocks import BlockWeight, ExpertBlocks
from inlay.engine.torch.weights.quantised.weight import (
    AnyQuantised,
    KeptWeight,
    QuantisedWeight,
)

_LEAST_ROWS = 4
"""Minimum positions of a step on CPUs where oneDNN does the products; missing ones are padded.

oneDNN reads weights at 17 GB/s for products of one row and 14 for two, but 20 for three to six, of
34 a core can read on an AMD machine.
"""


_BLOCK = 1024
"""Positions whose angles are computed at once."""

_SAME_FORMULA = 1e-5
"""Difference of two computations of one norm in float32, as in `differ`: rounding alone."""


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension, computed in float32 and rounded once.

    Attributes:
        weight: [size] float32.
        eps: added to the mean square.
        invariant: True if the bits of a row do not depend on the number of rows.
    """

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels | None = None) -> None:
        """Store `weight` in float32; `kernels` compute the norm in one pass."""
        super().__init__()
        self._size = weight.shape[0]
        self._kernels = kernels
        self.invariant = kernels is not None
        self.eps = eps
        self.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
        self._offset = nn.Parameter(
            weight.new_tensor(eps, dtype=torch.float32), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size] to the same shape."""
        if self._kernels is not None:
            return self._kernels.rms_norm(x.contiguous(), self.weight, self.eps)
        norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=torch.float32)
        factor = torch.addcmul(self._offset, norm, norm, value=1 / self._size).rsqrt_()
        return torch.mul(x, factor).mul_(self.weight).to(x.dtype)


class RotaryTable(nn.Module):
    """Replacement of a rotary embedding whose angles depend on the position alone.

    Sines and cosines of a position come from a table that is filled in whole blocks: how vector
    functions round may depend on an element's place in a tensor.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary = rotary
        self._tables: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Drop the tables; they are filled again as they are needed."""
        self._tables = {}

    def forward(self, x: Tensor, position_ids: Tensor, *kind: str) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [1, T, R], in the dtype of `x`, of positions [1, T].

        Layers of each `kind` have a table, where they are told apart.
        """
        needed = int(position_ids.max()) // _BLOCK + 1
        table = self._tables.get(kind)
        filled = 0 if table is None else table[0].shape[1] // _BLOCK
        if table is None or needed > filled:
            blocks = [] if table is None else [table]
            for block in range(filled, needed):
                positions = torch.arange(block * _BLOCK, (block + 1) * _BLOCK)
                blocks.append(self._rotary(x, positions[None], *kind))
            cosines, sines = zip(*blocks, strict=True)
            table = self._tables[kind] = torch.cat(cosines, 1), torch.cat(sines, 1)
        cosine, sine = table
        return cosine[:, position_ids[0]], sine[:, position_ids[0]]


class _Fused:
    """One product for several projections of the same input.

    The parent module calls the parts one after another and does not know of this: the first call
    computes all parts, the others take theirs. For one forward pass at a time.
    """

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        self.linear = linear
        self._sizes = list(sizes)
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def take(self, index: int, x: Tensor) -> Tensor:
        """Return part `index` of the product with `x`."""
        if self._input is not x or self._outputs[index] is None:
            self._outputs = list(self.linear(x).split(self._sizes, -1))
            self._input = x
        output = self._outputs[index]
        self._outputs[index] = None
        if all(other is None for other in self._outputs):
            self._input = None
        return cast("Tensor", output)


class FusedPart(nn.Module):
    """Replacement of a projection whose product is computed together with its siblings'."""

    def __init__(self, fused: _Fused, index: int) -> None:
        super().__init__()
        self._fused = fused
        self._index = index

    @property
    def whole(self) -> nn.Module:
        """Linear layer that computes all parts, in order."""
        return self._fused.linear

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in] to [..., out of this part]."""
        return self._fused.take(self._index, x)


def accelerate(
    model: nn.Module,
    fused: Sequence[Sequence[str]],
    bank: LoraBank | None = None,
    check: ModuleCheck | None = None,
    *,
    invariant: bool = False,
) -> None:
    """Replace the linears and norms of `model` in place, each if `check` finds it the same.

    A linear whose weight another module shares (a head tied to the embedding table) is packed as a
    copy; every other original weight is dropped as soon as it is replaced. Quantised ones stay so.

    Args:
        model: on its device, in its final dtype.
        fused: names of sibling linears that take the same input.
        bank: adds adapter slots to all linears of the model's body that see every position.
        check: compares each; one on made inputs unless given.
        invariant: prefer products in which the bits of a row do not depend on the number of rows.
    """
    first = next(model.parameters())
    native = kernels() if first.device.type == "cpu" and Kernels.serve(first.dtype) else None
    pack = first.device.type == "cpu" and packs(first.dtype)
    swap = _Swap(pack, bank, native, invariant, check or ModuleCheck())
    for path, parent in list(model.named_modules()):
        for names in fused:
            siblings = [getattr(parent, name, None) for name in names]
            if all(type(sibling) is nn.Linear for sibling in siblings):
                linears = cast("list[nn.Linear]", siblings)
                if _join([linear.weight for linear in linears]):
                    swap.fuse(path, parent, names, linears)
        for name, child in list(parent.named_children()):
            # Not a subclass, which computes something else (the router of Llama 4's experts).
            if type(child) is nn.Linear:
                setattr(parent, name, swap.linear(path, [name], [child]))
            elif (norm := _faster_norm(child, native)) is not None and swap.check.agrees(
                [_join_path(path, name)], child.weight.shape[0], child.weight, norm, child
            ):
                setattr(parent, name, norm)
            elif (experts := faster_experts(child, native)) is not None and swap.same_experts(
                _join_path(path, name), child, experts
            ):
                setattr(parent, name, experts)
            elif swap.pack and type(child).__name__.endswith("TopKRouter"):
                swap.route(_join_path(path, name), child)


def least_rows(model: nn.Module) -> int:
    """Return the minimum number of positions of a step: fewer would take longer."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    return _LEAST_ROWS if any(not linear.native_rows for linear in packed) else 1


class _Swap(NamedTuple):
    """Settings of the replacement of linears.

    `pack`: pack weights; `bank`: adapter slots, if any; `kernels`: native kernels, if any;
    `invariant` and `check`: as in `accelerate`.
    """

    pack: bool
    bank: LoraBank | None
    native: Kernels | None
    invariant: bool
    check: ModuleCheck

    def linear(self, path: str, names: Sequence[str], linears: Sequence[nn.Linear]) -> nn.Module:
        """Return one product for modules `names` of the parent at `path`.

        The plain one if a faster one differs.
        """
        fast = self._fast(linears)
        places = [_join_path(path, name) for name in names]
        if fast is None or not self._agrees(places, linears, fast):
            fast = self._plain(linears)
        return self._adapted(path, names, linears, fast)

    def fuse(
        self, path: str, parent: nn.Module, names: Sequence[str], linears: Sequence[nn.Linear]
    ) -> None:
        """Replace several projections by one product if it computes the same."""
        product = self._fast(linears) or self._plain(linears)
        if not self._agrees([_join_path(path, name) for name in names], linears, product):
            return
        shared = _Fused(
            self._adapted(path, names, linears, product), [each.out_features for each in linears]
        )
        for index, name in enumerate(names):
            setattr(parent, name, FusedPart(shared, index))

    def same_experts(self, place: str, own: Any, experts: BlockExperts) -> bool:
        """Return True if the replacement of the experts `own` computes what they do."""
        count = len(own.down_proj)
        found, expected = routed(experts, count), routed(own, count)
        return self.check.agrees(
            [place], experts.size, own.down_proj, found, expected,
            roundings=experts.roundings,
        )  # fmt: skip

    def route(self, place: str, router: nn.Module) -> None:
        """Have a router's product be the packed weight's, if that is the same.

        For one row `F.linear` takes a third of the time of the attention's products.
        """
        weight, bias = cast("Tensor", router.weight), getattr(router, "bias", None)
        products = None if self.native is None else self.native.products
        packed = PackedLinear(weight, bias, products=products, invariant=self.invariant)

        def own(x: Tensor) -> Tensor:
            return F.linear(x, weight, bias)

        if self.check.agrees([place], weight.shape[1], weight, packed, own):
            router.weight = RouterWeight.of(weight, packed)

    def _agrees(
        self, places: Sequence[str], linears: Sequence[nn.Linear], product: nn.Module
    ) -> bool:
        # To dequantise all rows of blocks takes longer than to read them.
        blocks = product if isinstance(product, BlockLinear) else None
        only = None if blocks is None else blocks.weight.sample()

        def separate(x: Tensor) -> Tensor:
            if blocks is not None:
                return blocks.weight.product(x, blocks.bias, only)
            return torch.cat([self._plain([linear])(x) for linear in linears], -1)

        first = linears[0]
        return self.check.agrees(
            places, first.in_features, first.weight, product, separate, only=only,
            made=MADE if blocks is None else MADE_FOR_BLOCKS,
        )  # fmt: skip

    def _adapted(
        self, path: str, names: Sequence[str], linears: Sequence[nn.Linear], product: LinearMethod
    ) -> nn.Module:
        """Add adapter slots to a product, if it is to have any."""
        # The head is not in the body, and an expert sees only some of the positions.
        if self.bank is None or not path or "experts" in path.split("."):
            return product
        places = [f"{path}.{name}" for name in names]
        sizes = [linear.out_features for linear in linears]
        return self.bank.adapt(
            product, linears[0].weight, places, sizes, self.native, invariant=self.invariant
        )

    def _plain(self, linears: Sequence[nn.Linear]) -> LinearMethod:
        """Return the product as torch computes it."""
        weight, bias = _stacked(linears)
        if isinstance(weight, QuantisedWeight):
            return QuantisedLinear(weight, bias)
        if isinstance(weight, BlockWeight):
            return BlockLinear(weight, bias, plain=True)
        return PlainLinear(weight, bias)

    def _fast(self, linears: Sequence[nn.Linear]) -> LinearMethod | None:
        """Return the product with packed or quantised weights; None if there is none."""
        products = None if self.native is None else self.native.products
        weight, bias = _stacked(linears)
        if isinstance(weight, QuantisedWeight):
            if products is None:
                return None
            return QuantisedLinear(weight, bias, products, invariant=self.invariant)
        if isinstance(weight, BlockWeight):
            return BlockLinear(weight, bias)
        if not self.pack:
            return None
        return PackedLinear(weight, bias, products=products, invariant=self.invariant)


def _stacked(linears: Sequence[nn.Linear]) -> tuple[Tensor | AnyQuantised, Tensor | None]:
    """Return the weights of linears with one input, one below another, and their biases."""
    biases = [cast("Tensor | None", linear.bias) for linear in linears]
    bias = None
    if any(each is not None for each in biases):
        bias = torch.cat(
            [
                linear.weight.new_zeros(linear.out_features) if each is None else each.detach()
                for linear, each in zip(linears, biases, strict=True)
            ]
        )
    kept = _kept([linear.weight for linear in linears])
    if kept:
        whole: AnyQuantised = type(kept[0]).joined(cast("Any", kept))
        return whole, bias
    weights = [linear.weight.detach() for linear in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights), bias


def _kept(weights: Sequence[Tensor]) -> list[AnyQuantised]:
    """Return the matrices that stand behind some of the weights of linears."""
    held = [weight.quantised for weight in weights if isinstance(weight, KeptWeight)]
    return [each for each in held if not isinstance(each, ExpertBlocks)]


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _join(weights: Sequence[Tensor]) -> bool:
    """Return True if one product can have all `weights`."""
    kept = _kept(weights)
    if len(kept) in (0, len(weights)):
        return all(above.joins(cast("Any", below)) for above, below in pairwise(kept))
    return False


def _own_norm(factor: Tensor, eps: float, dtype: torch.dtype) -> nn.Module | None:
    """Return torch's norm in `dtype`, one kernel on a GPU; None if rounding changes `factor`."""
    norm = nn.RMSNorm(len(factor), eps, dtype=dtype, device=factor.device)
    norm.weight = nn.Parameter(factor.to(dtype), requires_grad=False)
    return norm if torch.equal(norm.weight.float(), factor) else None


def _faster_norm(module: nn.Module, native: Kernels | None) -> nn.Module | None:
    """Return the replacement of a root-mean-square norm.

    None if `module` is no such norm, or computes something else.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not type(module).__name__.endswith("RMSNorm")
        or not isinstance(weight, Tensor)
        or eps is None
    ):
        return None
    offset = _offset_of_weight(module, weight, eps)
    if offset is None:
        return None
    # The sum may not have the dtype of the weight: 16.8125 has one bit more than bfloat16 holds.
    factor = offset + weight.detach().float()
    own = _own_norm(factor, eps, weight.dtype) if weight.device.type == "cuda" else None
    return RMSNorm(factor, eps, native) if own is None else own


def _offset_of_weight(module: nn.Module, weight: Tensor, eps: float) -> int | None:
    """Return what a norm adds to its weight: 1 in some families (Gemma, Qwen3-Next), else 0.

    None if it computes something else. Read from what the module's own code computes in float32
    with other weights, for which no two formulas are near each other, and on rows whose mean
    square is near `eps`, far above and at 0.
    """
    generator = torch.Generator().manual_seed(1)
    probe = copy.copy(module)
    size = (weight.shape[0],)
    given = torch.randn(size, generator=generator).to(weight.device)
    probe._parameters = {**module._parameters, "weight": nn.Parameter(given, requires_grad=False)}
    rows = torch.randn(4, *size, generator=generator).to(weight.device)
    rows *= torch.tensor([[1.0], [1e3], [eps**0.5], [0.0]], device=weight.device)
    with torch.inference_mode():
        try:
            found = probe(rows)
        except TypeError:
            # It takes more than rows: a gate, as some recurrent layers have.
            return None
        ones = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    for offset in (0, 1):
        if found.dtype == ones.dtype and differ(found, ones * (offset + given)) <= _SAME_FORMULA:
            return offset
    return None
