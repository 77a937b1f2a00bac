"""Weights of plain checkpoints rounded to blocks of GGUF as they are loaded (`--quantization`)."""

import torch
from torch import Tensor, nn

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.native.integers import RUN, Integers
from inlay.engine.torch.weights.experts import weights_of_experts
from inlay.engine.torch.weights.quantised.blocks import BlockWeight, ExpertBlocks
from inlay.engine.torch.weights.quantised.weight import KeptWeight
from inlay.tensors.blocks import TYPES

_BLOCK, _SUPER = 32, 256

_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names that families give to a router's linear layer, where it is not below a `router`."""

_CHUNK = 1 << 22
"""Values that are there in float32 at a time."""

_ROUNDS = 3
"""Times that scales and mins of Q4_K are fitted to the codes found with the last."""


def round_linears(
    model: nn.Module, quantization: str, native: Integers, dtype: torch.dtype
) -> None:
    """Round the weights of a model's linear layers and experts in place; all else stays.

    A head is rounded to eight bits whatever is asked for; if it is tied to the table it gets a copy
    of its own, and the table stays as it is, so that rows of the files are the model's. Routers of
    experts stay, as do experts with biases, and matrices whose inputs 32 does not divide; to q4_k,
    those that 256 does not divide have eight bits.

    Args:
        model: as it is loaded.
        quantization: int8 or q4_k.
        native: products with blocks.
        dtype: of the model.

    Raises:
        InvalidRequestError: a weight is infinite or no number; the message names it.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    for path, module in list(model.named_modules()):
        names = ["weight"] if type(module) is nn.Linear else weights_of_experts(module)
        matrices = {name: getattr(module, name).detach() for name in names}
        if _routes(path) or any(each.shape[-1] % _BLOCK for each in matrices.values()):
            continue
        four = quantization == "q4_k" and module is not head
        for name, matrix in matrices.items():
            try:
                weight = _rounded(matrix, native, four=four and not matrix.shape[-1] % _SUPER)
            except ValueError as error:
                raise InvalidRequestError(
                    f"{path}.{name} cannot be rounded ({quantization}): it has values that are "
                    "infinite, no numbers, or too large"
                ) from error
            setattr(module, name, KeptWeight.of(weight, dtype))


def _rounded(matrix: Tensor, native: Integers, *, four: bool) -> BlockWeight | ExpertBlocks:
    """Round a matrix [O, I], or those of experts [E, O, I]. Raises as `Integers.panels`."""
    if matrix.dim() > 2:
        return ExpertBlocks(tuple(_of_one(each, native, four=four) for each in matrix))
    return _of_one(matrix, native, four=four)


def _of_one(matrix: Tensor, native: Integers, *, four: bool) -> BlockWeight:
    name, encode = ("Q4_K", q4_k) if four else ("Q8_0", q8_0)
    rows = max(1, _CHUNK // matrix.shape[1] // RUN) * RUN
    runs = (encode(part.float()) for part in torch.split(matrix, rows))
    return BlockWeight.of(native, TYPES[name].number, runs, *matrix.shape)


def _routes(path: str) -> bool:
    """Return True for a linear layer that chooses experts, or weighs one that all tokens see."""
    *parents, name = path.split(".")
    return name in _ROUTERS or "router" in parents


def q8_0(values: Tensor) -> Tensor:
    """Return the blocks of rows [R, I] float32, uint8 [R, I / 32 * 34], as ggml rounds them."""
    blocks = values.reshape(len(values), -1, _BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks * _reciprocal(scales)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([_half(scales), codes.view(torch.uint8)], -1).flatten(1)


def q4_k(values: Tensor) -> Tensor:
    """Return the blocks of rows [R, I] float32, uint8 [R, I / 256 * 144].

    Scales and mins are fitted by least squares, in which an element weighs its magnitude plus the
    root mean square of its block, as in ggml's `make_qkx2_quants`, from the block's range on.
    """
    blocks = values.reshape(len(values), -1, _SUPER // _BLOCK, _BLOCK)
    weights = blocks.square().mean(-1, keepdim=True).sqrt() + blocks.abs()
    low = blocks.amin(-1, keepdim=True).clamp(max=0)
    scales = (blocks.amax(-1, keepdim=True) - low).clamp(min=0) / 15
    for _ in range(_ROUNDS):
        codes = _codes(blocks, scales, low)
        scales, low = _fitted(blocks, codes, weights, scales, low)
    whole, fine = _six_bits(scales)
    whole_min, fine_mins = _six_bits(-low)
    codes = _codes(blocks, whole.float() * fine, -whole_min.float() * fine_mins).to(torch.uint8)
    pairs = codes.reshape(*codes.shape[:2], 4, 2, _BLOCK)
    nibbles = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(2)
    s, m = (each[..., 0].to(torch.uint8) for each in (fine, fine_mins))
    packed = torch.cat(
        [
            s[..., :4] | s[..., 4:] >> 4 << 6,
            m[..., :4] | m[..., 4:] >> 4 << 6,
            s[..., 4:] & 15 | (m[..., 4:] & 15) << 4,
        ],
        -1,
    )
    heads = [_half(each[..., 0]) for each in (whole, whole_min)]
    return torch.cat([*heads, packed, nibbles], -1).flatten(1)


def _codes(blocks: Tensor, scales: Tensor, low: Tensor) -> Tensor:
    return ((blocks - low) * _reciprocal(scales)).round().clamp(0, 15)


def _fitted(
    x: Tensor, codes: Tensor, weights: Tensor, scales: Tensor, low: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scales and mins with the least error for `codes`; a min is at most 0."""

    def total(of: Tensor) -> Tensor:
        return (weights * of).sum(-1, keepdim=True)

    w, of_codes, of_squares = weights.sum(-1, keepdim=True), total(codes), total(codes * codes)
    of_x, of_both = total(x), total(codes * x)
    det = w * of_squares - of_codes * of_codes
    scale, least = (w * of_both - of_codes * of_x) / det, (of_squares * of_x - of_codes * of_both)
    least = least / det
    above = least > 0
    scale = torch.where(above, of_both / of_squares, scale)
    good = (det > 0) & (scale > 0) & scale.isfinite()
    return torch.where(good, scale, scales), torch.where(good, least.clamp(max=0), low)


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return for [..., 8, 1] a float16 scale [..., 1, 1], and integers of six bits [..., 8, 1]."""
    whole = (values.amax(-2, keepdim=True) / 63).half()
    return whole, (values * _reciprocal(whole.float())).round().clamp(0, 63)


def _reciprocal(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, 1 / scales, torch.zeros_like(scales))


def _half(values: Tensor) -> Tensor:
    """Return float16 [..., 1] as bytes [..., 2]; what is no number stays so."""
    return values.half().contiguous().view(torch.uint8)
