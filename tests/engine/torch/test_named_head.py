"""The head for some ids in float32, as the engine has loaded it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from inlay.engine.torch.weights.division import NamedHead, head_of
from tests.engine.torch.test_gguf_blocks import load
from tests.models import VOCAB_SIZE, tiny

IDS = torch.tensor([3, 70, 12, VOCAB_SIZE - 1])


def expected(family: str, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' head of the rounded weights, in float32."""
    path = tiny(family, "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        logits: torch.Tensor = head_of(model.float())(inputs_embeds=hidden.float()[None]).logits[0]
    return logits[:, IDS]


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "mixtral", "phi", "qwen3", "gemma2", "deepseek_v3"]
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_named_logits_of_a_loaded_model_are_those_of_its_head_in_float32(
    family: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr("inlay.engine.torch.weights.linear.packs", lambda dtype: False)
    model = load(tiny(family, "bfloat16"), dtype="bfloat16")
    assert model.named_head is not None
    hidden = torch.randn(5, model.hidden_size, generator=torch.Generator().manual_seed(1))
    hidden = hidden.to(torch.bfloat16)
    got = model.named_head.logits(hidden, IDS)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected(family, hidden), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_named_logits_of_transformers_own_head_are_the_same(family: str) -> None:
    path = tiny(family, "bfloat16")
    head = NamedHead.of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval())
    assert head is not None
    hidden = torch.randn(5, head._head.config.hidden_size).to(torch.bfloat16)
    torch.testing.assert_close(
        head.logits(hidden, IDS), expected(family, hidden), atol=1e-5, rtol=1e-5
    )
