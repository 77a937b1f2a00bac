"""The answers of a model to the rows that attackers read, beside those to the table's own rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from inlay_audit.interval import Share, shares
from inlay_audit.prompts import AuditPrompt, Floats

Ask: TypeAlias = Callable[[Sequence[Floats]], Sequence[str]]
"""Greedy answers to (m, h) rows of each prompt.

Raises:
    InvalidRequestError: the model takes no such rows.
"""

Diverge: TypeAlias = Callable[[Sequence[Floats], Sequence[Floats]], float]
"""Divergence of the answers to some rows from those to others, each (m, h) of every prompt.

The distributions are compared over the tokens of the others' greedy answers, in nats a token.
"""


@dataclass(frozen=True)
class Answers:
    """Shares of prompts.

    Attributes:
        same: whose answer is that to the table's own rows.
        right: whose answer is right, of those whose right answer is known.
        divergence: mean Kullback-Leibler divergence from the distributions of the answers to the
            table's own rows, over their tokens, in nats; None where no distributions are known.
    """

    same: Share
    right: Share
    divergence: float | None = None


def compared(
    answers: Sequence[str],
    clean: Sequence[str],
    prompts: Sequence[AuditPrompt],
    divergence: float | None = None,
) -> Answers:
    """Shares of answers that are the same and right."""
    counts = np.zeros((len(prompts), 2, 2))
    for index, (mine, other, prompt) in enumerate(zip(answers, clean, prompts, strict=True)):
        counts[index, 0] = mine == other, 1
        if prompt.answer is not None:
            counts[index, 1] = mine.strip() == prompt.answer.strip(), 1
    same, right = shares(counts)
    return Answers(same, right, divergence)
