"""The torch engine's kernels for CUDA, in Triton's interpreter and through its compiler.

They are tested here because this environment has Triton; no vLLM takes part.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import run
from tests.engine.torch.layer_scenes import LAYERS, Layer

pytestmark = pytest.mark.engines

DEVICE_BYTES = 227 * 1024
"""Shared memory that a program may have on compute capability 9.0."""


@pytest.mark.parametrize(
    ("scenes", "dtype"),
    [
        # The interpreter has no products in bfloat16.
        *(("kernel_scenes", dtype) for dtype in ("float32", "float16")),
        *(("layer_scenes", dtype) for dtype in ("float32", "float16", "bfloat16")),
    ],
)
def test_the_kernels_compute_what_torch_does(scenes: str, dtype: str) -> None:
    # The interpreter has to be chosen before Triton is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    code = f"from tests.engine.torch.{scenes} import compare; compare({dtype!r})"
    run(sys.executable, "-c", code, within=230, env=environment)


MODELS: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "Llama 3.1 8B": ("bfloat16", 128, 128, 4, {}),
    "Gemma 2": ("bfloat16", 256, 256, 2, {"window": 4096, "softcap": 50.0}),
    "gpt-oss": ("bfloat16", 64, 64, 8, {"window": 128, "sinks": torch.zeros(8).bfloat16()}),
    "DeepSeek-V3": ("bfloat16", 576, 512, 128, {}),
    "a model in float32": ("float32", 128, 128, 4, {}),
}
"""dtype, key size, value size, queries for each key head, and what else is scored."""


@pytest.mark.parametrize("model", MODELS)
def test_the_kernels_compile_for_hopper_without_spilling_registers(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from inlay.engine.torch.attention import triton_kernels
    from inlay.engine.torch.attention.cuda import Sequences
    from inlay.engine.torch.attention.paged import Scoring

    launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for name in ("_attend", "_join"):
        kernel = getattr(triton_kernels, name)
        monkeypatch.setattr(triton_kernels, name, _Recorded(kernel, launched))
    name, size, value_size, group, options = MODELS[model]
    dtype = getattr(torch, name)
    keys = torch.zeros(1, 4, 16, size, dtype=dtype)
    values = keys[..., :value_size] if value_size != size else torch.zeros_like(keys)
    lengths = torch.zeros(3, dtype=torch.int32)
    triton_kernels.attend(
        torch.zeros(5, group, value_size, dtype=dtype),
        torch.zeros(group, 5, size, dtype=dtype),
        keys,
        values,
        torch.zeros(2, 8, dtype=torch.int32),
        Sequences(lengths, lengths[:2], 5, single=True, several=True),
        None,
        Scoring(0.1, **options),
    )
    assert len(launched) == 3
    _compile(launched, tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_kernels_of_layers_compile_for_hopper_without_spilling_registers(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from inlay.engine.torch.attention import triton_layers

    launched: list[Any] = []
    for kernel in ("_prepare", "_multiply"):
        recorded = _Recorded(getattr(triton_layers, kernel), launched)
        monkeypatch.setattr(triton_layers, kernel, recorded)
    layer = Layer(getattr(torch, dtype), torch.device("cpu"), **LAYERS[name])
    memory = layer.pages()
    triton_layers.prepare(memory.query, layer.projection, layer.slots, memory.keys, memory.values)
    for gelu in (False, True):
        triton_layers.multiply(memory.query, gelu=gelu)
    assert len(launched) == 3
    _compile(launched, tmp_path)


def _compile(launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]], tmp_path: Path) -> None:
    """Compile launched kernels; no register may be spilled, and shared memory must suffice."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, arguments, given in launched:
        found = triton.compile(
            ASTSource(kernel, *_signature(kernel, arguments, given)),
            target=GPUTarget("cuda", 90, 32),
            options={name: given[name] for name in ("num_warps", "num_stages") if name in given},
        )
        assert found.metadata.shared <= DEVICE_BYTES
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(found.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(tool), "-res-usage", str(cubin)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert " STACK:0 " in usage.stdout + usage.stderr, (given, usage.stdout)


class _Recorded:
    """A kernel that notes its launches."""

    def __init__(self, kernel: Any, launched: list[Any]) -> None:
        self._kernel = kernel
        self._launched = launched

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments, **options: self._launched.append(
            (self._kernel, arguments, options)
        )


def _signature(
    kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """Types, constants and alignment of a launch, as Triton finds them for itself."""
    names = {
        torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
        float: "fp32", int: "i32",
    }  # fmt: skip
    types: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    aligned: dict[tuple[int], Any] = {}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[place] if place < len(arguments) else options[name]
        if place >= len(arguments) or value is None:
            types[name], constants[place,] = "constexpr", value
            continue
        tensor = isinstance(value, torch.Tensor)
        types[name] = f"*{names[value.dtype]}" if tensor else names[type(value)]
        if tensor or (isinstance(value, int) and value % 16 == 0):
            aligned[place,] = [["tt.divisibility", 16]]
    return types, constants, aligned
