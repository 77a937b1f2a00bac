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

pytestmark = pytest.mark.engines

DEVICE_BYTES = 227 * 1024
"""Shared memory that a program may have on compute capability 9.0."""

LAYERS: dict[str, dict[str, Any]] = {
    "as it comes": {"size": 64, "heads": 2, "group": 2},
    "heads smaller than a tile": {"size": 16, "heads": 1, "group": 3},
    "heads that are no power of two": {"size": 80, "heads": 1, "group": 5, "page": 48},
    "values of another size": {"size": 48, "value_size": 32, "heads": 2, "group": 2},
    "a window": {"size": 64, "heads": 2, "group": 2, "window": 20},
    "a soft cap": {"size": 64, "heads": 1, "group": 4, "softcap": 30.0},
    "sinks": {"size": 64, "heads": 1, "group": 4, "sinks": True},
    "sinks in a window": {"size": 64, "heads": 1, "group": 4, "sinks": True, "window": 7},
    "latents": {"size": 24, "value_size": 16, "heads": 1, "group": 40, "latent": True},
    "an image": {"size": 64, "heads": 1, "group": 2, "wholes": ((0, 3, 20), (1, 0, 4))},
    "an image in a window": {
        "size": 64, "heads": 1, "group": 2, "window": 9, "wholes": ((0, 3, 20), (1, 0, 4)),
    },
}  # fmt: skip

STEPS = [[(0, 35), (0, 5), (0, 1)], [(35, 1), (5, 40), (1, 1)], [(36, 1), (45, 1), (2, 1)]]
"""First position and number of positions of each sequence, step by step."""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_kernel_attends_as_gathered_pages_do(dtype: str) -> None:
    # The interpreter has to be chosen before Triton is imported; it has no products in bfloat16.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    code = f"from tests.engines.vllm.test_triton_kernels import compare; compare({dtype!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def compare(dtype: str) -> None:
    """Compare both over all `LAYERS`; pages hold NaN where nothing has been written."""
    from inlay.engine.torch.attention.cuda import CudaAttention
    from inlay.engine.torch.attention.gathered import GatheredAttention, Workspace
    from inlay.engine.torch.attention.triton_kernels import attend

    for name, layer in LAYERS.items():
        scene = Scene(getattr(torch, dtype), **layer)
        for spans in STEPS[:1] if "wholes" in layer else STEPS:
            batch, query, key, value = scene.step(spans)
            gathered = GatheredAttention(batch, scene.pages, Workspace(), float32_scores=True)
            expected = gathered.attend(0, query, key, value, scene.scoring)
            paged = CudaAttention(batch, scene.pages, attend)
            found = paged.attend(0, query, key, value, scene.scoring)
            bound = 2e-5 if dtype == "float32" else 5e-3
            error = float((found - expected).abs().max())
            assert error <= bound, (name, spans, error)


class Scene:
    """Pages of one layer, and steps of three sequences over them."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        size: int,
        heads: int,
        group: int,
        value_size: int | None = None,
        page: int = 16,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        latent: bool = False,
        wholes: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        from inlay.engine.torch.attention.layers import LayerShape
        from inlay.engine.torch.attention.paged import Scoring
        from inlay.engine.torch.attention.pages import Pages
        from inlay.engine.torch.cache.kv_layout import PageGroup
        from inlay.engine.torch.cache.table import PageRun

        value_size = size if value_size is None else value_size
        self._shape = LayerShape(window, heads, size, value_size, latent)
        self.pages = Pages(
            [self._shape],
            [PageGroup(window, (0,))],
            num_pages=40,
            page_size=page,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        for tensor in (*self.pages.keys, *self.pages.values):
            tensor[:, 1:] = torch.nan
        self._generator = torch.Generator().manual_seed(1)
        taken = torch.randperm(39, generator=self._generator).add(1).view(3, 13)
        self._runs = [PageRun(tuple(ids.tolist())) for ids in taken]
        own = torch.randn(heads * group, generator=self._generator) if sinks else None
        self.scoring = Scoring(size**-0.5, window, softcap, own)
        self._wholes, self._group, self._dtype = wholes, group, dtype

    def step(self, spans: list[tuple[int, int]]) -> tuple[Any, torch.Tensor, Any, Any]:
        """Batch, query, key and value of the given positions."""
        from inlay.engine.torch.batch import Batch, BatchItem
        from inlay.prompt import Tokens

        batch = Batch.pack(
            [
                BatchItem([(start, Tokens([0] * count))], start, count, [run], 1)
                for (start, count), run in zip(spans, self._runs, strict=True)
            ],
            self.pages.page_size,
        )._replace(wholes=self._wholes)
        shape = self._shape
        query, key, value = (
            torch.randn(heads, len(batch.token_ids), size, generator=self._generator)
            for heads, size in (
                (shape.num_heads * self._group, shape.key_size),
                (shape.num_heads, shape.key_size),
                (shape.num_heads, shape.value_size),
            )
        )
        if shape.latent:
            value = key[..., : shape.value_size]
        return batch, query.to(self._dtype), key.to(self._dtype), value.to(self._dtype)


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
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
        usage = subprocess.run(
            [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
        )
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
        torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", float: "fp32", int: "i32",
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
