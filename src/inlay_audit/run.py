"""An audit: every transform against every attacker."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inlay.base.errors import InvalidRequestError
from inlay.tensors.cast import cast
from inlay_audit.answers import Answers, Ask, Diverge, compared
from inlay_audit.attacker import (
    UNPAIRED,
    Clock,
    Known,
    NotApplicableError,
    OutOfTimeError,
    SentRows,
)
from inlay_audit.attackers import chosen
from inlay_audit.interval import Share, shares
from inlay_audit.prompts import AuditPrompt, Floats, Ids, Template
from inlay_audit.score import METRICS, Counts, counts_of
from inlay_audit.transform import Transform, checked

if TYPE_CHECKING:
    from inlay_audit.neural.language_model import LanguageModel

LEAST_TEXTS = 20
"""Texts to report about, at least: with fewer no interval says anything."""

LEAST_PUBLIC = 20
"""Texts that attackers learn from, at least."""

_SAMPLES = 3


@dataclass(frozen=True)
class ReadShare:
    """The share that one attacker read.

    Attributes:
        attacker: its name.
        knows: its needs beside the rows.
        shares: by metric.
        advantage: by metric, over the prior: of what the prior misses, the share that was read;
            None where there is nothing to read.
        seconds: that it took, learning included.
        texts: that it read: fewer than all where the time was over before.
    """

    attacker: str
    knows: str
    shares: dict[str, Share]
    advantage: dict[str, float | None]
    seconds: float
    texts: int


@dataclass(frozen=True)
class Worst:
    """The share of the attacker that read most; it may be the prior.

    Attributes:
        attacker: its name.
        share: its share. The upper limit is the largest of all attackers', and limits are wider for
            the choice among them.
    """

    attacker: str
    share: Share


@dataclass(frozen=True)
class Sample:
    """A prompt's own text, and the tokens that the best attacker read."""

    text: str
    read: str


@dataclass(frozen=True)
class Audited:
    """One transform.

    Attributes:
        transform: its name.
        texts: that were to be read.
        of_texts: that these were taken from by chance.
        reads: of each attacker, the prior first.
        left_out: attackers that do not apply, and why.
        not_run: attackers that read nothing before the time was over.
        worst: by metric, of all attackers; metrics with nothing to read are left out.
        worst_unpaired: the same for attackers that need no pairs.
        answers: to the same rows; None where they were not asked for, or `unanswered` says why.
        unanswered: reason for there being none, or None.
        samples: some prompts, beside what was read of them.
    """

    transform: str
    texts: int
    of_texts: int
    reads: tuple[ReadShare, ...]
    left_out: dict[str, str]
    not_run: tuple[str, ...]
    worst: dict[str, Worst]
    worst_unpaired: dict[str, Worst]
    answers: Answers | None
    unanswered: str | None
    samples: tuple[Sample, ...]

    @property
    def untried(self) -> bool:
        """True if the time was over before any attacker had read a row."""
        return bool(self.not_run) and all(read.knows == "nothing" for read in self.reads)


class _Tried(NamedTuple):
    """An attacker's guesses by prompt, and their counts, prompts in order."""

    attacker: str
    knows: str
    guesses: dict[int, Ids]
    counts: Counts
    seconds: float


@dataclass(frozen=True, eq=False)
class Audit:
    """The texts, and all that attackers may use.

    Attributes:
        prompts: that are to be read.
        public: of the attackers' own.
        table: the embedding table.
        template: tokens around every user's text.
        decode: ids to text.
        attackers: names of `inlay_audit.attackers.ALL`.
        resends: times that each prompt is sent, at least 1.
        seed: of all randomness.
        ask: has the model answer rows; None: answers are not compared.
        tell: is told what goes on.
        diverge: compares distributions of answers; None: they are not.
        model: loads the whole model, for attackers that have it; None without torch.
        budget: seconds for a transform. After them the attacker that runs is stopped, what it read
            is kept, and no further one begins.
        dtype: of rows as they are sent.
        of_texts: that `prompts` were taken from by chance; 0: they are all.

    Raises:
        InvalidRequestError: too few texts.
    """

    prompts: Sequence[AuditPrompt]
    public: Sequence[AuditPrompt]
    table: Floats
    template: Template
    decode: Callable[[Sequence[int]], str]
    attackers: tuple[str, ...]
    resends: int = 8
    seed: int = 0
    ask: Ask | None = None
    tell: Callable[[str], None] = lambda text: None
    diverge: Diverge | None = None
    model: "Callable[[], LanguageModel] | None" = None
    budget: float = math.inf
    dtype: str = "float32"
    of_texts: int = 0

    def __post_init__(self) -> None:
        if len(self.prompts) < LEAST_TEXTS or len(self.public) < LEAST_PUBLIC:
            raise InvalidRequestError(
                f"{len(self.prompts)} texts to read and {len(self.public)} to learn from are too "
                f"few: at least {LEAST_TEXTS} and {LEAST_PUBLIC} are needed, and a few hundred "
                "give intervals that say something. Without --public, a third of --texts is read "
                "and attackers learn from the rest"
            )

    def of(self, transform: Transform) -> Audited:
        """Audit a transform. The first also asks for the answers to the table's own rows.

        Raises:
            InvalidRequestError: the transform failed, or gave what cannot be sent.
        """
        self.tell(f"{transform.name}: rows")
        sends = self.resends if transform.can_resend else 1
        sent = [self._sent(transform, self.prompts, 1 + times) for times in range(sends)]
        public = self._sent(transform, self.public, 0, sent[0][0].shape[1])
        clock = Clock(time.perf_counter() + self.budget)
        known = Known(
            self.table,
            self.template,
            self.public,
            public,
            self._again(transform) if transform.can_resend else None,
            self.model,
            clock,
        )
        seen = self._seen(known)
        tried: list[_Tried] = []
        left_out: dict[str, str] = {}
        not_run: list[str] = []
        waiting = chosen(self.attackers)
        while waiting:
            # The one before is let go here, with its copy of the table.
            attacker = waiting.pop(0)
            self.tell(f"{transform.name}: {attacker.name}")
            began = time.perf_counter()
            # The prior is always there, and one attacker beside it.
            guesses: dict[int, Ids] = {}
            try:
                if len(tried) + len(not_run) > 1:
                    clock.check()
                attacker.fit(known)
                # Those that came before an error stay.
                guesses.update(attacker.guess(SentRows(sent[0], sent[1:], clock)))
            except NotApplicableError as error:
                left_out[attacker.name] = str(error)
                continue
            except OutOfTimeError:
                if not guesses:
                    not_run.append(attacker.name)
                    continue
            seconds = time.perf_counter() - began
            read = sorted(guesses)
            counts = counts_of(
                [self.prompts[index] for index in read], [guesses[index] for index in read], seen
            )
            tried.append(_Tried(attacker.name, attacker.knows, guesses, counts, seconds))
        answers, unanswered = None, None
        if self.ask is not None:
            self.tell(f"{transform.name}: answers")
            try:
                answers = self._answers(self.ask, transform, sent[0])
            except InvalidRequestError as error:
                unanswered = error.message
        return self._audited(transform, tried, left_out, not_run, answers, unanswered)

    def _answers(self, ask: Ask, transform: Transform, sent: Sequence[Floats]) -> Answers:
        served = [each for rows in sent if (each := transform.served(rows)) is not None]
        if len(served) < len(sent):
            raise InvalidRequestError("the rows enter the model behind its first layer")
        own = [self.table[each.ids] for each in self.prompts]
        divergence = None if self.diverge is None else self.diverge(served, own)
        return compared(ask(served), self._clean, self.prompts, divergence)

    @cached_property
    def _clean(self) -> Sequence[str]:
        """Answers to the table's own rows."""
        return self.ask([self.table[each.ids] for each in self.prompts]) if self.ask else ()

    def _again(self, transform: Transform) -> Callable[[], Sequence[Floats]]:
        """Sends public text, with other randomness each time."""
        times = count(1)
        return lambda: self._sent(transform, self.public, 1000 + next(times))

    def _audited(
        self,
        transform: Transform,
        tried: Sequence[_Tried],
        left_out: dict[str, str],
        not_run: Sequence[str],
        answers: Answers | None,
        unanswered: str | None,
    ) -> Audited:
        found = [self._shares(each.counts) for each in tried]
        wide = [self._shares(each.counts, len(tried)) for each in tried]
        # What is guessed of the same texts.
        guessed = [self._shares(tried[0].counts[sorted(each.guesses)]) for each in tried]
        reads = tuple(
            ReadShare(
                each.attacker,
                each.knows,
                mine,
                {metric: _advantage(mine[metric], prior[metric]) for metric in METRICS},
                each.seconds,
                len(each.guesses),
            )
            for each, mine, prior in zip(tried, found, guessed, strict=True)
        )
        unpaired = [index for index, each in enumerate(tried) if each.knows in UNPAIRED]
        names = [each.attacker for each in tried]
        best = max(range(len(tried)), key=lambda index: found[index]["tokens"].value)
        samples = tuple(
            Sample(
                self.decode(prompt.user.tolist()),
                self.decode(guess[prompt.start : len(guess) - len(self.template.after)].tolist()),
            )
            for index, guess in sorted(tried[best].guesses.items())[:_SAMPLES]
            for prompt in [self.prompts[index]]
        )
        return Audited(
            transform.name,
            len(self.prompts),
            max(self.of_texts, len(self.prompts)),
            reads,
            left_out,
            tuple(not_run),
            _worst(names, wide),
            _worst([names[index] for index in unpaired], [wide[index] for index in unpaired]),
            answers,
            unanswered,
            samples,
        )

    def _seen(self, known: Known) -> Ids:
        try:
            return np.unique(known.pairs.ids)
        except NotApplicableError:
            return np.unique(np.concatenate([prompt.ids for prompt in self.public]))

    def _shares(self, counts: Counts, comparisons: int = 1) -> dict[str, Share]:
        found = shares(counts, comparisons=comparisons, seed=self.seed)
        return dict(zip(METRICS, found, strict=True))

    def _sent(
        self,
        transform: Transform,
        prompts: Sequence[AuditPrompt],
        times: int,
        width: int | None = None,
    ) -> list[Floats]:
        rng = np.random.default_rng([self.seed, 2, times + 1])
        rows = [self.table[prompt.ids] for prompt in prompts]
        found = checked(transform.send(prompts, rows, rng), prompts, width)
        return found if self.dtype == "float32" else [_rounded(each, self.dtype) for each in found]


def _rounded(rows: Floats, dtype: str) -> Floats:
    """The rows as they arrive. Raises `InvalidRequestError` where the dtype does not hold them."""
    bits = cast(rows.reshape(-1).view(np.uint32), "float32", dtype)
    found: Floats = cast(bits, dtype, "float32").view(np.float32).reshape(rows.shape)
    if not np.isfinite(found).all():
        raise InvalidRequestError(f"rows hold numbers that are infinite in {dtype}: --dtype")
    return found


def _advantage(share: Share, prior: Share) -> float | None:
    if not share.of:
        return None
    return (share.value - prior.value) / max(1 - prior.value, 1e-9)


def _worst(names: Sequence[str], found: Sequence[dict[str, Share]]) -> dict[str, Worst]:
    worst = {}
    for metric in METRICS:
        shown = [each[metric] for each in found]
        if shown[0].of:
            best = max(range(len(shown)), key=lambda index: shown[index].value)
            # Another than the best may be better yet.
            high = max(each.high for each in shown)
            share = Share(shown[best].value, shown[best].low, high, shown[best].of)
            worst[metric] = Worst(names[best], share)
    return worst
