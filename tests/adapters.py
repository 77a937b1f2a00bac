"""PEFT adapters with random weights for the tiny models, and what PEFT itself makes of them."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from inlay.messages.prompt import Prompt
from tests.engine.reference import embedded
from tests.equality.reference import endless

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@contextmanager
def _calmly() -> Iterator[None]:
    """PEFT asks transformers for what is deprecated there, and warns of adapters on tied weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def base(model: Path) -> Any:
    """The model itself."""
    return _base(model).eval()


def prompt_rows(adapter: Path) -> Tensor:
    """The rows of a prompt-tuning adapter, (positions, hidden)."""
    rows: Tensor = load_file(adapter / "adapter_model.safetensors")["prompt_embeddings"]
    return rows


def _base(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )


def make_lora(
    directory: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    size: float = 0.7,
    base: Callable[[], Any] | None = None,
    save_embedding_layers: bool | str = "auto",
    **options: Any,
) -> Path:
    """Write a LoRA for `model` whose matrices are random and large enough to change the output.

    `base` loads the model where it is no causal language model; `targets` may be a regex.
    """
    modules = targets if isinstance(targets, str) else list(targets)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=modules, task_type="CAUSAL_LM", **options
    )
    with _calmly():
        adapted = peft.get_peft_model(_base(model) if base is None else base(), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                scale = size / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    with _calmly():
        adapted.save_pretrained(directory, save_embedding_layers=save_embedding_layers)
    return directory


def make_prompt_tuning(directory: Path, model: Path, *, seed: int = 1, count: int = 5) -> Path:
    """Write a prompt-tuning adapter with random rows."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=count)
    with _calmly():
        adapted = peft.get_peft_model(_base(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.prompt_encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    with _calmly():
        adapted.save_pretrained(directory)
    return directory


@cache
def merged(model: Path, adapter: Path) -> Any:
    """PEFT's own merge of a LoRA into the model."""
    return merged_from(partial(_base, model), adapter)


def merged_from(base: Callable[[], Any], adapter: Path) -> Any:
    """PEFT's own merge of a LoRA into what `base` loads."""
    with _calmly():
        return peft.PeftModel.from_pretrained(base(), adapter).merge_and_unload().eval()


@cache
def tuned(model: Path, adapter: Path) -> Any:
    """PEFT's own model with the rows of a prompt-tuning adapter."""
    with _calmly():
        return peft.PeftModel.from_pretrained(_base(model), adapter).eval()


def continued(model: Any, embeds: Tensor, max_tokens: int) -> list[int]:
    """`max_tokens` greedy tokens of `model` after embeddings (1, positions, hidden)."""
    mask = torch.ones(embeds.shape[:2], dtype=torch.int64)
    found = endless(model, max_tokens, inputs_embeds=embeds, attention_mask=mask)
    output: list[int] = found[0].tolist()
    return output


def greedy(model: Path, adapter: Path, prompt: Prompt, max_tokens: int) -> list[int]:
    """What PEFT's merged model says after `prompt`; end tokens do not end it."""
    return continued(merged(model, adapter), embedded(model, prompt), max_tokens)
