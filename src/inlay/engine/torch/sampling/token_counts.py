"""Token counts of a sequence, kept from step to step, for penalties."""

import numpy as np

from inlay.engine.torch.sequence import Sequence


class TokenCounts:
    """Distinct ids of a sequence, and the count of each in its output.

    Arrays that grow with the sequence.

    Attributes:
        sequence: the sequence; held so that its `id()` is not reused while this exists.
    """

    __slots__ = ("_counts", "_ids", "_places", "_seen", "_size", "sequence")

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self.sequence = sequence
        prompt = np.unique(np.asarray(sequence.prompt_token_ids, dtype=np.int64))
        prompt = prompt[(prompt >= 0) & (prompt < vocab_size)]
        self._size = len(prompt)
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.int64)
        self._ids[: self._size] = prompt
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._places = dict(zip(prompt.tolist(), range(self._size), strict=True))
        self._seen = 0

    def catch_up(self, vocab_size: int) -> None:
        """Count the output ids added since the last call."""
        output = self.sequence.output
        for index in range(self._seen, len(output)):
            id_ = output[index]
            if not 0 <= id_ < vocab_size:
                continue
            place = self._places.get(id_)
            if place is None:
                place = self._places[id_] = self._size
                self._size += 1
                if place == len(self._ids):
                    self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                    self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._ids[place] = id_
            self._counts[place] += 1
        self._seen = len(output)

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> np.ndarray:
        """int64: distinct ids of prompt and output."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """float32: count of each id in the output; 0 for ids of the prompt only."""
        return self._counts[: self._size]
