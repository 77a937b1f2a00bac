"""Texts of a file as prompts: token ids as the model gets them, and which are the user's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from inlay.base.errors import InvalidRequestError
from inlay.client.embedder import PromptEmbedder
from inlay_audit.entities import FoundEntity, capitalised_names, entities_of

Floats: TypeAlias = npt.NDArray[np.float32]
Rng: TypeAlias = np.random.Generator
Ids: TypeAlias = npt.NDArray[np.int64]

_PROBES = ("0", "Zebra crossing?")
"""Two user messages that share neither their first nor their last token."""


@dataclass(frozen=True)
class Text:
    """One text as it was given.

    Attributes:
        text: a user's message, or a plain prompt.
        names: names in it, or None to have them found.
        others: other entities in it, likewise: numbers, addresses.
        answer: the right answer, where it is known.
    """

    text: str
    names: tuple[str, ...] | None = None
    others: tuple[str, ...] | None = None
    answer: str | None = None


@dataclass(frozen=True)
class EntitySpan:
    """Positions `start` to `stop` of a prompt that hold one entity; `name` is False for others."""

    start: int
    stop: int
    name: bool


@dataclass(frozen=True, eq=False)
class AuditPrompt:
    """A prompt of known text.

    Attributes:
        index: of its text in the file.
        ids: token ids, (n,), with the template.
        start: the user's tokens are `ids[start:stop]`; the others are everybody's.
        stop: see `start`.
        spans: entities among them.
        answer: the right answer, or None.
    """

    index: int
    ids: Ids
    start: int
    stop: int
    spans: tuple[EntitySpan, ...] = ()
    answer: str | None = None

    @property
    def user(self) -> Ids:
        """The user's tokens."""
        return self.ids[self.start : self.stop]


@dataclass(frozen=True, eq=False)
class Template:
    """Tokens that stand around every user's text, and that every attacker knows."""

    before: Ids
    after: Ids


class PromptMaker:
    """Makes prompts of texts with a model's tokenizer and, where it has one, chat template.

    Args:
        embedder: of the model.
        chat: a text is a user's message; False: a plain prompt. Unless set, a chat where the model
            has a template.

    Raises:
        InvalidRequestError: `chat`, and the model has no template.
    """

    def __init__(self, embedder: PromptEmbedder, chat: bool | None = None) -> None:
        self._renderer = embedder.renderer
        self.chat = bool(self._renderer.chat_templates) if chat is None else chat
        first, second = (self._ids(probe) for probe in _PROBES)
        before = _shared(first, second)
        after = _shared(first[before:][::-1], second[before:][::-1])
        self.template = Template(
            np.asarray(first[:before], np.int64),
            np.asarray(first[len(first) - after :], np.int64),
        )

    def prompts(self, texts: Sequence[Text]) -> list[AuditPrompt]:
        """A prompt for each text that has tokens, in order.

        Raises:
            InvalidRequestError: a text is too long for the model, or an entity does not stand in
                its text.
        """
        known = capitalised_names(each.text for each in texts)
        return [self._prompt(index, text, known) for index, text in enumerate(texts)]

    def _prompt(self, index: int, text: Text, known: frozenset[str]) -> AuditPrompt:
        ids = np.asarray(self._ids(text.text), np.int64)
        before, after = self.template.before, self.template.after
        start = _shared(ids.tolist(), before.tolist())
        stop = len(ids) - _shared(ids[start:].tolist()[::-1], after.tolist()[::-1])
        if stop <= start:
            raise InvalidRequestError(f"text {index + 1} has no tokens: leave it out")
        try:
            found = entities_of(text.text, text.names, text.others, known)
        except ValueError as error:
            raise InvalidRequestError(f"text {index + 1}: {error}") from error
        return AuditPrompt(
            index, ids, start, stop, self._spans(ids, start, stop, text.text, found), text.answer
        )

    def _ids(self, text: str) -> list[int]:
        if not self.chat:
            return list(self._renderer.encode(text))
        message: dict[str, Any] = {"role": "user", "content": text}
        return list(self._renderer.chat([message], add_generation_prompt=True).token_ids())

    def _spans(
        self, ids: Ids, start: int, stop: int, text: str, found: Sequence[FoundEntity]
    ) -> tuple[EntitySpan, ...]:
        """Positions of tokens that hold a character of an entity."""
        if not found:
            return ()
        # A token's end within the text; a token that is part of a character ends where that does.
        ends = [
            len(self._renderer.decode(ids[start : position + 1].tolist()))
            for position in range(start, stop)
        ]
        whole = self._renderer.decode(ids[start:stop].tolist())
        # Templates may strip a text; then its characters begin later.
        shift = text.find(whole.strip()) - (len(whole) - len(whole.lstrip())) if whole else 0
        begins = [0, *ends[:-1]]
        spans = []
        for each in found:
            low, high = each.start - shift, each.stop - shift
            inside = [
                start + position
                for position, (begin, end) in enumerate(zip(begins, ends, strict=True))
                if begin < high and end > low
            ]
            if inside:
                spans.append(EntitySpan(inside[0], inside[-1] + 1, each.name))
        return tuple(spans)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens at the beginning that both have."""
    count = 0
    for mine, other in zip(first, second, strict=False):
        if mine != other:
            break
        count += 1
    return count


MAX_CHARACTERS = 16_384
"""Of a text."""


class _PromptLine(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    names: tuple[str, ...] | None = None
    others: tuple[str, ...] | None = None
    answer: str | None = None


def read_texts(data: bytes, name: str) -> list[Text]:
    """The texts of a file; empty lines are left out.

    A file whose first line begins with a brace is one JSON object a line: `text`, and where known
    `names` and `others`, entities that stand in it, and `answer`.

    Raises:
        InvalidRequestError: not UTF-8, no text, a line that is no such object, a text too long.
    """
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not UTF-8 text: {error.reason}") from error
    objects = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = _of_object(line) if objects else Text(line)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(
                f"{name}, line {number}: {error}; a line is "
                '{"text": ..., "names": [...], "others": [...], "answer": ...}, all but the text '
                "optional"
            ) from error
        if len(text.text) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"{name}, line {number} has {len(text.text)} characters; allowed: at most "
                f"{MAX_CHARACTERS}. Cut it into pieces"
            )
        found.append(text)
    if not found:
        raise InvalidRequestError(f"{name} holds no text")
    return found


def split(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices of a random third, to be read, and of the rest, for attackers to learn from."""
    order = np.random.default_rng([seed, 0]).permutation(count).tolist()
    return sorted(order[: count // 3]), sorted(order[count // 3 :])


def _of_object(line: str) -> Text:
    read = msgspec.json.decode(line, type=_PromptLine)
    return Text(read.text, read.names, read.others, read.answer)
