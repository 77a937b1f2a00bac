"""The bound on a model's reasoning."""

from collections.abc import Sequence

import msgspec

from inlay.prompt import Prompt, Tokens


class ThinkingBudget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens that a model may think for, as vLLM's `thinking_token_budget` counts them.

    What stands between `start` and `end` is thinking. Where it has as many tokens as `tokens`, `end` is chosen next,
    whatever else binds the output. Thinking that begins anew has a budget of its own.

    Attributes:
        tokens: at most, the tags not counted.
        start: ids of the tag before it; at least one.
        end: ids of the tag behind it; at least one.
        spent: tokens of a thinking that the prompt has begun and not ended; None where it has not.
    """

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    spent: int | None = None

    def spent_in(self, prompt: Prompt) -> int | None:
        """Positions behind the last start tag of `prompt`; None where no thinking is open there."""
        behind = 0
        for segment in reversed(prompt.segments):
            if isinstance(segment, Tokens):
                start, end = _last(segment.ids, self.start), _last(segment.ids, self.end)
                if start > end:
                    return behind + len(segment) - start - len(self.start)
                if end >= 0:
                    return None
            behind += len(segment)
        return None


def _last(ids: Sequence[int], run: tuple[int, ...]) -> int:
    """Index at which `run` begins for the last time, or -1."""
    ids = tuple(ids)
    backwards, place = ids[::-1], 0
    while True:
        try:
            place = backwards.index(run[-1], place)
        except ValueError:
            return -1
        start = len(ids) - place - len(run)
        if start >= 0 and ids[start : start + len(run)] == run:
            return start
        place += 1


__all__ = ["ThinkingBudget"]
