"""Layers and steps over which a kernel for pages is held against gathered pages."""

from typing import Any

import torch

from inlay.engine.torch.attention.cuda import CudaAttention
from inlay.engine.torch.attention.gathered import GatheredAttention
from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.batch import Batch, BatchItem, Workspace
from inlay.engine.torch.cache.kv_layout import PageGroup
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.windows import Chunk, Window
from inlay.messages.prompt import Tokens
from tests.engine.torch import cuda_kernel

LAYERS: dict[str, dict[str, Any]] = {
    "as it comes": {"size": 64, "heads": 2, "group": 2},
    "heads smaller than a tile": {"size": 16, "heads": 1, "group": 3},
    "heads that are no power of two": {"size": 80, "heads": 1, "group": 5, "page": 48},
    "values of another size": {"size": 48, "value_size": 32, "heads": 2, "group": 2},
    "a window": {"size": 64, "heads": 2, "group": 2, "window": 20},
    "a chunk": {"size": 64, "heads": 2, "group": 2, "window": Chunk(20)},
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


def compare(dtype: str, device: str = "cpu") -> None:
    """Hold the kernel against gathered pages, which have NaN where nothing has been written."""
    from inlay.engine.torch.attention.triton_kernels import attend

    kernels = cuda_kernel.KERNELS._replace(attend=attend)

    for name, layer in LAYERS.items():
        scene = Scene(getattr(torch, dtype), torch.device(device), **layer)
        for spans in STEPS[:1] if "wholes" in layer else STEPS:
            batch, query, key, value = scene.step(spans)
            gathered = GatheredAttention(batch, scene.pages, Workspace(), float32_scores=True)
            expected = gathered.attend(0, query, key, value, scene.scoring)
            paged = CudaAttention(batch, scene.pages, kernels)
            found = paged.attend(0, query, key, value, scene.scoring)
            bound = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
            error = float((found - expected).abs().max())
            assert error <= bound, (name, spans, error)


class Scene:
    """Pages of one layer, and steps of three sequences over them."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        size: int,
        heads: int,
        group: int,
        value_size: int | None = None,
        page: int = 16,
        window: Window = None,
        softcap: float | None = None,
        sinks: bool = False,
        latent: bool = False,
        wholes: tuple[tuple[int, int, int], ...] = (),
    ) -> None:

        value_size = size if value_size is None else value_size
        self._shape = LayerShape(window, heads, size, value_size, latent)
        self.pages = Pages(
            [self._shape],
            [PageGroup(window, (0,))],
            num_pages=40,
            page_size=page,
            dtype=dtype,
            device=device,
        )
        for tensor in (*self.pages.keys, *self.pages.values):
            tensor[:, 1:] = torch.nan
        self._generator = torch.Generator().manual_seed(1)
        taken = torch.randperm(39, generator=self._generator).add(1).view(3, 13)
        self._runs = [PageRun(tuple(ids.tolist())) for ids in taken]
        own = torch.randn(heads * group, generator=self._generator).to(device) if sinks else None
        self.scoring = Scoring(size**-0.5, window, softcap, own)
        self._wholes, self._group = wholes, group
        self._dtype, self._device = dtype, device

    def step(self, spans: list[tuple[int, int]]) -> tuple[Any, ...]:
        """Batch, query, key and value of the given positions."""

        batch = (
            Batch.pack(
                [
                    BatchItem([(start, Tokens([0] * count))], start, count, [run], 1)
                    for (start, count), run in zip(spans, self._runs, strict=True)
                ],
                self.pages.page_size,
            )
            .to(self._device)
            ._replace(atomic_spans=self._wholes)
        )
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
        return batch, *(tensor.to(self._device, self._dtype) for tensor in (query, key, value))
