"""Model directories the client's tests need beyond those of `tests.models`.

Scaled embeddings, and huge ones.
"""

import json
import shutil
from pathlib import Path

import torch
from transformers import Gemma2Config, Gemma3TextConfig, PreTrainedModel
from transformers.models.gemma2 import Gemma2ForCausalLM
from transformers.models.gemma3 import Gemma3ForCausalLM

from tests.models import EOS_ID, VOCAB_SIZE, tiny

_GEMMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
    "pad_token_id": 0,
}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def with_tokenizer(directory: Path) -> Path:
    """Give `directory` the tokenizer and chat template of the tiny models."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        shutil.copy(tiny("llama") / name, directory / name)
    return directory


def gemma(version: int, directory: Path, dtype: torch.dtype) -> Path:
    """A tiny Gemma 2 or 3 with random weights.

    Its embeddings are scaled by the root of the hidden size.
    """
    torch.manual_seed(version)
    model: PreTrainedModel = (
        Gemma2ForCausalLM(Gemma2Config(**_GEMMA))
        if version == 2
        else Gemma3ForCausalLM(Gemma3TextConfig(**_GEMMA))
    )
    model.to(dtype).save_pretrained(directory)
    return with_tokenizer(directory)


def sparse_model(directory: Path, *, vocab: int, hidden: int) -> Path:
    """A model whose one weight file is huge and takes no room on disk.

    A bfloat16 table of zeros, and as large a head.
    """
    with_tokenizer(directory)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": hidden, "vocab_size": vocab})
    )
    size = vocab * hidden * 2
    header = json.dumps(
        {
            name: {
                "dtype": "BF16",
                "shape": [vocab, hidden],
                "data_offsets": [index * size, (index + 1) * size],
            }
            for index, name in enumerate(("lm_head.weight", "model.embed_tokens.weight"))
        }
    ).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * size)
    return directory
