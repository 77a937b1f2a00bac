"""The inputs of a request for vectors: texts, pairs, ids or rows, made prompts a few at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from inlay.errors import ContextLengthError, InvalidRequestError
from inlay.prompt import Prompt, Tokens
from inlay.render import Renderer, Side

CHUNK_INPUTS = 64
CHUNK_POSITIONS = 16 * 1024
"""What is made prompts and sent together, about: enough for several batches, little enough that the first begins soon."""

_CHARACTERS = 4
"""Characters a token stands for, in most texts."""


class Piece(NamedTuple):
    """One input as a prompt; `second_from` is where the second text of a pair begins, None of anything else."""

    prompt: Prompt
    second_from: int | None = None


class Inputs(Protocol):
    """The inputs of a request, in order."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def weight(self, index: int) -> int:
        """About how many positions an input has."""
        ...

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Inputs `start` to `stop` as prompts. CPU work. Raises `InlayError` for one that is not for the model."""
        ...


def chunks(inputs: Inputs) -> Iterator[tuple[int, int]]:
    """Stretches [start, stop) of `inputs` to be handled together."""
    start = weight = 0
    for index in range(len(inputs)):
        own = inputs.weight(index)
        if index > start and (index - start == CHUNK_INPUTS or weight + own > CHUNK_POSITIONS):
            yield start, index
            start, weight = index, 0
        weight += own
    if len(inputs) > start:
        yield start, len(inputs)


@dataclass(frozen=True, slots=True)
class Cut:
    """How inputs are made to fit.

    Attributes:
        limit: positions the model takes.
        keep: positions that are kept, or None to refuse what is longer.
        side: which side is kept whole: "right" cuts off the end, as transformers names it.
    """

    limit: int
    keep: int | None = None
    side: Side = "right"

    def check(self, length: int, param: str) -> None:
        """Raise `ContextLengthError` for an input that is too long."""
        if length > self.limit:
            raise ContextLengthError(
                f"This model's maximum context length is {self.limit} tokens; {param} has {length}. Shorten it, or send "
                "truncate_prompt_tokens.",
                param=param,
            )


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts, each with `prefix` before it."""

    texts: Sequence[str]
    renderer: Renderer
    cut: Cut
    prefix: str = ""
    lower_case: bool = False
    special: bool = True
    params: tuple[str, ...] = ()
    """What clients call each text; `input[i]` without."""

    def __len__(self) -> int:
        return len(self.texts)

    def weight(self, index: int) -> int:
        """As `Inputs.weight`."""
        return len(self.texts[index]) // _CHARACTERS + 1

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """As `Inputs.pieces`."""
        texts = [self.prefix + text for text in self.texts[start:stop]]
        if self.lower_case:
            texts = [text.lower() for text in texts]
        try:
            found = self.renderer.encode_texts(
                texts, add_special_tokens=self.special, keep=self.cut.keep, side=self.cut.side
            )
        except InvalidRequestError as error:
            error.param = "input"
            raise
        pieces = []
        for index, ids in enumerate(found, start):
            param = self.params[index] if self.params else f"input[{index}]"
            if not ids:
                raise InvalidRequestError(f"{param} has no tokens", param=param)
            self.cut.check(len(ids), param)
            pieces.append(Piece(Prompt.of(Tokens(ids))))
        return pieces


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of texts, for a cross-encoder."""

    pairs: Sequence[tuple[str, str]]
    renderer: Renderer
    cut: Cut
    param: str

    def __len__(self) -> int:
        return len(self.pairs)

    def weight(self, index: int) -> int:
        """As `Inputs.weight`."""
        return sum(map(len, self.pairs[index])) // _CHARACTERS + 1

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """As `Inputs.pieces`."""
        try:
            found = self.renderer.encode_pairs(self.pairs[start:stop], keep=self.cut.keep, side=self.cut.side)
        except InvalidRequestError as error:
            error.param = self.param
            raise
        for index, pair in enumerate(found, start):
            self.cut.check(len(pair.ids), f"{self.param}[{index}]")
        return [Piece(Prompt.of(Tokens(pair.ids)), pair.second_from) for pair in found]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Ids or rows, checked and cut already."""

    prompts: Sequence[Prompt]

    def __len__(self) -> int:
        return len(self.prompts)

    def weight(self, index: int) -> int:
        """As `Inputs.weight`."""
        return len(self.prompts[index])

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """As `Inputs.pieces`."""
        return [Piece(prompt) for prompt in self.prompts[start:stop]]


__all__ = ["Cut", "Inputs", "Pairs", "Piece", "Prompts", "Texts", "chunks"]
