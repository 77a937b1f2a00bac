"""From a `Prompt` to vLLM's input.

A prompt with rows always goes in vLLM's mixed form, even where it is rows alone: a row's place then
holds an id of its own. In the form for embeddings alone, vLLM leaves what the last request of that
batch slot had put there, and penalties read it.
"""

from typing import Any

import torch
from vllm.inputs.engine import embeds_input, tokens_input

from inlay.messages.prompt import Prompt, Rows, Tokens
from inlay.messages.request import Request


def input_of(request: Request, placeholder: int) -> Any:
    """VLLM's engine input for the prompt and the earlier output of `request`, as `engine_input`."""
    return engine_input(
        request.prompt + Prompt.of(Tokens(request.prior_output)), request.salt, placeholder
    )


def engine_input(prompt: Prompt, salt: str | None, placeholder: int) -> Any:
    """VLLM's engine input. Rows are copied: nothing refers to them afterwards.

    Args:
        prompt: checked.
        salt: separates prefix caches.
        placeholder: the id that stands in the place of a row.
    """
    if not prompt.has_rows:
        return tokens_input(list(prompt.token_ids()), cache_salt=salt)
    first = next(segment for segment in prompt.segments if isinstance(segment, Rows))
    embeds = torch.zeros(len(prompt), first.shape[1], dtype=getattr(torch, first.dtype))
    ids: list[int] = []
    are_ids: list[bool] = []
    for segment in prompt.segments:
        if isinstance(segment, Tokens):
            ids += segment.ids
            are_ids += [True] * len(segment)
        elif isinstance(segment, Rows):
            values = torch.frombuffer(segment.data.view, dtype=embeds.dtype).view(segment.shape)
            embeds[len(ids) : len(ids) + len(segment)] = values
            ids += [placeholder] * len(segment)
            are_ids += [False] * len(segment)
    return embeds_input(embeds, prompt_token_ids=ids, is_token_ids=are_ids, cache_salt=salt)
