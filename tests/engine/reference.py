"""Reference results of plain transformers, to compare engines with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from tests.equality.reference import endless, model_of
from tests.equality.reference import rows_of as from_table


def look_up(directory: Path, ids: Sequence[int]) -> Tensor:
    """Embeddings (len(ids), hidden) from the model's own table, float32."""
    return from_table(directory, list(ids))


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
                torch.frombuffer(bytearray(segment.data.view), dtype=torch.float32).view(
                    segment.shape
                )
            )
    return torch.cat(parts)[None]


_longest: dict[tuple[Path, bytes], list[int]] = {}
"""The longest output of a model for a prompt so far: what is shorter begins it."""


def greedy(directory: Path, prompt: Prompt, max_tokens: int) -> list[int]:
    """`max_tokens` greedy tokens of `transformers.generate`; end tokens do not end it.

    A model in a directory does not change: many tests ask for the same output.
    """
    embeds = embedded(directory, prompt)
    key = directory, embeds.numpy().tobytes()
    if len(_longest.get(key, ())) < max_tokens:
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64)
        _longest[key] = _generated(directory, max_tokens, inputs_embeds=embeds, attention_mask=mask)
    return _longest[key][:max_tokens]


def greedy_ids(directory: Path, ids: Sequence[int], max_tokens: int) -> list[int]:
    """The same, from token ids: for models that read more of them than their embeddings."""
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    return _generated(directory, max_tokens, input_ids=prompt, attention_mask=mask)


def _generated(directory: Path, max_tokens: int, **inputs: Tensor) -> list[int]:
    output: list[int] = endless(model_of(directory), max_tokens, **inputs)[0].tolist()
    output = output[inputs["input_ids"].shape[1] if "input_ids" in inputs else 0 :]
    if len(output) != max_tokens:
        raise AssertionError(f"transformers generated {len(output)} of {max_tokens} tokens")
    return output
