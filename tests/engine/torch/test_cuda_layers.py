"""Layers as they are on CUDA: which are fused, that they compute the same, in how many kernels."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inlay.engine.settings import EngineSettings
from inlay.engine.torch import model
from inlay.engine.torch.attention import choice
from inlay.engine.torch.attention.cuda import CudaKernels
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.weights import linear
from inlay.engine.torch.weights.fused import FusedAttention, FusedGated
from inlay.messages.prompt import Tokens
from tests.engine.torch.test_decode_graphs import as_on_cuda
from tests.models import FAMILIES, make, tiny
from tests.omni_models import omni
from tests.vision_models import vision

__all__ = ["as_on_cuda"]

OWN_ATTENTION = {
    "deepseek_v2", "deepseek_v3", "gemma4_text", "llama4_text", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next",
}  # fmt: skip
"""Families whose layers go from a product to attention by operations of torch."""

OWN_UNITS = {"gpt_oss", "mixtral", "phi", "qwen3_moe"}
"""Families whose layers have experts alone, or no gates."""

KERNELS = {
    "gemma": 12, "gemma2": 14, "gemma3_text": 14, "gpt_oss": 36, "llama": 12, "mistral": 12,
    "mixtral": 29, "phi": 20, "phi3": 14, "qwen2": 12, "qwen3": 12, "qwen3_moe": 29,
}  # fmt: skip
"""Launches of a decoding layer: products, norms, sums, and the kernels of `CudaKernels`."""


OF_THREE_AXES: dict[str, Callable[[], Path]] = {
    **{name: partial(vision, name) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
    "qwen2_5_omni": omni,
}
"""Models with positions by time, height and width."""


def load(family: str, *, fused: bool) -> CausalModel:
    directory = OF_THREE_AXES.get(family, partial(tiny, family))()
    settings = EngineSettings.of(
        model=str(directory), device="cpu", num_threads=1, self_check="off"
    )
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(model, "fuse_on_gpu", lambda *_: None)
        return CausalModel.load(settings)


def steps(loaded: CausalModel) -> list[Batch]:
    """A prompt; then the token after it, beside the first one of another."""

    def item(ids: list[int], start: int, page: int) -> BatchItem:
        groups = len(loaded.page_groups)
        runs = [PageRun([page + 2 * group]) for group in range(groups)]
        return BatchItem([(start, Tokens(ids))], start, len(ids), runs, 1)

    prompt, token, other = item([5, 9, 3, 44, 2, 17, 8], 0, 1), item([4], 7, 1), item([6], 0, 2)
    batches = [Batch.pack(items, 16) for items in ([prompt], [token, other])]
    if loaded.rope_axes == 1:
        return batches
    factors = torch.tensor([[1], [2], [5]])
    return [batch._replace(rope=batch.positions * factors) for batch in batches]


@pytest.mark.parametrize("family", [*FAMILIES, *OF_THREE_AXES])
def test_a_fused_layer_computes_what_the_models_own_does(family: str) -> None:
    fused, plain = load(family, fused=True), load(family, fused=False)
    kinds = {type(part) for part in fused._model.modules()}
    assert (FusedAttention in kinds) == (family not in OWN_ATTENTION)
    assert (FusedGated in kinds) == (family not in OWN_UNITS)
    pages = [each.new_pages(2 * len(each.page_groups), 16) for each in (fused, plain)]
    for batch in steps(fused):
        found, expected = (
            each.forward(batch, own) for each, own in zip((fused, plain), pages, strict=True)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "option", "kind"),
    [
        ("llama", {"hidden_act": "relu"}, FusedGated),
        ("phi", {"qk_layernorm": True}, FusedAttention),
    ],
)
def test_activations_and_norms_that_no_kernel_knows_are_left_to_the_model(
    family: str, option: dict[str, Any], kind: type, tmp_path: Path
) -> None:
    directory = make(family, tmp_path / family, **option)
    settings = EngineSettings.of(
        model=str(directory), device="cpu", num_threads=1, self_check="off"
    )
    left = CausalModel.load(settings)
    assert kind not in {type(part) for part in left._model.modules()}


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that compute: no views, and no memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [value.alias_info for value in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in aliases)
        name = func._schema.name
        if not views and "empty" not in name and name != "aten::_unsafe_view":
            self.count += 1
        return func(*args, **(kwargs or {}))


def attend(out: Tensor, *_: Any) -> None:
    """Two launches, as `triton_kernels.attend` of single queries."""
    out.zero_().zero_()


AS_LAUNCHED = CudaKernels(
    attend, lambda query, *_: query.zero_(), lambda gate_up, *, gelu: gate_up.chunk(2, -1)[0] + gelu
)


def launches(family: str, *, fused: bool) -> list[int]:
    """Operators of each layer when two sequences decode."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (choice, model):
            patch.setattr(module, "kernels_on", lambda _: AS_LAUNCHED)
        patch.setattr(linear, "packs", lambda _: False)
        # These kernels launch and compute nothing.
        patch.setattr(ModuleCheck, "agrees", lambda *_, **__: True)
        loaded, found = load(family, fused=fused), list[int]()
        # One kernel on a GPU.
        patch.setattr(linear.RMSNorm, "forward", lambda _, x: x + 1)
        with Launches() as mode:
            for layer in loaded.decoder_layers:
                layer.register_forward_pre_hook(lambda *_: found.append(mode.count))
                layer.register_forward_hook(lambda *_: found.append(mode.count))
            loaded.hidden(steps(loaded)[1], loaded.new_pages(2 * len(loaded.page_groups), 16))
    return [end - start for start, end in list(pairwise(found))[::2]]


@pytest.mark.parametrize("family", KERNELS)
def test_a_decoding_layer_has_no_more_launches_than_this(family: str) -> None:
    before, found = (launches(family, fused=fused) for fused in (False, True))
    assert len(found) > 1
    assert max(found) <= KERNELS[family]
    assert max(found) < min(before) - 10
