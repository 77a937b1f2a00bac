"""Thinking budgets: tokens spent by each output, and the ids that end its thinking."""

from collections.abc import Mapping, Set
from collections.abc import Sequence as Run

import torch
from torch import Tensor

from inlay.engine.torch.sequence import Sequence
from inlay.messages.request import ThinkingBudget


class ThinkingBudgets:
    """Thinking tokens spent by each sequence, kept until `forget`."""

    def __init__(self) -> None:
        self._kept: dict[int, ThinkingProgress] = {}

    def forced(self, sequences: Run[Sequence]) -> dict[int, int]:
        """Return the id that must come next for each index whose budget is spent."""
        forced: dict[int, int] = {}
        for place, sequence in enumerate(sequences):
            budget = sequence.sampling.thinking
            if budget is None:
                continue
            thinking = self._kept.get(id(sequence))
            if thinking is None:
                thinking = self._kept[id(sequence)] = ThinkingProgress(sequence, budget)
            id_ = thinking.forced()
            if id_ is not None:
                forced[place] = id_
        return forced

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of `sequence`, if any."""
        self._kept.pop(id(sequence), None)

    def kept(self) -> Set[int]:
        """The `id()` of each sequence with stored state."""
        return self._kept.keys()


class ThinkingProgress:
    """Follows one output. Depends on the budget and the ids only, not on the steps they came in.

    Attributes:
        sequence: the sequence; held so that its `id()` is not reused while this exists.
    """

    __slots__ = ("_budget", "_seen", "_spent", "sequence")

    def __init__(self, sequence: Sequence, budget: ThinkingBudget) -> None:
        self.sequence = sequence
        self._budget = budget
        self._spent = budget.spent
        self._seen = 0

    def forced(self) -> int | None:
        """Return the id that must come next, or None if any may.

        Only new output ids are read.
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
        # Continue an end tag that has already begun; its ids were counted on arrival.
        begun = next(
            size
            for size in range(len(budget.end) - 1, -1, -1)
            if _ends_with(output, len(output), budget.end[:size])
        )
        return budget.end[begun]


def only(logits_SV: Tensor, ids: Mapping[int, int]) -> Tensor:
    """Return a copy in which each row of `ids` allows its one id only."""
    left_SV = logits_SV.clone()
    for row, id_ in ids.items():
        left_SV[row] = -torch.inf
        left_SV[row, id_] = 0.0
    return left_SV


def _ends_with(output: Run[int], length: int, run: tuple[int, ...]) -> bool:
    """Return True if the first `length` ids end with `run`."""
    return length >= len(run) and tuple(output[length - len(run) : length]) == run
