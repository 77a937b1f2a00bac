"""Drafts by n-gram look-up: what followed the last ids when they stood there before.

The method is prompt look-up decoding (Saxena, 2023), "ngram" in vLLM.
"""

import sys
from collections.abc import Iterable, Mapping

from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.sequence import Sequence
from inlay.prompt import Tokens

NO_ID = chr(sys.maxunicode)
"""Stands where there is no id: of an embedding vector, of media."""


class NgramDrafter:
    """A drafter that looks the last ids up. Arguments and results as for `Drafter`."""

    def __init__(self, config: SpeculativeConfig) -> None:
        """Look up n-grams of the lengths in `config`."""
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._histories: dict[Sequence, History] = {}
        self._found: dict[Sequence, list[int]] = {}

    def available(self, sequence: Sequence, limit: int) -> int:
        """As `Drafter`."""
        if limit <= 0:
            return 0
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
    """The ids of a sequence, prompt and output, each as one character.

    `str.rfind` takes 3 to 5 us for 4,096 ids, where comparing arrays took 8 to 15; for 32,768 both
    take 16 to 29.
    """

    __slots__ = ("_output", "_text")

    def __init__(self, sequence: Sequence) -> None:
        """Start with the prompt."""
        prompt = sequence.prompt
        self._text = "".join(
            text_of(part.ids) if isinstance(part, Tokens) else NO_ID * len(part)
            for _, part in prompt.spans(0, len(prompt))
        )
        self._output = 0

    def after(self, output: list[int]) -> str:
        """Return all ids, with what `output` has gained since the last call."""
        self._text += text_of(output[self._output :])
        self._output = len(output)
        return self._text


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
    follows = None
    for length in range(shortest, min(longest, len(text) - 1) + 1):
        last = text[-length:]
        place = -1 if NO_ID in last else text.rfind(last, 0, -1)
        if place < 0:
            break
        follows = place + length
    if follows is None or count <= 0:
        return []
    known = text[follows : follows + count].partition(NO_ID)[0]
    if follows + len(known) == len(text):
        known *= -(-count // len(known))
    return list(map(ord, known[:count]))
