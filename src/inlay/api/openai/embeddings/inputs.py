"""Inputs of a request for vectors, made into prompts in chunks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from inlay.api.generation.messages import read_messages
from inlay.api.generation.parts import MEDIA_PARTS, kind_of
from inlay.api.generation.truncation import Truncation
from inlay.base.errors import InvalidRequestError
from inlay.base.pace import yield_gil
from inlay.embedding.static import Weights, served_weights
from inlay.http.bodies.embeds import Embeddings
from inlay.messages.card import ModelCard
from inlay.messages.pooling import RoleCard
from inlay.messages.prompt import Prompt, Tokens
from inlay.render import Renderer
from inlay.render.score_template import ScoredText, ScoreTemplate
from inlay.render.texts import Range

CHUNK_INPUTS = 256
CHUNK_POSITIONS = 16 * 1024
"""Approximate size of a chunk: several batches, but small enough that the first starts soon."""

_CHARACTERS = 4
"""Typical characters of a token."""

_ITEM = 1024
"""Typical positions of an image or the like, in a part of a chat."""


class InputPiece(NamedTuple):
    """One input as a prompt.

    Attributes:
        prompt: of the input.
        second_from: position where the second text of a pair begins, else None.
        visible: the first positions that others see; None where they see all.
        ranges: characters of the text that each position is of, where they are wanted.
        truncated: True if a part of the input was cut off.
        static: weights that make its sparse vector of the prompt's ids, without the model.
        spans: as in `Pooling.spans`.
        begins: positions at which the parts of a split text begin.
    """

    prompt: Prompt
    second_from: int | None = None
    visible: int | None = None
    ranges: Sequence[Range] | None = None
    truncated: bool = False
    static: Weights | None = None
    spans: tuple[int, ...] = ()
    begins: tuple[int, ...] = (0,)


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
    form: RoleCard | None = None
    """Treatment of texts of their role."""
    ranges: bool = False
    """Tell the characters of each position."""

    def __len__(self) -> int:
        return len(self.texts)

    def weight(self, index: int) -> int:
        return len(self.texts[index]) // _CHARACTERS + 1

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        texts = self.texts[start:stop]
        if self.clips:
            texts = self.renderer.clipped(texts, self.clips[start:stop])
        one = len(self.prefixes) == 1
        prefixes = self.prefixes * len(texts) if one else self.prefixes[start:stop]
        given = [prefix + text for prefix, text in zip(prefixes, texts, strict=True)]
        if self.lower_case:
            given = [text.lower() for text in given]
        encoder, keep, static = self.renderer.texts, self._keep, self._static
        try:
            # One more than is kept tells whether all of a text was.
            found = encoder.encode(
                given,
                add_special_tokens=self._has_special,
                keep=None if keep is None else keep + 1,
                side=self.cut.side,
            )
            ranges: Sequence[Sequence[Range] | None] = [None] * len(given)
            if self.ranges:
                ranges = encoder.ranges(
                    given, add_special_tokens=self._has_special, keep=keep, side=self.cut.side
                )
        except InvalidRequestError as error:
            raise error.at("input") from None
        pieces = []
        for index, (ids, own) in enumerate(zip(found, ranges, strict=True), start):
            yield_gil()
            param = self.params[index] if self.params else f"input[{index}]"
            if not ids:
                raise InvalidRequestError(f"{param} has no tokens", param=param)
            piece = self._piece(ids, keep)._replace(static=static)
            self.cut.check(len(piece.prompt), param)
            if own is not None:
                prefix, text = prefixes[index - start], texts[index - start]
                shown = in_text(own, prefix, text, lowered=self.lower_case)
                piece = piece._replace(ranges=self._formed(shown, lambda _: None))
            pieces.append(piece)
        return pieces

    def room(self, prefix: str) -> int:
        """Return the tokens that a text may have behind its prompt `prefix`.

        Raises `InvalidRequestError` if there is no room.
        """
        room = self._limit - len(self._ids(prefix))
        if room < 1:
            raise InvalidRequestError(
                f"the model's prompt leaves no room for a text in {self._limit} positions"
            )
        return room

    def over(self, prefix: str, text: str) -> int:
        """Return the tokens by which a text behind its prompt is too long; 0 if it fits."""
        return max(0, len(self._ids(prefix + text)) - self._limit)

    def _ids(self, text: str) -> Sequence[int]:
        given = text.lower() if self.lower_case else text
        return self.renderer.texts.encode([given], add_special_tokens=self._has_special)[0]

    @property
    def _limit(self) -> int:
        """Positions of a text with its prompt and special tokens, without a role's marker."""
        form, limit = self.form, self.cut.limit
        if form is None:
            return limit
        return min(limit, form.at_most or limit) - _added(form)

    @property
    def _static(self) -> Weights | None:
        where = None if self.form is None else self.form.static
        return None if where is None else served_weights(Path(where))

    @property
    def _has_special(self) -> bool:
        return self.special and (self.form is None or self.form.static is None)

    @property
    def _keep(self) -> int | None:
        """Return the ids that are kept of a text, special tokens included; None for all."""
        form, keep = self.form, self.cut.keep
        if form is not None and form.at_most is not None:
            keep = min(form.at_most, self.cut.limit if keep is None else keep)
        return keep if keep is None or form is None else max(1, keep - _added(form))

    def _piece(self, ids: Sequence[int], keep: int | None) -> InputPiece:
        truncated = keep is not None and len(ids) > keep
        if truncated:
            before, after = self._special
            if len(ids) == before + after:
                ids = ids[:keep]
            elif self.cut.side == "right":
                ids = (*ids[: len(ids) - after - 1], *ids[len(ids) - after :])
            else:
                ids = (*ids[:before], *ids[before + 1 :])
        form = self.form
        if form is None:
            return InputPiece(Prompt.of(Tokens(ids)), truncated=truncated)
        formed = self._formed(ids, lambda id_: id_)
        known = len(ids) + _added(form)
        hides = len(formed) > known and not form.attend
        return InputPiece(
            Prompt.of(Tokens(formed)), visible=known if hides else None, truncated=truncated
        )

    @property
    def _special(self) -> tuple[int, int]:
        """Number of special tokens before and after a text."""
        before, after = self.renderer.texts.special_ids if self._has_special else ((), ())
        return len(before), len(after)

    def _formed(self, values: Sequence[Any], of_id: Callable[[int], Any]) -> Sequence[Any]:
        """Return one value a position, with `of_id` of those ids that a role adds."""
        form = self.form
        if form is None:
            return values
        found, (before, after) = list(values), self._special
        stop = len(found) - after
        found[stop:stop] = map(of_id, form.suffix)
        if form.marker is not None:
            found.insert(before, of_id(form.marker))
        return [*found, *[of_id(form.filler)] * (form.at_least - len(found))]


def _added(form: RoleCard) -> int:
    """Return the number of tokens that a role adds to each text."""
    return len(form.suffix) + (form.marker is not None)


def in_text(
    ranges: Sequence[Range], prefix: str, text: str, *, lowered: bool = False
) -> list[Range]:
    """Return the ranges of `text` that ranges of `prefix` and `text` are, None of the prefix alone.

    With `lowered`, ranges are of the lower case, whose characters may be more.
    """
    first = len(prefix.lower() if lowered else prefix)
    shift = None
    if lowered and len(text.lower()) != len(text):
        shift = [place for place, each in enumerate(text) for _ in each.lower()]
    found: list[Range] = []
    for each in ranges:
        if each is None or each[1] <= first:
            found.append(None)
            continue
        start, stop = max(0, each[0] - first), each[1] - first
        if shift is not None:
            start, stop = shift[start], shift[stop - 1] + 1
        found.append((start, stop))
    return found


@dataclass(frozen=True, slots=True)
class PairInputs:
    """Pairs of texts for a cross-encoder.

    `clips` is the number of first tokens that are kept of each side; 0 for all. `params` are the
    names of the pairs in the request; `param[i]` if empty.
    """

    pairs: Sequence[tuple[str, str]]
    renderer: Renderer
    cut: Truncation
    param: str
    clips: tuple[int, int] = (0, 0)
    params: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def weight(self, index: int) -> int:
        return sum(map(len, self.pairs[index])) // _CHARACTERS + 1

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
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
            param = self.params[index] if self.params else f"{self.param}[{index}]"
            self.cut.check(len(pair.ids), param)
        return [InputPiece(Prompt.of(Tokens(pair.ids)), pair.second_from) for pair in found]


@dataclass(frozen=True, slots=True)
class TemplatedPairs:
    """Pairs of texts, as a score template writes them; arguments as of `PairInputs`.

    `default` is the instruction where none is given. Of what is too long, the document is cut, and
    nothing of the template.
    """

    pairs: Sequence[tuple[str, str]]
    renderer: Renderer
    cut: Truncation
    param: str
    clips: tuple[int, int] = (0, 0)
    instruction: str | None = None
    default: str | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    def weight(self, index: int) -> int:
        return sum(map(len, self.pairs[index])) // _CHARACTERS + 1

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        template = ScoreTemplate(self.renderer.templates.choose(tools=False))
        found = []
        for index in range(start, stop):
            query, document = (
                self.renderer.clipped([text], [clip])[0]
                for text, clip in zip(self.pairs[index], self.clips, strict=True)
            )
            written = template.written(query, document, self.instruction, self.default)
            try:
                ids, truncated = self._ids(written)
            except InvalidRequestError as error:
                raise error.at(self.param) from None
            self.cut.check(len(ids), f"{self.param}[{index}]")
            found.append(InputPiece(Prompt.of(Tokens(ids)), truncated=truncated))
        return found

    def _ids(self, written: ScoredText) -> tuple[Sequence[int], bool]:
        encode, keep = self.renderer.texts.encode, self.cut.keep
        before, document, after = written
        if keep is None:
            return encode([before + document + after], add_special_tokens=False)[0], False
        around = sum(map(len, encode([before, after], add_special_tokens=False)))
        room, truncated = keep - around, False
        while True:
            if room < 0:
                raise InvalidRequestError(
                    f"the query and the score template have {around} tokens; {keep} are kept of "
                    "a pair, and only its document is cut",
                    param="truncate_prompt_tokens",
                )
            kept = self.renderer.clipped([document], [room])[0] if room else ""
            truncated |= len(kept) < len(document)
            ids = encode([before + kept + after], add_special_tokens=False)[0]
            if len(ids) <= keep:
                return ids, truncated
            room = room - max(1, len(ids) - keep)


@dataclass(frozen=True, slots=True)
class Chats:
    """Chats, rendered by the model's chat template.

    Attributes:
        paths: path in the request of each chat.
        embeddings: of the request.
        card: of the model.
        special: put the tokenizer's special tokens around each chat.
        bare: each chat is one message, whose content alone stands at its path.
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
    bare: bool = False

    def __len__(self) -> int:
        return len(self.chats)

    def weight(self, index: int) -> int:
        return (
            sum(_weight(message.get("content")) for message in self.chats[index]) // _CHARACTERS + 1
        )

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        return [self._piece(index) for index in range(start, stop)]

    def _piece(self, index: int) -> InputPiece:
        messages, param = self.chats[index], self.paths[index]
        chat = read_messages(
            messages,
            self.embeddings.one,
            self.embeddings.media,
            named=[f"{param}.content"]
            if self.bare
            else [f"{param}[{number}].content" for number in range(len(messages))],
        )
        cut = self.cut.without(self.renderer.num_special_tokens if self.special else 0)
        prompt = self.renderer.chat(
            chat.messages,
            rows=chat.rows,
            media=chat.media_for(self.card),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
            keep=None if cut.keep is None else cut.keep + 1,
            side=cut.side,
        )
        if not len(prompt):
            raise InvalidRequestError(f"the chat template writes nothing for {param}", param=param)
        whole, prompt = len(prompt), cut.cut(prompt)
        truncated = len(prompt) < whole
        if self.special:
            prompt = self.renderer.with_special_tokens(prompt)
        self.cut.check(len(prompt), param)
        return InputPiece(prompt, truncated=truncated)


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
    """Ids or rows, already checked and truncated; `truncated` says which were."""

    prompts: Sequence[Prompt]
    truncated: Sequence[bool]

    def __len__(self) -> int:
        return len(self.prompts)

    def weight(self, index: int) -> int:
        return len(self.prompts[index])

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        return [
            InputPiece(prompt, truncated=truncated)
            for prompt, truncated in zip(
                self.prompts[start:stop], self.truncated[start:stop], strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class Joined:
    """Inputs of several kinds, one after another."""

    parts: Sequence[Inputs]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def weight(self, index: int) -> int:
        for part in self.parts:
            if index < len(part):
                return part.weight(index)
            index -= len(part)
        raise IndexError(index)

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        found: list[InputPiece] = []
        for part in self.parts:
            first, last = max(0, start), min(stop, len(part))
            if first < last:
                found += part.pieces(first, last)
            start, stop = start - len(part), stop - len(part)
        return found
