"""Models vLLM runs on a CPU, and vLLM with them."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.equality.reference import tokenizer_of
from tests.models import add_thinking, make, models_root

FLAGS: dict[str, Any] = {
    "engine": "vllm",
    "block_size": 32,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 8 << 20,
    "enforce_eager": True,
    "num_threads": 1,
    "engine_arguments": ["--enable-prompt-embeds"],
}
"""Settings of a small vLLM.

Its attention on a CPU takes blocks of 32 positions and heads of 32 elements.
"""

_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "qwen3": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


@cache
def model(family: str, dtype: str = "float32") -> Path:
    """A directory with a tiny model of `family`, made once."""
    return make(family, models_root() / f"vllm-{family}-{dtype}", dtype=dtype, **_SHAPES[family])


@cache
def speaking_model() -> Path:
    """A Llama that puts out whole ASCII texts alone, with tags of reasoning.

    What two servers make of broken characters differs.
    """
    directory = add_thinking(
        make("llama", models_root() / "vllm-speaking", dtype="float32", **_SHAPES["llama"])
    )
    tokenizer = tokenizer_of(directory)
    speaking = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for id_, row in enumerate(speaking.lm_head.weight):
            text = tokenizer.decode([id_])
            if id_ in tokenizer.all_special_ids or not (
                text.isascii() and text.isprintable() and text
            ):
                # A logit of about 0: there always are larger ones.
                row.mul_(1e-3)
    speaking.save_pretrained(directory)
    return directory


@cache
def loud_model() -> Path:
    """A Llama in float16 whose layers add hundreds to their input, as large models' do."""
    directory = models_root() / "vllm-loud"
    loud = AutoModelForCausalLM.from_pretrained(model("llama", "float16"), dtype=torch.float16)
    with torch.no_grad():
        for name, parameter in loud.named_parameters():
            if name.endswith("down_proj.weight"):
                parameter.mul_(256)
    loud.save_pretrained(directory)
    tokenizer_of(model("llama", "float16")).save_pretrained(directory)
    return directory
