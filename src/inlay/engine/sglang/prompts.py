"""From a `Prompt` to what SGLang takes: ids, and the embeddings that stand in the place of some.

SGLang's own `input_embeds` is not used: it casts to bfloat16 whatever the model computes in, is
refused beside a radix cache, and a batch with another's text in it does not fit together. Overrides
of positions keep their dtype, may stand among tokens, and SGLang neither looks for nor keeps the
keys and values of such a prompt in its cache.
"""

from itertools import chain
from typing import Any

import torch
from sglang.srt.managers.embed_types import PositionalEmbeds

from inlay.messages.prompt import Prompt, Rows, Tokens

_PLACEHOLDER = 0
"""The id in the place of a row: SGLang looks every id up before rows are put over them."""


def input_of(prompt: Prompt) -> dict[str, Any]:
    """The arguments of SGLang's request that say the prompt.

    Rows are copied: nothing refers to them afterwards.
    """
    if not prompt.has_rows:
        return {"input_ids": list(prompt.token_ids())}
    ids: list[int] = []
    places: list[range] = []
    parts: list[torch.Tensor] = []
    for segment in prompt.segments:
        if isinstance(segment, Tokens):
            ids += segment.ids
        elif isinstance(segment, Rows):
            places.append(range(len(ids), len(ids) + len(segment)))
            ids += [_PLACEHOLDER] * len(segment)
            values = torch.frombuffer(segment.data.view, dtype=getattr(torch, segment.dtype))
            parts.append(values.view(segment.shape))
    embeds = PositionalEmbeds(embeds=torch.cat(parts), positions=list(chain.from_iterable(places)))
    return {"input_ids": ids, "positional_embed_overrides": embeds}
