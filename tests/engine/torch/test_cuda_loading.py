"""Loading and sizes on a GPU, as far as they can be tested without one."""

from pathlib import Path

import pytest
import torch
from torch import nn

from inlay.base.errors import EngineError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.attention.paged import IMPLEMENTATION
from inlay.engine.torch.cache import kv_layout
from inlay.engine.torch.loading import largest_step
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.weights import checkpoint
from inlay.engine.torch.weights.linear import _own_norm
from tests.models import tiny

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of a GPU: 80 GiB, of which 15 hold weights and 7 are left over from loading."""
    found = {"free": 58 * GIB, "total": 80 * GIB, "allocated": 15 * GIB, "reserved": 22 * GIB}

    def empty_cache() -> None:
        found["free"] += found["reserved"] - found["allocated"]
        found["reserved"] = found["allocated"]

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (found["free"], found["total"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: found["allocated"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: found["reserved"])
    return found


def share(activations: int = GIB, gpu_memory_utilization: float | None = None) -> int:
    settings = EngineSettings.of(model="m", gpu_memory_utilization=gpu_memory_utilization)
    return kv_layout.share_of_gpu(settings.cache, torch.device("cuda"), activations)


def test_nine_tenths_of_a_gpu_are_for_weights_activations_and_pages(gpu: dict[str, int]) -> None:
    assert share() == 56 * GIB
    assert gpu["reserved"] == gpu["allocated"]
    assert share(gpu_memory_utilization=0.5) == 24 * GIB


def test_what_others_use_is_left_to_them_unless_a_share_was_asked_for(gpu: dict[str, int]) -> None:
    gpu["free"] = 20 * GIB
    assert share() == 26 * GIB
    with pytest.raises(EngineError, match=r"gpu_memory_utilization 0\.9 asks for"):
        share(gpu_memory_utilization=0.9)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_the_largest_step_runs_over_pages_of_its_own(family: str) -> None:
    settings = EngineSettings.of(
        model=str(tiny(family)), device="cpu", num_threads=1, max_num_seqs=3,
        max_num_batched_tokens=40,
    )  # fmt: skip
    model = CausalModel.load(settings)
    batch, pages = largest_step(model, settings)
    assert len(batch.token_ids) == 40
    logits = model.forward(batch, pages)
    assert logits.shape == (3, model.vocab_size)
    assert logits.isfinite().all()


def test_weights_read_straight_to_a_device_are_those_of_the_checkpoint() -> None:
    from transformers import LlamaForCausalLM

    directory = tiny("llama")
    models = [
        checkpoint.load(
            LlamaForCausalLM,
            directory,
            dtype=torch.float32,
            attn_implementation=IMPLEMENTATION,
            device=device,
        )
        for device in (None, torch.device("cpu"))
    ]
    plain, placed = (model.state_dict() for model in models)
    assert plain.keys() == placed.keys()
    assert all(torch.equal(plain[name], placed[name]) for name in plain)
    assert not placed["lm_head.weight"].is_meta


def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checkpoint, "_NVIDIA", tmp_path / "none")
    assert checkpoint.device_of("auto").type == "cpu"
    assert not caplog.records
    monkeypatch.setattr(checkpoint, "_NVIDIA", tmp_path)
    assert checkpoint.device_of("auto").type == "cpu"
    assert "this machine has an NVIDIA GPU, and torch" in caplog.text
    caplog.clear()
    assert checkpoint.device_of("cpu").type == "cpu"
    assert not caplog.records


def test_a_norm_is_torchs_own_only_where_its_weight_stays_the_same() -> None:
    weight = torch.rand(24).bfloat16().float()
    norm = _own_norm(weight, 1e-6, torch.bfloat16)
    assert isinstance(norm, nn.RMSNorm)
    x = torch.randn(5, 24).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    torch.testing.assert_close(norm(x).double(), exact, atol=2e-2, rtol=1e-2)
    assert _own_norm(1 + weight / 300, 1e-6, torch.bfloat16) is None
