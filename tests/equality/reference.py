"""What plain `transformers` answers: the tokens every other way must give."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


@cache
def model_of(path: Path) -> Any:
    """The model in float32, with eager attention."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@cache
def tokenizer_of(path: Path) -> Any:
    """The model's own tokenizer."""
    return AutoTokenizer.from_pretrained(path)


def rows_of(path: Path, ids: list[int]) -> torch.Tensor:
    """The model's own embeddings of `ids`, (len(ids), hidden) float32."""
    with torch.no_grad():
        embedded: torch.Tensor = model_of(path).get_input_embeddings()(torch.tensor(ids))
    return embedded


@torch.no_grad()
def endless(model: Any, max_tokens: int, **inputs: Any) -> Any:
    """Answer of `model.generate`: `max_tokens` greedy tokens, none of which ends it."""
    config = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    # What the checkpoint says of ending would be merged into the configuration given.
    own, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        return model.generate(**inputs, generation_config=config)
    finally:
        model.generation_config = own


@torch.no_grad()
def greedy(path: Path, rows: torch.Tensor, max_tokens: int) -> list[int]:
    """Greedy continuation of (n, hidden) rows by `transformers.generate`.

    An end token is the last.
    """
    generated = model_of(path).generate(
        inputs_embeds=rows[None],
        attention_mask=torch.ones(1, len(rows), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    ids: list[int] = generated[0].tolist()
    return ids
