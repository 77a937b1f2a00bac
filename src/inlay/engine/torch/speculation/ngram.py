"""Drafts by n-gram look-up: what followed the last ids when they stood there before.

The method is prompt look-up decoding (Saxena, 2023), "ngram" in vLLM.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.sequence import Sequence
from inlay.prompt import Tokens

MAX_CANDIDATES = 16
"""Maximum number of earlier places that are compared, the last ones."""

_NO_ID = -1


class NgramDrafter:
    """A drafter that looks the last ids up. Arguments and results as for `Drafter`."""

    def __init__(self, config: SpeculativeConfig) -> None:
        """Look up n-grams of the lengths in `config`."""
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._histories: dict[Sequence, History] = {}
        self._found: dict[Sequence, list[int]] = {}

    def available(self, sequence: Sequence, limit: int) -> int:
        """As `Drafter`."""
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = History(sequence)
        found = lookup(history.after(sequence.output), limit, *self._lengths)
        self._found[sequence] = found
        return len(found)

    def draft(
        self, counts: Mapping[Sequence, int], room: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """As `Drafter`; they take no room."""
        found, self._found = self._found, {}
        return {sequence: tuple(found[sequence][:count]) for sequence, count in counts.items()}

    def forget(self, sequence: Sequence) -> None:
        """As `Drafter`."""
        self._histories.pop(sequence, None)
        self._found.pop(sequence, None)


class History:
    """The ids of a sequence, prompt and output, as an array that grows with it.

    Embedding vectors and media have no ids: -1 stands for each of their positions.
    """

    __slots__ = ("_ids", "_length", "_prompt_length")

    def __init__(self, sequence: Sequence) -> None:
        """Start with the prompt."""
        self._prompt_length = self._length = len(sequence.prompt)
        self._ids = np.full(self._length + 64, _NO_ID, dtype=np.int64)
        for first, segment in sequence.prompt.spans(0, self._length):
            if isinstance(segment, Tokens):
                self._ids[first : first + len(segment)] = segment.ids

    def after(self, output: list[int]) -> NDArray[np.int64]:
        """Return the ids int64 [positions], with what `output` has gained since the last call."""
        length = self._prompt_length + len(output)
        if length > len(self._ids):
            self._ids = np.concatenate([self._ids, np.full(length, _NO_ID, dtype=np.int64)])
        self._ids[self._length : length] = output[self._length - self._prompt_length :]
        self._length = length
        return self._ids[:length]


def lookup(ids: NDArray[np.int64], count: int, shortest: int, longest: int) -> list[int]:
    """Return up to `count` ids that followed the last ids of `ids` at an earlier place.

    The place is the one where the most of the last `longest` ids agree, at least `shortest`; of
    equal ones the last. A repetition is continued beyond the end of what is known.

    Args:
        ids: int64 [positions]; negative where there is no id.
        count: maximum number of ids.
        shortest: minimum length of the n-gram.
        longest: maximum length of the n-gram.
    """
    places = len(ids) - shortest
    if places <= 0 or count <= 0:
        return []
    tail = ids[places:]
    if (tail < 0).any():
        return []
    equal = ids[:places] == tail[0]
    for offset in range(1, shortest):
        equal &= ids[offset : places + offset] == tail[offset]
    found = np.flatnonzero(equal)[-MAX_CANDIDATES:]
    if not len(found):
        return []
    best = max(
        found.tolist(),
        key=lambda place: (_agreement(ids, place, places, longest - shortest), place),
    )
    first = best + shortest
    drafts = ids[first + np.arange(count) % (len(ids) - first)]
    unknown = np.flatnonzero(drafts < 0)
    known: list[int] = drafts[: unknown[0] if len(unknown) else count].tolist()
    return known


def _agreement(ids: NDArray[np.int64], place: int, end: int, most: int) -> int:
    """Return how many ids before `place` equal those before `end`, up to `most`."""
    for back in range(1, min(most, place) + 1):
        if ids[place - back] != ids[end - back] or ids[place - back] < 0:
            return back - 1
    return min(most, place)
