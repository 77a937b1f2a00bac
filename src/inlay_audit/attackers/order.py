"""Attackers by means of another: of rows out of order, and of rows that are sent many times."""

from collections import Counter

import numpy as np

from inlay_audit.attacker import (
    Attacker,
    Guesses,
    Known,
    Knows,
    NotApplicableError,
    SentRows,
    in_order,
)
from inlay_audit.attackers.sequence import Bigram
from inlay_audit.prompts import Floats, Ids

_BEAM = 24
_LONGEST = 512
"""Tokens of a prompt that is put in order; the work grows with their square."""


class Reordered:
    """The tokens of another attacker, in the order that public text makes likely."""

    name = "reordered"

    def __init__(self, inner: Attacker) -> None:
        self._inner = inner
        self.knows: Knows = inner.knows

    def fit(self, known: Known) -> None:
        """Count bigrams. Raises `NotApplicableError` where rows are in their order."""
        self._inner.fit(known)
        self._bigram, self._template = Bigram.of(known), known.template
        public = known.public[:50]
        guesses = in_order(self._inner.guess(SentRows(known.sent[: len(public)])))
        placed, held = 0, 0
        for prompt, guess in zip(public, guesses, strict=True):
            if len(guess) == len(prompt.ids):
                placed += int((guess == prompt.ids).sum())
            held += (Counter(guess.tolist()) & Counter(prompt.ids.tolist())).total()
        if placed >= 0.95 * held:
            raise NotApplicableError("the rows are in their order")

    def guess(self, sent: SentRows) -> Guesses:
        """The template, and between it the other tokens in a likely order."""
        for place, (index, guess) in enumerate(self._inner.guess(sent)):
            if place:
                sent.clock.check()
            yield index, self._ordered(guess)

    def _ordered(self, guess: Ids) -> Ids:
        before, after = self._template.before, self._template.after
        bag = Counter(guess.tolist())
        bag.subtract(Counter(before.tolist()) + Counter(after.tolist()))
        tokens = np.array(sorted((+bag).elements()), np.int64)
        if 1 < len(tokens) <= _LONGEST:
            tokens = self._order(tokens)
        return np.concatenate([before, tokens, after])

    def _order(self, tokens: Ids) -> Ids:
        """Beam search for the likeliest order of (n,) ascending tokens."""
        first, last = self._template.before[-1:], self._template.after[:1]
        follows = np.log(
            _between(self._bigram, np.concatenate([tokens, first]), np.concatenate([tokens, last]))
        )
        count = len(tokens)
        # Equal tokens are used in their order, so that an order of tokens is looked at once.
        twin = np.concatenate([[False], tokens[1:] == tokens[:-1]])
        marks = np.random.default_rng(0).integers(1 << 62, size=count)
        totals = np.zeros(1, np.float32)
        used = np.zeros((1, count), np.bool_)
        orders = np.zeros((1, count), np.int64)
        sums = np.zeros(1, np.int64)
        gains = follows[-1:, :count] if len(first) else np.zeros((1, count), np.float32)
        for step in range(count):
            closed = used | (twin & ~np.roll(used, 1, axis=1))
            scored = np.where(closed, -np.inf, totals[:, None] + gains)
            best = np.argsort(-scored, axis=None, kind="stable")[: _BEAM * 4]
            best = best[np.isfinite(scored.ravel()[best])]
            beams, places = np.divmod(best, count)
            # Of two orders of the same tokens with the same last, the worse is dropped.
            left = sums[beams] + marks[places]
            keys = np.stack([left, tokens[places]], axis=1)
            kept = np.sort(np.unique(keys, axis=0, return_index=True)[1])[:_BEAM]
            beams, places = beams[kept], places[kept]
            totals, sums = scored[beams, places], left[kept]
            used, orders = used[beams], orders[beams]
            used[np.arange(len(places)), places] = True
            orders[:, step] = places
            gains = follows[places, :count]
        if len(last):
            totals = totals + follows[orders[:, -1], count]
        found: Ids = tokens[orders[int(totals.argmax())]]
        return found


def _between(bigram: Bigram, before: Ids, after: Ids) -> Floats:
    """Probabilities (b, a) that a token follows another; small for those that were never seen."""
    rows, columns = (
        np.clip(np.searchsorted(bigram.ids, ids), 0, len(bigram.ids) - 1) for ids in (before, after)
    )
    found = bigram.follows[np.ix_(rows, columns)]
    seen = (bigram.ids[rows] == before)[:, None] & (bigram.ids[columns] == after)[None, :]
    return np.where(seen, found, np.float32(1e-6)).astype(np.float32)


class Averaged:
    """The mean of all times that a prompt was sent, read by another attacker."""

    def __init__(self, name: str, inner: Attacker) -> None:
        self.name = name
        self._inner = inner
        self.knows: Knows = inner.knows

    def fit(self, known: Known) -> None:
        """Fit the other attacker. Raises `NotApplicableError` as it does, or without new noise."""
        if known.send is None:
            raise NotApplicableError("no prompt was sent twice")
        again = known.send()
        if all(
            mine.shape == other.shape and np.array_equal(mine, other)
            for mine, other in zip(known.sent, again, strict=True)
        ):
            raise NotApplicableError("the same text always has the same rows")
        if not all(
            mine.shape == other.shape for mine, other in zip(known.sent, again, strict=True)
        ):
            raise NotApplicableError("the same text has another number of rows each time")
        self._inner.fit(known)

    def guess(self, sent: SentRows) -> Guesses:
        """Tokens read from the means."""
        if not sent.resends:
            raise NotApplicableError("no prompt was sent twice")
        means = [
            np.mean(np.stack(times), axis=0) for times in zip(sent.rows, *sent.resends, strict=True)
        ]
        return self._inner.guess(SentRows(means, clock=sent.clock))
