"""Counts of what was read, prompt by prompt."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inlay_audit.prompts import AuditPrompt, Ids

METRICS = ("tokens", "any-order", "names", "others", "unseen", "exact")
"""Of the user's tokens alone:

- tokens: in their place; in order where the number of rows is another;
- any-order: wherever they stand;
- names, others: entities of which every token was read in its place;
- unseen: tokens that are in no pair that attackers learn from;
- exact: prompts that were read whole.
"""

Counts = npt.NDArray[np.float64]
"""(prompts, metrics, 2): how many were read, of how many."""


def counts_of(prompts: Sequence[AuditPrompt], guesses: Sequence[Ids], seen: Ids) -> Counts:
    """The tokens and entities of prompts that guesses hit."""
    return np.stack(
        [
            _of_prompt(prompt, guess, np.isin(prompt.user, seen))
            for prompt, guess in zip(prompts, guesses, strict=True)
        ]
    )


def _of_prompt(prompt: AuditPrompt, guess: Ids, seen: npt.NDArray[np.bool_]) -> Counts:
    whole = guess == prompt.ids if len(guess) == len(prompt.ids) else _in_order(prompt.ids, guess)
    hits = whole[prompt.start : prompt.stop]
    # The template's tokens, which everybody knows, are no find.
    others = Counter(prompt.ids[: prompt.start].tolist()) + Counter(
        prompt.ids[prompt.stop :].tolist()
    )
    bag = Counter(guess.tolist()) - others
    anywhere = (bag & Counter(prompt.user.tolist())).total()
    spans = {
        name: [
            bool(whole[span.start : span.stop].all()) for span in prompt.spans if span.name == name
        ]
        for name in (True, False)
    }
    return np.array(
        [
            [hits.sum(), len(hits)],
            [max(anywhere, int(hits.sum())), len(hits)],
            [sum(spans[True]), len(spans[True])],
            [sum(spans[False]), len(spans[False])],
            [hits[~seen].sum(), (~seen).sum()],
            [hits.all(), 1],
        ],
        np.float64,
    )


def _in_order(truth: Ids, guess: Ids) -> npt.NDArray[np.bool_]:
    """True at the tokens of a longest common subsequence."""
    lengths = np.zeros((len(truth) + 1, len(guess) + 1), np.uint16)
    for row, token in enumerate(truth):
        same = np.where(guess == token, lengths[row, :-1] + np.uint16(1), lengths[row, 1:])
        lengths[row + 1, 1:] = np.maximum.accumulate(same)
    hits = np.zeros(len(truth), np.bool_)
    row, column = len(truth), len(guess)
    while row and column:
        if lengths[row, column] == lengths[row - 1, column]:
            row -= 1
        elif lengths[row, column] == lengths[row, column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            hits[row] = True
    return hits
