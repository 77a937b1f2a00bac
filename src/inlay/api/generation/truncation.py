"""Truncation of prompts."""

from collections.abc import Iterator
from typing import NamedTuple

from inlay.base.errors import InvalidRequestError
from inlay.messages.fields import check_length
from inlay.messages.prompt import Media, Prompt, split_point
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


class Truncation(NamedTuple):
    """Truncation of prompts.

    Attributes:
        limit: maximum positions of the model.
        keep: positions that are kept, or None to refuse longer prompts.
        side: the side that is cut off.
    """

    limit: int
    keep: int | None = None
    side: Side = "right"

    @classmethod
    def of(
        cls, keep: int | None, side: Side, limit: int, max_tokens: int | None = 0
    ) -> "Truncation":
        """Return the truncation of a request. Arguments and errors as `kept_positions`."""
        return cls(limit, kept_positions(keep, limit, max_tokens), side)

    def cut(self, prompt: Prompt) -> Prompt:
        """Return a truncated prompt. Raises as `truncated`."""
        return truncated(prompt, self.keep, self.side)

    def without(self, special: int) -> "Truncation":
        """Return the truncation of a prompt that gets `special` more positions afterwards.

        Raises `InvalidRequestError` if it keeps no others.
        """
        if self.keep is None:
            return self
        if self.keep <= special:
            raise InvalidRequestError(
                f"truncate_prompt_tokens keeps {self.keep} positions, and the special tokens of "
                f"add_special_tokens take {special} of them",
                param="truncate_prompt_tokens",
            )
        return self._replace(keep=self.keep - special)

    def check(self, length: int, param: str) -> None:
        """Raise `ContextLengthError` for a prompt that is too long."""
        says = f"{param} has {length}; truncate_prompt_tokens shortens it"
        check_length(length, self.limit, says=says, param=param)


def truncated(prompt: Prompt, keep: int | None, side: Side) -> Prompt:
    """Return a truncated prompt, which shares the memory of `prompt`.

    Atomic segments are kept whole or dropped, and so is an image outside of what is kept.

    Args:
        prompt: the prompt, or its kept end.
        keep: maximum positions, or None for all.
        side: the side that is cut off.

    Raises:
        InvalidRequestError: the cut is inside an image, or nothing is left.
    """
    if keep is None:
        return prompt
    length = len(prompt)
    if length <= keep:
        return prompt
    cut = keep if side == "right" else length - keep
    for first, stop in _media_bounds(prompt):
        if first < cut < stop:
            less, more = (first, stop) if side == "right" else (length - stop, length - first)
            raise InvalidRequestError(
                f"truncate_prompt_tokens keeps {keep} of {length} positions and so cuts media of "
                f"{stop - first} positions in two; send "
                + (f"at most {less}, which leaves it out, or " if less else "")
                + f"at least {more}, which keeps it",
                param="truncate_prompt_tokens",
            )
    bounds = prompt.atomic_bounds()
    if side == "right":
        kept = prompt.slice(0, split_point(bounds, cut))
    else:
        if split_point(bounds, cut) != cut:
            cut = next(stop for first, stop in bounds if first < cut < stop)
        kept = prompt.slice(cut, length)
    if not len(kept):
        raise InvalidRequestError(
            f"truncate_prompt_tokens leaves nothing of the prompt: {keep} positions do not hold "
            "its embeddings that may not be split",
            param="truncate_prompt_tokens",
        )
    return kept


def _media_bounds(prompt: Prompt) -> Iterator[tuple[int, int]]:
    """Yield the (first, past-last) position of each item of media, tokens inside it included."""
    first = 0
    for position, segment in prompt.spans(0, len(prompt)):
        if isinstance(segment, Media):
            if segment.start == 0:
                first = position
            if segment.start + len(segment) == segment.total:
                yield first, position + len(segment)
