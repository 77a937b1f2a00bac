"""Inputs of a request for vectors, made into prompts in chunks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from inlay.api.generation.messages import read_messages
from inlay.api.generation.parts import MEDIA_PARTS, kind_of
from inlay.api.generation.truncation import Truncation
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import Embeddings
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Prompt, Tokens
from inlay.render import Renderer

CHUNK_INPUTS = 64
CHUNK_POSITIONS = 16 * 1024
"""Approximate size of a chunk: several batches, but small enough that the first starts soon."""

_CHARACTERS = 4
"""Typical characters of a token."""

_ITEM = 1024
"""Typical positions of an image or the like, in a part of a chat."""


class InputPiece(NamedTuple):
    """One input as a prompt.

    `second_from` is the position where the second text of a pair begins, else None.
    """

    prompt: Prompt
    second_from: int | None = None


class Inputs(Protocol):
    """Inputs of a request, in order."""

    def __len__(self) -> int:
        """Return the number of inputs."""

    def weight(self, index: int) -> int:
        """Return the approximate number of positions of an input."""

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        """Return the inputs `start` to `stop` as prompts. CPU work.

        Raises `InlayError` for an input that the model cannot take.
        """


def chunks(inputs: Inputs) -> Iterator[tuple[int, int]]:
    """Yield the ranges [start, stop) of `inputs` that are sent together."""
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
class TextInputs:
    """Texts, each with its prefix before it."""

    texts: Sequence[str]
    renderer: Renderer
    cut: Truncation
    prefixes: tuple[str, ...] = ("",)
    """Of each text; one serves all."""
    lower_case: bool = False
    special: bool = True
    params: tuple[str, ...] = ()
    """Name of each text in the request; `input[i]` if empty."""
    clips: Sequence[int] = ()
    """Number of first tokens of each text that are kept, before truncation; 0 for all.

    Empty keeps all texts whole.
    """

    def __len__(self) -> int:
        return len(self.texts)

    def weight(self, index: int) -> int:
        """As `Inputs.weight`."""
        return len(self.texts[index]) // _CHARACTERS + 1

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        """As `Inputs.pieces`."""
        texts = self.texts[start:stop]
        if self.clips:
            texts = self.renderer.clipped(texts, self.clips[start:stop])
        one = len(self.prefixes) == 1
        prefixes = self.prefixes * len(texts) if one else self.prefixes[start:stop]
        texts = [prefix + text for prefix, text in zip(prefixes, texts, strict=True)]
        if self.lower_case:
            texts = [text.lower() for text in texts]
        try:
            found = self.renderer.encode_texts(
                texts, add_special_tokens=self.special, keep=self.cut.keep, side=self.cut.side
            )
        except InvalidRequestError as error:
            raise error.at("input") from None
        pieces = []
        for index, ids in enumerate(found, start):
            param = self.params[index] if self.params else f"input[{index}]"
            if not ids:
                raise InvalidRequestError(f"{param} has no tokens", param=param)
            self.cut.check(len(ids), param)
            pieces.append(InputPiece(Prompt.of(Tokens(ids))))
        return pieces


@dataclass(frozen=True, slots=True)
class PairInputs:
    """Pairs of texts for a cross-encoder.

    `clips` is the number of first tokens that are kept of each side; 0 for all.
    """

    pairs: Sequence[tuple[str, str]]
    renderer: Renderer
    cut: Truncation
    param: str
    clips: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.pairs)

    def weight(self, index: int) -> int:
        """As `Inputs.weight`."""
        return sum(map(len, self.pairs[index])) // _CHARACTERS + 1

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        """As `Inputs.pieces`."""
        try:
            pairs = self.pairs[start:stop]
            if any(self.clips):
                first, second = (
                    self.renderer.clipped([pair[side] for pair in pairs], [clip] * len(pairs))
                    for side, clip in enumerate(self.clips)
                )
                pairs = list(zip(first, second, strict=True))
            found = self.renderer.encode_pairs(pairs, keep=self.cut.keep, side=self.cut.side)
        except InvalidRequestError as error:
            raise error.at(self.param) from None
        for index, pair in enumerate(found, start):
            self.cut.check(len(pair.ids), f"{self.param}[{index}]")
        return [InputPiece(Prompt.of(Tokens(pair.ids)), pair.second_from) for pair in found]


@dataclass(frozen=True, slots=True)
class Chats:
    """Chats, rendered by the model's chat template.

    Attributes:
        paths: path in the request of each chat.
        embeddings: of the request.
        card: of the model.
        special: put the tokenizer's special tokens around each chat.
    """

    chats: Sequence[list[dict[str, Any]]]
    paths: Sequence[str]
    renderer: Renderer
    cut: Truncation
    embeddings: Embeddings
    card: ModelCard
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any]
    special: bool

    def __len__(self) -> int:
        return len(self.chats)

    def weight(self, index: int) -> int:
        """As `Inputs.weight`."""
        return (
            sum(_weight(message.get("content")) for message in self.chats[index]) // _CHARACTERS + 1
        )

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        """As `Inputs.pieces`."""
        return [InputPiece(self._prompt(index)) for index in range(start, stop)]

    def _prompt(self, index: int) -> Prompt:
        messages, param = self.chats[index], self.paths[index]
        chat = read_messages(
            messages,
            self.embeddings.one,
            self.embeddings.media,
            named=[f"{param}[{number}].content" for number in range(len(messages))],
        )
        cut = self.cut.without(self.renderer.num_special_tokens if self.special else 0)
        prompt = self.renderer.chat(
            chat.messages,
            rows=chat.rows,
            media=chat.media_for(self.card),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
            keep=cut.keep,
            side=cut.side,
        )
        if not len(prompt):
            raise InvalidRequestError(f"the chat template writes nothing for {param}", param=param)
        prompt = cut.cut(prompt)
        if self.special:
            prompt = self.renderer.with_special_tokens(prompt)
        self.cut.check(len(prompt), param)
        return prompt


def _weight(content: object) -> int:
    """Return the approximate characters of a message's content, or as many as its media weigh."""
    if isinstance(content, str):
        return len(content)
    total = 0
    for part in content if isinstance(content, list) else ():
        kind = kind_of(part) if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in MEDIA_PARTS:
            total += _ITEM * _CHARACTERS
            continue
        text = part.get("text") if isinstance(part, dict) else part
        total += len(text) if isinstance(text, str) else 0
    return total


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """Ids or rows, already checked and truncated."""

    prompts: Sequence[Prompt]

    def __len__(self) -> int:
        return len(self.prompts)

    def weight(self, index: int) -> int:
        """As `Inputs.weight`."""
        return len(self.prompts[index])

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        """As `Inputs.pieces`."""
        return [InputPiece(prompt) for prompt in self.prompts[start:stop]]
