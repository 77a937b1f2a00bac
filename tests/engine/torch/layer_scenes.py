"""Layers over which kernels for CUDA are held against the operations that they stand for."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from inlay.engine.torch.attention.paged import Projection

LAYERS: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {"size": 128, "heads": 2, "group": 4},
    "Qwen3": {"size": 128, "heads": 1, "group": 5, "normed": True},
    "Gemma 3": {"size": 256, "heads": 1, "group": 2, "normed": True},
    "gpt-oss": {"size": 64, "heads": 1, "group": 8, "halved": True},
    "Phi-2": {"size": 80, "heads": 3, "group": 1, "rotated": 32},
    "Phi-3-mini": {"size": 96, "heads": 3, "group": 1},
    "Phi-4-mini": {"size": 128, "heads": 1, "group": 3, "rotated": 96},
    "norms and a part": {"size": 24, "heads": 1, "group": 3, "rotated": 6, "normed": True},
    "many small heads": {"size": 16, "heads": 7, "group": 5},
}
"""Sizes of heads, how much of them is rotated, and whether cosines are of one half."""

UNITS = [(1, 1, 3), (2, 3, 64), (1, 2, 1500)]
"""Shapes of gates."""


class Prepared(NamedTuple):
    """Queries, and keys and values in pages."""

    query: Tensor
    keys: Tensor
    values: Tensor


class Layer:
    """What a product gives of five positions, of which `stored` are no padding."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        size: int,
        heads: int,
        group: int,
        rotated: int | None = None,
        normed: bool = False,
        halved: bool = False,
        stored: int = 3,
    ) -> None:
        rotated = size if rotated is None else rotated
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.heads, self.size = heads, size
        angles = random(2, 5, rotated // 2)
        cosine, sine = angles if halved else torch.cat((angles, angles), -1)
        norms = (random(size), random(size).float()) if normed else None
        product = random(5, (group + 2) * heads * size)
        self.projection = Projection(product, cosine, sine, norms, 1e-6, group * heads, rotated)
        self.slots = torch.randperm(48, generator=generator)[1 : 1 + stored].to(device)

    def pages(self) -> Prepared:
        """Memory without results."""
        product = self.projection.heads
        shape = self.heads, 3, 16, self.size
        pages = (product.new_full(shape, 7.0) for _ in range(2))
        return Prepared(product.new_empty(5, self.projection.query_heads, self.size), *pages)

    def expected(self) -> Prepared:
        """What transformers computes in float32, and `Pages.write` stores."""
        given, dtype = self.projection, self.projection.heads.dtype
        states = given.heads.view(5, -1, self.size).transpose(0, 1).float()
        query, key, value = states.tensor_split([given.query_heads, given.query_heads + self.heads])
        if given.norms is not None:
            query, key = (
                F.rms_norm(part, (self.size,), norm.float(), given.eps)
                for part, norm in zip((query, key), given.norms, strict=True)
            )
        cosine, sine = (
            torch.cat((angles, angles), -1) if angles.shape[1] < given.rotated else angles
            for angles in (given.cosine.float(), given.sine.float())
        )
        query, key = apply_rotary_pos_emb(query[None], key[None], cosine[None], sine[None])
        found = self.pages()
        for pages, new in ((found.keys, key[0]), (found.values, value)):
            count = len(self.slots)
            pages.flatten(1, 2).index_copy_(1, self.slots, new[:, :count].to(dtype))
        return found._replace(query=query[0].transpose(0, 1).to(dtype))


def compare(dtype: str, device: str = "cpu") -> None:
    """Hold the kernels against operations in float32 that round once."""
    from inlay.engine.torch.attention.triton_layers import multiply, prepare

    kind, on = getattr(torch, dtype), torch.device(device)
    bound = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    for name, options in LAYERS.items():
        for stored in (1, 3, 5):
            layer = Layer(kind, on, **options, stored=stored)
            found = layer.pages()
            prepare(found.query, layer.projection, layer.slots, found.keys, found.values)
            for got, want in zip(found, layer.expected(), strict=True):
                assert torch.allclose(got, want, atol=bound, rtol=bound), (name, stored)
            assert torch.equal(found.values, layer.expected().values), name
        # What is not finite stays in its position.
        layer.projection.heads[2] = torch.nan
        prepare(found.query, layer.projection, layer.slots, found.keys, found.values)
        assert found.query.isfinite().all((1, 2)).tolist() == [True, True, False, True, True], name
    for gelu, function in ((False, ACT2FN["silu"]), (True, ACT2FN["gelu_pytorch_tanh"])):
        for *rows, size in UNITS:
            both = (5 * torch.randn(*rows, 2 * size)).to(on, kind)
            gate, up = both.float().chunk(2, -1)
            got, want = multiply(both, gelu=gelu), (function(gate) * up).to(kind)
            torch.testing.assert_close(got, want, atol=bound, rtol=bound)
        assert multiply(both[:0], gelu=gelu).shape == (0, *both.shape[1:-1], size)
    with FakeTensorMode():
        assert multiply(torch.empty(2, 64), gelu=False).shape == (2, 32)
