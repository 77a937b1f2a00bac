"""Thinking budgets: tokens spent by each output, and the ids that end its thinking."""

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import torch
from torch import Tensor

from inlay.request import Sampling, ThinkingBudget


class Thoughtful(Protocol):
    """A sequence as thinking budgets see it."""

    @property
    def sampling(self) -> Sampling:
        """Its sampling parameters."""
        ...

    @property
    def output(self) -> Sequence[int]:
        """Ids so far, resumed ones included; it only grows."""
        ...


class Thoughts:
    """Tokens that sequences have spent of their thinking budgets, kept until `forget`."""

    def __init__(self) -> None:
        self._kept: dict[int, Thinking] = {}

    def forced(self, sequences: Sequence[Thoughtful]) -> dict[int, int]:
        """The id that must come next, by place in `sequences`, for those whose budget is spent."""
        forced: dict[int, int] = {}
        for place, sequence in enumerate(sequences):
            budget = sequence.sampling.thinking
            if budget is None:
                continue
            thinking = self._kept.get(id(sequence))
            if thinking is None:
                thinking = self._kept[id(sequence)] = Thinking(sequence, budget)
            id_ = thinking.forced()
            if id_ is not None:
                forced[place] = id_
        return forced

    def forget(self, sequence: Thoughtful) -> None:
        """Drop what was kept for `sequence`; nothing happens when nothing was."""
        self._kept.pop(id(sequence), None)

    def kept(self) -> Set[int]:
        """The `id()` of each sequence something is kept for."""
        return self._kept.keys()


class Thinking:
    """Follows one output. A function of the budget and the ids alone, however they came.

    Attributes:
        sequence: whose; held so that its `id()` is not used again while this is kept.
    """

    __slots__ = ("_budget", "_seen", "_spent", "sequence")

    def __init__(self, sequence: Thoughtful, budget: ThinkingBudget) -> None:
        self.sequence = sequence
        self._budget = budget
        self._spent = budget.spent
        self._seen = 0

    def forced(self) -> int | None:
        """The id that must come next, or None where any may.

        Costs are those of what is new in the output.
        """
        budget, output = self._budget, self.sequence.output
        for length in range(self._seen + 1, len(output) + 1):
            if self._spent is None:
                if _ends_with(output, length, budget.start):
                    self._spent = 0
            elif _ends_with(output, length, budget.end):
                self._spent = None
            else:
                self._spent += 1
        self._seen = len(output)
        if self._spent is None or self._spent < budget.tokens:
            return None
        # What of the end tag is there already goes on; its ids were counted as they came.
        begun = next(
            size
            for size in range(len(budget.end) - 1, -1, -1)
            if _ends_with(output, len(output), budget.end[:size])
        )
        return budget.end[begun]


def only(logits_SV: Tensor, ids: Mapping[int, int]) -> Tensor:
    """A copy in which the rows of `ids` leave nothing to choose from but theirs."""
    left_SV = logits_SV.clone()
    for row, id_ in ids.items():
        left_SV[row] = -torch.inf
        left_SV[row, id_] = 0.0
    return left_SV


def _ends_with(output: Sequence[int], length: int, run: tuple[int, ...]) -> bool:
    """Return True if the first `length` ids end with `run`."""
    return length >= len(run) and tuple(output[length - len(run) : length]) == run


__all__ = ["Thinking", "Thoughtful", "Thoughts", "only"]
