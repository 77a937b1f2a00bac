"""Which tokens follow which: the prior alone, and together with the rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from inlay_audit.attacker import (
    NO_LIMIT,
    Clock,
    Guesses,
    Known,
    Knows,
    NotApplicableError,
    SentRows,
    in_order,
    with_template,
)
from inlay_audit.attackers.pairs import Emission
from inlay_audit.prompts import Floats, Ids

_MAX_WORDS = 4096
"""Tokens of the public text that the bigram knows, the most frequent: 64 MB of probabilities."""

_MOST = 1 << 25
"""Elements of the forward variables of prompts that are computed together."""


class Bigram:
    """Probabilities of a token after another in public text.

    Attributes:
        ids: the tokens it knows, ascending, (w,).
        follows: (w, w) probabilities; row: the token before.
        single: (w,) probabilities of tokens by themselves.
        new: probability that a token is none of those.
    """

    def __init__(self, known: Known) -> None:
        around = np.concatenate([known.template.before[-1:], known.template.after[:1]])
        texts = [
            np.concatenate(
                [prompt.ids[max(prompt.start - 1, 0) : prompt.stop], prompt.ids[prompt.stop :][:1]]
            )
            for prompt in known.public
        ]
        found, counts = np.unique(np.concatenate(texts), return_counts=True)
        kept = found[np.argsort(-counts, kind="stable")[:_MAX_WORDS]]
        self.ids: Ids = np.unique(np.concatenate([kept, around]))
        joint = np.zeros((len(self.ids), len(self.ids)), np.float32)
        for text in texts:
            inside = np.flatnonzero(np.isin(text, self.ids))
            places = np.searchsorted(self.ids, text[inside])
            beside = np.diff(inside) == 1
            np.add.at(joint, (places[:-1][beside], places[1:][beside]), 1)
        single = joint.sum(axis=0) + 0.1
        single /= single.sum()
        # Witten and Bell: the more different tokens follow, the more may follow that never did.
        kinds = (joint > 0).sum(axis=1, keepdims=True) + 1.0
        joint += kinds * single
        self.follows: Floats = joint / joint.sum(axis=1, keepdims=True)
        self.single: Floats = single
        # Good and Turing: as many will be new as there are that came once.
        kept_ones = np.isin(found, self.ids)
        new = counts[~kept_ones].sum() + (counts[kept_ones] == 1).sum()
        self.new = float((new + 1) / (counts.sum() + 2))

    @classmethod
    def of(cls, known: Known) -> "Bigram":
        """The bigram of `known`, counted once for all attackers that use it."""
        found = known.cached.get("bigram")
        if not isinstance(found, cls):
            found = known.cached["bigram"] = cls(known)
        return found

    def others(self, vocabulary: int) -> Floats:
        """Log probabilities (vocabulary,) of all tokens it does not know; -inf of those it does.

        By Zipf's law, as tokenizers number their tokens by how frequent they are.
        """
        found = -np.log(np.arange(1, vocabulary + 1, dtype=np.float64))
        found[self.ids] = -np.inf
        total = np.logaddexp.reduce(found)
        logs: Floats = (found - total if np.isfinite(total) else found).astype(np.float32)
        return logs

    def place(self, token: int) -> int:
        """Index of a token it knows."""
        return int(np.searchsorted(self.ids, token))


class _Chain(NamedTuple):
    """Forward and backward pass over texts that begin and end with known tokens."""

    bigram: Bigram
    follows: Floats
    single: Floats
    first: int | None
    last: int | None

    @classmethod
    def of(cls, known: Known) -> "_Chain":
        bigram, template = Bigram.of(known), known.template
        first = bigram.place(int(template.before[-1])) if len(template.before) else None
        last = bigram.place(int(template.after[0])) if len(template.after) else None
        return cls(bigram, bigram.follows, bigram.single, first, last)

    def with_new(self) -> "_Chain":
        """The same with one state more, at place w: a token that the public text lacks."""
        known, new = self.bigram, np.float32(self.bigram.new)
        words = len(known.ids)
        follows = np.empty((words + 1, words + 1), np.float32)
        follows[:words, :words] = known.follows * (1 - new)
        follows[words, :words] = known.single * (1 - new)
        follows[:, words] = new
        single = np.append(known.single * (1 - new), new).astype(np.float32)
        return _Chain(known, follows, single, self.first, self.last)

    def read(
        self,
        lengths: Sequence[int],
        likelihoods: Callable[[Sequence[int]], Sequence[Floats]],
        clock: Clock = NO_LIMIT,
    ) -> Guesses:
        """Places of the tokens with the largest posterior probability.

        Args:
            lengths: of each text.
            likelihoods: makes those of some texts when they are needed: (n, w), or (n, w + 1) with
                a state for new tokens, each row with a maximum of 1.
            clock: as that of `SentRows`.

        Yields:
            The text's index and (n,) places.
        """
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        while order:
            longest = lengths[order[-1]]
            count = max(1, _MOST // max(1, longest * len(self.single)))
            chunk, order = order[-count:], order[:-count]
            yield from zip(chunk, self._together(likelihoods(chunk)), strict=True)
            if order:
                clock.check()

    def _together(self, likelihoods: Sequence[Floats]) -> list[Ids]:
        follows = self.follows
        lengths = np.array([len(each) for each in likelihoods])
        longest, words = int(lengths.max()), len(self.single)
        emitted = np.ones((longest, len(lengths), words), np.float32)
        for index, each in enumerate(likelihoods):
            emitted[: len(each), index] = each
        forward = np.empty_like(emitted)
        before = self.single if self.first is None else follows[self.first]
        state = np.broadcast_to(before, emitted[0].shape)
        for position in range(longest):
            forward[position] = _normed(state * emitted[position])
            state = forward[position] @ follows
        after = np.ones(words, np.float32) if self.last is None else follows[:, self.last]
        end = np.broadcast_to(after, emitted[0].shape)
        backward = end
        best = np.zeros((len(lengths), longest), np.int64)
        for position in range(longest - 1, -1, -1):
            backward = np.where((lengths - 1 == position)[:, None], end, backward)
            best[:, position] = (forward[position] * backward).argmax(axis=1)
            backward = _normed((backward * emitted[position]) @ follows.T)
        return [best[index, :length] for index, length in enumerate(lengths)]


class Prior:
    """Guesses from public text and the number of rows alone, without looking at any row."""

    name = "prior"
    knows: Knows = "nothing"

    def fit(self, known: Known) -> None:
        """Count which tokens follow which."""
        self._chain, self._template = _Chain.of(known), known.template

    def guess(self, sent: SentRows) -> Guesses:
        """The likeliest token at each position."""
        around = len(self._template.before) + len(self._template.after)
        ids = self._chain.bigram.ids
        lengths = [max(len(rows) - around, 1) for rows in sent.rows]
        # Texts of one length are guessed alike.
        kinds = sorted(set(lengths))
        read = self._chain.read(
            kinds, lambda some: [np.ones((kinds[index], len(ids)), np.float32) for index in some]
        )
        found = dict(zip(kinds, in_order(read), strict=True))
        for index, length in enumerate(lengths):
            yield (
                index,
                np.concatenate([self._template.before, ids[found[length]], self._template.after]),
            )


class ForwardBackward:
    """Weighs what each row says against which tokens follow which."""

    name = "bigram"
    knows: Knows = "pairs"

    def fit(self, known: Known) -> None:
        """Count bigrams, estimate the noise."""
        if not known.keeps_rows:
            raise NotApplicableError("the number of rows is not that of the tokens")
        self._emission = Emission.of(known)
        self._chain, self._template = _Chain.of(known).with_new(), known.template
        self._others = self._chain.bigram.others(len(known.table))

    def guess(self, sent: SentRows) -> Guesses:
        """The token with the largest posterior probability at each position."""
        before, after = len(self._template.before), len(self._template.after)
        words = self._chain.bigram.ids
        inner = [rows[before : max(len(rows) - after, before + 1)] for rows in sent.rows]
        outside: dict[int, Ids] = {}

        def likelihoods(chunk: Sequence[int]) -> list[Floats]:
            rows = np.concatenate([inner[index] for index in chunk])
            inside = self._emission.of_words(rows, words)
            best, likely = self._emission.likeliest(rows, 1, self._others)
            ends = np.cumsum([len(inner[index]) for index in chunk])[:-1]
            outside.update(zip(chunk, np.split(best[:, 0], ends), strict=True))
            logs = np.concatenate([inside, likely], axis=1)
            logs -= logs.max(axis=1, keepdims=True)
            return np.split(np.maximum(np.exp(logs), np.float32(1e-30)), ends)

        lengths = [len(rows) for rows in inner]
        for index, places in self._chain.read(lengths, likelihoods, sent.clock):
            known = places < len(words)
            read = np.where(known, words[np.where(known, places, 0)], outside[index])
            whole = np.concatenate([np.zeros(before, np.int64), read, np.zeros(after, np.int64)])
            yield index, with_template(whole[: len(sent.rows[index])], self._template)


def _normed(values: Floats) -> Floats:
    normed: Floats = values / np.maximum(values.sum(axis=1, keepdims=True), np.float32(1e-30))
    return normed
