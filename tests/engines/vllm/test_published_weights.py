"""Weights that compressed-tensors and vLLM's own packers wrote are read as they read them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inlay.engine.torch.weights.quantised.formats import find
from inlay.engine.torch.weights.quantised.scheme import Scheme
from inlay.tensors.stored import StoredTensor

DTYPES = {
    torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
OUTPUTS, INPUTS, GROUP = 96, 128, 32

pytestmark = pytest.mark.filterwarnings("ignore")
"""vLLM and torch warn as they are imported."""


def read(scheme: Scheme, tensors: dict[str, Tensor]) -> Tensor:
    stored = {
        f"m.{last}": StoredTensor(
            f"m.{last}", Path("x"), DTYPES[part.dtype], tuple(part.shape), 0, 0
        )
        for last, part in tensors.items()
    }
    found = find(scheme, stored)["m.weight"]
    return found.read(lambda name: tensors[name.removeprefix("m.")]).dense()


def weight() -> Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("stored", "options"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ],
)
def test_compressed_tensors_reads_what_it_wrote_as_this_engine_does(
    stored: str, options: dict[str, Any], symmetric: bool
) -> None:
    if options.get("type") == "float" and not symmetric:
        pytest.skip("floats have no zero points")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**options, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    parts = weight().view(OUTPUTS, -1, options.get("group_size", INPUTS))
    scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    given = {"weight": weight(), "weight_scale": scales}
    if not symmetric:
        given["weight_zero_point"] = zeros
    compressor = BaseCompressor.get_value_from_registry(stored)
    written = compressor.compress(given, scheme)
    expected = compressor.decompress(written, scheme)["weight"]
    assert torch.equal(read(Scheme("compressed-tensors"), written), expected.float())


def test_what_vllm_packs_for_awq_is_read() -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        awq_pack,
        quantize_weights,
    )
    from vllm.scalar_type import scalar_types

    expected, codes, scales, zeros = quantize_weights(
        weight().T.contiguous(), scalar_types.uint4, GROUP, zero_points=True
    )
    tensors = {
        "qweight": awq_pack(codes, 4, INPUTS, OUTPUTS),
        "qzeros": awq_pack(zeros, 4, INPUTS // GROUP, OUTPUTS),
        "scales": scales,
    }
    torch.testing.assert_close(read(Scheme("awq", 4, GROUP), tensors), expected.T)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_vllm_packs_for_gptq_is_read(bits: int) -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        gptq_pack,
        pack_cols,
        quantize_weights,
    )
    from vllm.scalar_type import scalar_types

    kind = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}[bits]
    expected, codes, scales, _ = quantize_weights(weight().T.contiguous(), kind, GROUP)
    # Of symmetric codes all zeros are the middle, stored less 1.
    zeros = torch.full((INPUTS // GROUP, OUTPUTS), (1 << (bits - 1)) - 1, dtype=torch.int32)
    tensors = {
        "qweight": gptq_pack(codes, bits, INPUTS, OUTPUTS),
        "qzeros": pack_cols(zeros, bits, INPUTS // GROUP, OUTPUTS),
        "scales": scales,
    }
    scheme = Scheme("gptq", bits, GROUP, zeros_less_one=True)
    torch.testing.assert_close(read(scheme, tensors), expected.T)
