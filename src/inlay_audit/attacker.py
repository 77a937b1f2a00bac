"""An attacker: guesses the tokens behind rows. Everything that it may know stands in `Known`."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from inlay.base import extras
from inlay.base.errors import InvalidRequestError
from inlay_audit.prompts import AuditPrompt, Floats, Ids, Template

if TYPE_CHECKING:
    from inlay_audit.neural.language_model import LanguageModel

Knows = Literal["nothing", "table", "model", "pairs", "weights"]
"""The needs of an attacker beside the rows: nothing is public text alone; the table is that of
embeddings, with the template and public text; model is the table and the whole model; pairs are
rows of texts that it knows, sent through the same transform; weights are pairs and the whole
model."""

UNPAIRED = ("nothing", "table", "model")
"""Needs without a row of a known text."""

MAX_PAIRS = 16_384
"""Rows of public text that attackers learn from at most."""


class NotApplicableError(Exception):
    """An attacker cannot work on this transform; the message says why."""


class OutOfTimeError(Exception):
    """The time for a transform is over."""


@dataclass(frozen=True)
class Clock:
    """Time for a transform, up to `until` on the performance counter."""

    until: float = math.inf

    def check(self) -> None:
        """Raise `OutOfTimeError` where the time is over."""
        if time.perf_counter() > self.until:
            raise OutOfTimeError


NO_LIMIT = Clock()

Guesses: TypeAlias = Iterable[tuple[int, Ids]]
"""A prompt's index, and the tokens behind its rows in order, template included.

In some order, each as soon as it was read; what comes later for the same prompt is better.
"""


def in_order(guesses: Guesses) -> list[Ids]:
    """The last guess of each prompt, all prompts in order."""
    return [ids for _, ids in sorted(dict(guesses).items(), key=itemgetter(0))]


@dataclass(frozen=True, eq=False)
class SentRows:
    """Rows as they were received, of prompts that are to be read.

    Attributes:
        rows: (m, h) float32 for each prompt.
        resends: the same prompts sent again, each once for every further time.
        clock: asked before each batch of them but the first.
    """

    rows: Sequence[Floats]
    resends: Sequence[Sequence[Floats]] = ()
    clock: Clock = NO_LIMIT


class Pairs(NamedTuple):
    """Rows and the tokens behind them: (N, h) float32 and (N,) int64."""

    rows: Floats
    ids: Ids


@dataclass(frozen=True, eq=False)
class Known:
    """All that attackers know.

    Attributes:
        table: the embedding table, (vocabulary, h), as rows are.
        template: tokens around every user's text.
        public: prompts of the attackers' own.
        sent: rows of `public` through the transform, with the key of the prompts that are to be
            read, unless the transform has a key for each prompt.
        send: sends `public` once more, with new randomness; None where rows were only given.
        model: loads the whole model; None where there is no torch.
        clock: asked at each step of what takes long to learn.
        cached: what several attackers use, made once.
    """

    table: Floats
    template: Template
    public: Sequence[AuditPrompt]
    sent: Sequence[Floats]
    send: Callable[[], Sequence[Floats]] | None = None
    model: "Callable[[], LanguageModel] | None" = None
    clock: Clock = NO_LIMIT
    cached: dict[str, object] = field(default_factory=dict)

    @cached_property
    def keeps_rows(self) -> bool:
        """True if every prompt has as many rows as tokens."""
        return all(
            len(rows) == len(prompt.ids)
            for prompt, rows in zip(self.public, self.sent, strict=True)
        )

    @cached_property
    def pairs(self) -> Pairs:
        """Rows of public text with their tokens, as many as attackers learn from.

        Raises:
            NotApplicableError: which row is of which token is not known.
        """
        if not self.keeps_rows:
            raise NotApplicableError("the number of rows is not that of the tokens")
        count = 0
        rows, ids = [], []
        for prompt, sent in zip(self.public, self.sent, strict=True):
            if count and count + len(sent) > MAX_PAIRS:
                break
            rows.append(sent)
            ids.append(prompt.ids)
            count += len(sent)
        return Pairs(np.concatenate(rows), np.concatenate(ids))

    def language_model(self) -> "LanguageModel":
        """The whole model.

        Raises:
            NotApplicableError: it cannot be had.
        """
        if self.model is None:
            raise NotApplicableError(f"it needs torch: {extras.install('torch')}")
        try:
            return self.model()
        except InvalidRequestError as error:
            raise NotApplicableError(error.message) from error

    def check_width(self) -> None:
        """Raise `NotApplicableError` where the rows are not as wide as the table's."""
        if self.sent[0].shape[1] != self.table.shape[1]:
            raise NotApplicableError(
                f"rows are {self.sent[0].shape[1]} wide, the table's {self.table.shape[1]}"
            )


class Attacker(Protocol):
    """Guesses the tokens behind rows."""

    @property
    def name(self) -> str:
        """Short, in the words of the report."""

    @property
    def knows(self) -> Knows:
        """Its needs beside the rows."""

    def fit(self, known: Known) -> None:
        """Learn from what is known; called once, before `guess`.

        Raises:
            NotApplicableError: it cannot work on this transform.
            OutOfTimeError: it takes longer than `known.clock` allows.
        """

    def guess(self, sent: SentRows) -> Guesses:
        """The tokens behind each prompt.

        Raises:
            NotApplicableError: it cannot work on this transform.
            OutOfTimeError: as `fit`; the guesses up to there stand.
        """


def with_template(guess: Ids, template: Template) -> Ids:
    """The guess with the template's tokens where they are known to stand."""
    before, after = template.before, template.after
    if len(guess) < len(before) + len(after):
        return guess
    return np.concatenate([before, guess[len(before) : len(guess) - len(after)], after])
