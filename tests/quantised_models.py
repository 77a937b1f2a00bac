"""Tiny checkpoints with quantised weights, in each form they are published in.

Each form is written here by its definition, code by code, apart from the engine's readers; beside
it lies the same model with the values that the codes stand for, in float32.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.lifelike import lifelike
from tests.models import make, models_root

LAST = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32

Written = tuple[dict[str, Tensor], Tensor]
"""Tensors of a linear layer by the last part of their names, and the weight they stand for."""


@dataclass(frozen=True)
class Form:
    """A way to publish a quantised weight.

    Attributes:
        config: `quantization_config` of the checkpoint.
        write: of a weight [O, I].
        head: whether the head is quantised too.
        dtype: `dtype` that config.json names.
    """

    config: Mapping[str, Any]
    write: Callable[[Tensor], Written]
    head: bool = False
    dtype: str = field(default="bfloat16")


def integers(weight: Tensor, bits: int, group: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [O, I] from 0, scales [O, G] float16, zeros [O, G] as codes."""
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    parts = weight.view(len(weight), -1, group)
    if zeros:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / top).half()
        # A zero of 0 is what the first form of GPTQ cannot say.
        zero = (-low / scales.float()).round().clamp(1, top).int()
    else:
        scales = (parts.abs().amax(-1) / (middle - 1)).half()
        zero = torch.full(scales.shape, middle, dtype=torch.int32)
    codes = (parts / scales.float()[..., None]).round() + zero[..., None]
    return codes.clamp(0, top).int().view(weight.shape), scales, zero


def values(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """W[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g], g = groups[i]."""
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def packed(rows: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Codes [R, C] in words [R, C * bits / 32] int32; `places[k]` is the place of code k."""
    count = 32 // bits
    words = []
    for row in rows.tolist():
        row += [0] * (-len(row) % count)
        for start in range(0, len(row), count):
            word = 0
            for index, code in enumerate(row[start : start + count]):
                word |= code << (bits * (places[index] if places else index))
            words.append(word - (1 << 32) if word >> 31 else word)
    return torch.tensor(words, dtype=torch.int32).view(len(rows), -1)


def pack_quantized(
    bits: int, *, zeros: bool = False, group: int = GROUP, ordered: bool = False
) -> Form:
    def write(weight: Tensor) -> Written:
        size = weight.shape[1] if group == -1 else group
        groups = torch.arange(weight.shape[1]) // size
        if ordered:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(3))]
            by_group = groups.argsort(stable=True)
            codes, scales, zero = integers(weight[:, by_group], bits, size, zeros)
            codes = codes[:, by_group.argsort()]
        else:
            codes, scales, zero = integers(weight, bits, size, zeros)
        tensors = {
            "weight_packed": packed(codes, bits),
            "weight_shape": torch.tensor(weight.shape),
            "weight_scale": scales.bfloat16(),
        }
        if zeros:
            tensors["weight_zero_point"] = packed(zero.T, bits).T.contiguous()
        if ordered:
            tensors["weight_g_idx"] = groups.int()
        return tensors, values(codes, scales.bfloat16(), zero, groups)

    return Form(compressed("pack-quantized", num_bits=bits, symmetric=not zeros), write)


def int_quantized(weight: Tensor) -> Written:
    codes, scales, zero = integers(weight, 8, weight.shape[1], zeros=False)
    groups = torch.zeros(weight.shape[1], dtype=torch.int64)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.bfloat16()}
    return tensors, values(codes, scales.bfloat16(), zero, groups)


def naive_quantized(weight: Tensor) -> Written:
    """Each row has a scale and a zero of its own."""
    codes, scales, zero = integers(weight, 8, weight.shape[1], zeros=True)
    groups = torch.zeros(weight.shape[1], dtype=torch.int64)
    tensors = {
        "weight": (codes - 128).to(torch.int8),
        "weight_scale": scales.bfloat16(),
        "weight_zero_point": (zero - 128).to(torch.int8),
    }
    return tensors, values(codes, scales.bfloat16(), zero, groups)


def float_quantized(block: tuple[int, int] | None) -> Callable[[Tensor], Written]:
    """Scales of blocks, or of the whole tensor."""

    def write(weight: Tensor) -> Written:
        codes, scales, of_weight = in_blocks(weight, block or (len(weight), weight.shape[1]))
        tensors = {"weight": codes, "weight_scale": scales if block else scales.view(1)}
        return tensors, of_weight

    return write


def float_channels(weight: Tensor) -> Written:
    """Scales [O, 1] of the rows."""
    codes, scales, of_weight = in_blocks(weight, (1, weight.shape[1]))
    return {"weight": codes, "weight_scale": scales}, of_weight


def in_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(len(weight)) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[rows == i][:, columns == j].abs().max() / 448
    whole = scales[rows][:, columns]
    codes = (weight / whole).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * whole


def fp8(weight: Tensor) -> Written:
    codes, scales, of_weight = in_blocks(weight, (GROUP, GROUP))
    return {"weight": codes, "weight_scale_inv": scales}, of_weight


def awq(weight: Tensor) -> Written:
    codes, scales, zero = integers(weight, 4, GROUP, zeros=True)
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    tensors = {
        "qweight": packed(codes.T, 4, places),
        "qzeros": packed(zero.T, 4, places),
        "scales": scales.T.contiguous(),
    }
    return tensors, values(codes, scales, zero, torch.arange(weight.shape[1]) // GROUP)


def gptq(bits: int, *, zeros: bool, ordered: bool = False, second: bool = False) -> Form:
    def write(weight: Tensor) -> Written:
        groups = torch.arange(weight.shape[1]) // GROUP
        if ordered:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(3))]
        by_group = groups.argsort(stable=True)
        codes, scales, zero = integers(weight[:, by_group], bits, GROUP, zeros)
        codes = codes[:, by_group.argsort()]
        tensors = {
            "qweight": packed(codes.T.contiguous().T, bits).T.contiguous(),
            "qzeros": packed((zero if second else zero - 1).T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": groups.int(),
        }
        return tensors, values(codes, scales, zero, groups)

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered,
        "sym": not zeros, "checkpoint_format": "gptq_v2" if second else "gptq",
    }  # fmt: skip
    return Form(config, write, head=second, dtype="float16")


def compressed(stored: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "strategy": "group", **weights}}
    return {
        "quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group},
        "quantization_status": "compressed", "ignore": ["lm_head"],
    }  # fmt: skip


_FLOAT = {"type": "float", "num_bits": 8}

FORMS: dict[str, Form] = {
    "pack-quantized, 4 bits": pack_quantized(4),
    "pack-quantized, 4 bits, zeros": pack_quantized(4, zeros=True),
    "pack-quantized, 4 bits, ordered": pack_quantized(4, ordered=True),
    "pack-quantized, 8 bits, channels": pack_quantized(8, group=-1),
    "pack-quantized, 8 bits, zeros": pack_quantized(8, zeros=True),
    "int-quantized": Form(compressed("int-quantized", num_bits=8), int_quantized),
    "float-quantized": Form(
        compressed("float-quantized", **_FLOAT, strategy="tensor"), float_quantized(None)
    ),
    "float-quantized, channels": Form(
        compressed("float-quantized", **_FLOAT, strategy="channel"), float_channels
    ),
    "naive-quantized, zeros": Form(
        compressed("naive-quantized", num_bits=8, strategy="channel", symmetric=False),
        naive_quantized,
    ),
    "float-quantized, blocks": Form(
        compressed("float-quantized", **_FLOAT, strategy="block", block_structure=[48, 24]),
        float_quantized((48, 24)),
    ),
    "fp8": Form({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, fp8),
    "awq": Form(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        awq,
        dtype="float16",
    ),
    "gptq, 4 bits": gptq(4, zeros=False),
    "gptq, 4 bits, zeros, ordered": gptq(4, zeros=True, ordered=True),
    "gptq, 8 bits, second": gptq(8, zeros=True, second=True),
}  # fmt: skip


@cache
def write(name: str, *, lively: bool = False) -> tuple[Path, Path]:
    """Write a checkpoint of a form and its dequantised twin; return both directories.

    Weights are those of `tests.lifelike` if `lively`.
    """
    form, root = FORMS[name], models_root() / f"quantised-{name}-{lively}"
    plain = make(
        "qwen3", root / "plain", hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    weights = lifelike(plain) if lively else plain
    stored = {key: value.float() for key, value in load_file(weights / "model.safetensors").items()}
    quantised: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for tensor, value in stored.items():
        module, _, _ = tensor.rpartition(".")
        if module.endswith(LAST) or (form.head and module == "lm_head"):
            parts, dense[tensor] = form.write(value)
            quantised |= {f"{module}.{last}": part.contiguous() for last, part in parts.items()}
        else:
            dense[tensor] = quantised[tensor] = value
    save_file(dense, plain / "model.safetensors", {"format": "pt"})
    directory = root / "quantised"
    directory.mkdir()
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    save_file(quantised, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config |= {"quantization_config": form.config, "dtype": form.dtype}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, plain
