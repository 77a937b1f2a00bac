"""Drafts by n-gram look-up: what followed the last ids when they stood there before.

The method is prompt look-up decoding (Saxena, 2023), "ngram" in vLLM.
"""

import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.sequence import Sequence
from inlay.messages.prompt import Tokens

NO_ID = chr(sys.maxunicode)
"""Stands where there is no id: of an embedding vector, of media."""

READ = 8192
"""Positions that become text in a step, at most: 0.5 ms. Clients have equal parts."""


class NgramDrafter:
    """A drafter that looks the last ids up. Arguments and results as for `Drafter`."""

    def __init__(self, config: SpeculativeConfig) -> None:
        """Look up n-grams of the lengths in `config`."""
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._histories: dict[Sequence, TokenHistory] = {}
        self._found: dict[Sequence, list[int]] = {}
        self._clients: Counter[Hashable] = Counter()
        self._read: Counter[Hashable] = Counter()

    def available(self, sequence: Sequence, limit: int) -> int:
        """As `Drafter`; none before all positions are read, a part of them in each step."""
        if limit <= 0:
            return 0
        history, client = self._histories.get(sequence), sequence.client
        if history is None:
            history = self._histories[sequence] = TokenHistory(sequence)
            self._clients[client] += 1
        room = READ // len(self._clients) - self._read[client]
        self._read[client] += history.read(room)
        if len(history.text) < sequence.length:
            return 0
        found = lookup(history.text, limit, *self._lengths)
        self._found[sequence] = found
        return len(found)

    def draft(
        self, counts: Mapping[Sequence, int], room: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """As `Drafter`; they take no room."""
        self._read.clear()
        found, self._found = self._found, {}
        return {sequence: tuple(found[sequence][:count]) for sequence, count in counts.items()}

    def forget(self, sequence: Sequence) -> None:
        self._found.pop(sequence, None)
        if self._histories.pop(sequence, None) is not None:
            self._clients -= Counter((sequence.client,))


class TokenHistory:
    """The ids of a sequence, prompt and output, each as one character.

    `str.rfind` takes 3 to 5 us for 4,096 ids, where comparing arrays took 8 to 15; for 32,768 both
    take 16 to 29.

    Attributes:
        text: of the positions that are read.
    """

    __slots__ = ("_sequence", "text")

    def __init__(self, sequence: Sequence) -> None:
        """Start with nothing of `sequence` read."""
        self._sequence = sequence
        self.text = ""

    def read(self, room: int) -> int:
        """Read up to `room` more positions; return their number."""
        sequence, start = self._sequence, len(self.text)
        base, count = sequence.prompt_length, min(room, sequence.length - start)
        parts: list[str] = []
        if start < base:
            parts = [
                text_of(part.ids) if isinstance(part, Tokens) else NO_ID * len(part)
                for _, part in sequence.prompt.spans(start, start + count)
            ]
        output = sequence.output[max(0, start - base) : max(0, start + count - base)]
        self.text += "".join(parts) + text_of(output)
        return count


def text_of(ids: Iterable[int]) -> str:
    """Return ids as characters."""
    return "".join(map(chr, ids))


def lookup(text: str, count: int, shortest: int, longest: int) -> list[int]:
    """Return up to `count` ids that followed the last ids of `text` at an earlier place.

    The place is the one where the most of the last `longest` ids agree, at least `shortest`; of
    equal ones the last. A repetition is continued beyond the end of what is known.

    Args:
        text: ids as characters, `NO_ID` where there is none.
        count: maximum number of ids.
        shortest: minimum length of the n-gram.
        longest: maximum length of the n-gram.
    """
    follows, end = None, len(text) - 1
    for length in range(shortest, min(longest, len(text) - 1) + 1):
        last = text[-length:]
        place = -1 if NO_ID in last else text.rfind(last, 0, end)
        if place < 0:
            break
        # A longer one that agrees ends there or before.
        follows = end = place + length
    if follows is None or count <= 0:
        return []
    known = text[follows : follows + count].partition(NO_ID)[0]
    if follows + len(known) == len(text):
        known *= -(-count // len(known))
    return list(map(ord, known[:count]))
