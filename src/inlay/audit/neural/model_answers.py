"""Answers that are computed here, with their distributions. Needs torch."""

from collections.abc import Callable, Sequence

import numpy as np

from inlay.audit.neural.language_model import LanguageModel
from inlay.audit.prompts import Floats


class ModelAnswers:
    """Greedy answers of a model in this process."""

    def __init__(
        self, model: LanguageModel, decode: Callable[[Sequence[int]], str], most: int
    ) -> None:
        self._model = model
        self._decode = decode
        self._most = most
        self._clean: list[list[int]] | None = None

    def __call__(self, rows: Sequence[Floats]) -> list[str]:
        """The answer to each prompt's rows, (m, h), in order."""
        return [self._decode(ids) for ids in self._model.answers(rows, self._most)]

    def divergence(self, rows: Sequence[Floats], own: Sequence[Floats]) -> float:
        """Mean Kullback-Leibler divergence of the answers to `rows` from those to `own`.

        Args:
            rows: (m, h) of each prompt.
            own: (n, h) of the same prompts; their greedy answers say at which tokens distributions
                are compared. They are the same at every call.

        Returns:
            Nats a token.
        """
        if self._clean is None:
            self._clean = self._model.answers(own, self._most)
        wanted = dict(self._model.log_probabilities(own, self._clean))
        found = []
        for index, said in self._model.log_probabilities(rows, self._clean):
            truth = wanted[index]
            found.append((truth.exp() * (truth - said)).sum(dim=-1).numpy())
        return float(np.concatenate(found).mean())
