"""What plain transformers says: the truth every engine is held against."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from inlay.prompt import Buffer, Prompt, Rows, Tokens


@cache
def model(directory: Path) -> Any:
    """The model in float32, as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def look_up(directory: Path, ids: Sequence[int]) -> Tensor:
    """Embeddings (len(ids), hidden) from the model's own table, float32."""
    with torch.no_grad():
        found: Tensor = model(directory).get_input_embeddings()(torch.tensor(list(ids)))
    return found


def rows_of(values: Tensor, *, atomic: bool = False) -> Rows:
    """A float32 tensor (num, hidden) as rows."""
    data = values.detach().to(torch.float32).contiguous().numpy().tobytes()
    return Rows(Buffer(data), "float32", (values.shape[0], values.shape[1]), atomic=atomic)


def embedded(directory: Path, prompt: Prompt) -> Tensor:
    """The prompt as embeddings (1, positions, hidden)."""
    parts: list[Tensor] = []
    for segment in prompt.segments:
        if isinstance(segment, Tokens):
            parts.append(look_up(directory, segment.ids))
        elif isinstance(segment, Rows):
            parts.append(
                torch.frombuffer(bytearray(segment.data.view), dtype=torch.float32).view(segment.shape)
            )
    return torch.cat(parts)[None]


def greedy(directory: Path, prompt: Prompt, max_tokens: int) -> list[int]:
    """`max_tokens` greedy tokens of `transformers.generate`; end tokens do not end it."""
    embeds = embedded(directory, prompt)
    config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=None
    )
    reference = model(directory)
    # What the checkpoint says of ending would be merged into the configuration given.
    own, reference.generation_config = reference.generation_config, GenerationConfig(pad_token_id=0)
    try:
        with torch.no_grad():
            output: list[int] = reference.generate(
                inputs_embeds=embeds,
                attention_mask=torch.ones(embeds.shape[:2], dtype=torch.int64),
                generation_config=config,
            )[0].tolist()
    finally:
        reference.generation_config = own
    if len(output) != max_tokens:
        raise AssertionError(f"transformers generated {len(output)} of {max_tokens} tokens")
    return output
