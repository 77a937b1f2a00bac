"""Reads of the options' probabilities, and the answers made of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from inlay.api.openai.schema.decisions import (
    Answer,
    ChoiceAnswer,
    ChoiceProbability,
    ChoiceQuestion,
    PredicateAnswer,
    PredicateQuestion,
    Question,
    ScoreAnswer,
    ScoreProbability,
)
from inlay.messages.prompt import Prompt


class Read(NamedTuple):
    """A prompt behind which the logprobs of some labels are read.

    Attributes:
        question: index of the question.
        prompt: state and question.
        ids: tokens of labels.
        options: their options, by index.
        first: this is the first read of its prompt.
    """

    question: int
    prompt: Prompt
    ids: tuple[int, ...]
    options: tuple[int, ...]
    first: bool


@dataclass
class Found:
    """Logprobs of one question, in one or both orders.

    Attributes:
        logprobs: of each option in each order, over the whole vocabulary.
    """

    logprobs: list[dict[int, float]] = field(default_factory=list)

    def take(self, read: Read, logprobs: Sequence[float]) -> None:
        """Take the logprobs of a read, one for each of its ids."""
        if read.first:
            self.logprobs.append({})
        self.logprobs[-1].update(zip(read.options, logprobs, strict=True))

    def shares(self) -> tuple[list[float], float]:
        """Return the probability of each option among them, and of all together; means of orders.

        p_i = exp(l_i) / sum exp(l_j), and the mass is sum exp(l_j).
        """
        orders = [[one[option] for option in sorted(one)] for one in self.logprobs]
        sums = [_softmax(logprobs) for logprobs in orders]
        mass = sum(sum(map(math.exp, logprobs)) for logprobs in orders) / len(orders)
        return [math.fsum(values) / len(orders) for values in zip(*sums, strict=True)], mass


def _softmax(logprobs: Sequence[float]) -> list[float]:
    top = max(logprobs)
    weights = [math.exp(value - top) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def answer_of(question: Question, shares: Sequence[float], mass: float) -> Answer:
    """Return the answer to a question from the probability of each option."""
    name = None if question.name is msgspec.UNSET else question.name
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(name, shares[1], mass)
    best = max(range(len(shares)), key=shares.__getitem__)
    confidence = shares[best] * mass
    if isinstance(question, ChoiceQuestion):
        told = [
            ChoiceProbability(one.value, share)
            for one, share in zip(question.choices, shares, strict=True)
        ]
        return ChoiceAnswer(name, question.choices[best].value, confidence, told, mass)
    levels = [
        ScoreProbability(index, level.label, share)
        for index, (level, share) in enumerate(zip(question.levels, shares, strict=True))
    ]
    score = math.fsum(index * share for index, share in enumerate(shares))
    return ScoreAnswer(name, score, confidence, levels, mass)
