"""Truncation of prompts."""

from collections.abc import Iterator

from inlay.api.schema.generation import GenerationRequest
from inlay.errors import InvalidRequestError
from inlay.prompt import Media, Prompt, Rows, split_point
from inlay.render import Side


def kept_positions(keep: int | None, limit: int, max_tokens: int | None) -> int | None:
    """Return the positions of each prompt that `truncate_prompt_tokens` keeps, or None for all.

    Args:
        keep: value of that field.
        limit: maximum positions of the model.
        max_tokens: output tokens for which -1 leaves room; None leaves room for one.

    Raises:
        InvalidRequestError: 0, below -1, or more than `limit`.
    """
    if keep is None:
        return None
    if keep < -1 or keep == 0 or keep > limit:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to {limit}, got {keep}",
            param="truncate_prompt_tokens",
        )
    if keep < 0:
        return max(1, limit - (1 if max_tokens is None else max_tokens))
    return keep


def cut_off(request: GenerationRequest) -> Side:
    """Return the side of a prompt that `request` cuts off."""
    return request.truncation_side or "left"


def truncated(prompt: Prompt, keep: int | None, side: Side) -> Prompt:
    """Return a truncated prompt, which shares the memory of `prompt`.

    Atomic segments, and images with the tokens inside them, are kept whole or dropped.

    Args:
        prompt: the prompt, or its kept end.
        keep: maximum positions, or None for all.
        side: the side that is cut off.

    Raises:
        InvalidRequestError: nothing is left.
    """
    if keep is None:
        return prompt
    length = len(prompt)
    if length <= keep:
        return prompt
    bounds = list(_whole_bounds(prompt))
    if side == "right":
        kept = prompt.slice(0, split_point(bounds, keep))
    else:
        start = length - keep
        if split_point(bounds, start) != start:
            start = next(stop for first, stop in bounds if first < start < stop)
        kept = prompt.slice(start, length)
    if not len(kept):
        raise InvalidRequestError(
            f"truncate_prompt_tokens leaves nothing of the prompt: {keep} positions do not hold "
            "its images, or its embeddings that may not be split",
            param="truncate_prompt_tokens",
        )
    return kept


def _whole_bounds(prompt: Prompt) -> Iterator[tuple[int, int]]:
    """Yield the (first, past-last) position of each image and each atomic segment."""
    first = 0
    for position, segment in prompt.spans(0, len(prompt)):
        stop = position + len(segment)
        if isinstance(segment, Media):
            if segment.start == 0:
                first = position
            if segment.start + len(segment) == segment.total:
                yield first, stop
        elif isinstance(segment, Rows) and segment.atomic:
            yield position, stop
