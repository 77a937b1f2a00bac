"""Renderers of model directories: text and chats to prompts, ids to text."""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.base.pace import reserved
from inlay.base.single_flight import SingleFlight
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Prompt, Rows, Segment, Tokens
from inlay.render.conversation import NO_MEDIA, ChatMedia, template_messages
from inlay.render.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    UnspacedDetokenizer,
    WindowDetokenizer,
)
from inlay.render.ends import End, Side, end_of
from inlay.render.long_text import LONG, MEMORY_OF_A_CHARACTER, encode_long
from inlay.render.marks import PlaceholderMarks
from inlay.render.template import ChatTemplates, read_template
from inlay.render.texts import Pair, TextEncoder
from inlay.render.tokenizer import load_tokenizer
from inlay.render.turns import say_after_calls
from inlay.render.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

_NO_MARKS = PlaceholderMarks(0)
"""Of chats that are text alone: none is written."""

_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
    }
)
"""Template variables that are fields of the request."""


class Renderer:
    """Tokenizer and chat template of a model.

    Every method is thread-safe; tokenizing releases the interpreter's lock. A megabyte of text
    takes one to two seconds: call it off the event loop for long texts. Those are tokenized within
    bounded memory, and no further when nobody waits (`long_text`).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        config: Mapping[str, Any],
        *,
        max_positions: int | None = None,
    ) -> None:
        self.tokenizer_config = config
        """The model's `tokenizer_config.json`."""
        self._tokenizer = tokenizer
        self.templates = templates
        """The model's chat templates."""
        self._max_positions = max_positions
        self._vocabulary = Vocabulary(tokenizer)
        self._with_rows: _RowsTokenizer | None = None
        self._texts: TextEncoder | None = None
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        chat_template: str | None = None,
        max_positions: int | None = None,
    ) -> "Renderer":
        """Read the tokenizer and the chat template of a model directory.

        Args:
            path: the directory.
            chat_template: text of a template that replaces the model's own.
            max_positions: a long text that exceeds it is refused before all of it is tokenized.
                The caller still has to check the length of the result.

        Raises:
            InvalidRequestError: no usable tokenizer, or `chat_template` is not a valid template.
        """
        directory = Path(path)
        loaded = load_tokenizer(directory)
        if chat_template is None:
            templates = ChatTemplates.load(directory, loaded.config, loaded.special_tokens)
        else:
            templates = ChatTemplates({"default": chat_template}, loaded.special_tokens)
            templates.choose(tools=False).compiled()
        return cls(loaded.tokenizer, templates, loaded.config, max_positions=max_positions)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id.

        The model's embedding table may have more rows.
        """
        return self._vocabulary.size

    @property
    def vocabulary_id(self) -> bytes:
        """`Vocabulary.identity`; computed once, in some 0.1 s of a large vocabulary."""
        return self._vocabulary.identity

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
        side: Side = "left",
    ) -> tuple[int, ...]:
        """Return the ids of a text; special tokens written in it become their ids.

        Args:
            text: any text.
            add_special_tokens: add those the tokenizer puts around a text, such as a
                beginning-of-text token.
            keep: number of ids wanted, or None for all. Only that end of a long text is tokenized:
                more ids may be returned and, as `end_of` says, for some texts fewer.
            side: the side that is cut off.

        Raises:
            InvalidRequestError: the tokenized text holds unpaired surrogates.
            ContextLengthError: all ids are wanted, and there are certainly more than
                `max_positions`.
        """
        if keep is not None:
            return tuple(self.end(text, keep, add_special_tokens=add_special_tokens, side=side).ids)
        if len(text) <= LONG:
            return _encode(self._tokenizer, text, add_special_tokens=add_special_tokens)
        (ids,) = self.encode_texts([text], add_special_tokens=add_special_tokens)
        return ids

    def end(
        self, text: str, keep: int, *, add_special_tokens: bool = True, side: Side = "left"
    ) -> End:
        """Return at least `keep` ids of one end of a text, and whether they are all of it.

        Arguments and errors as `encode`.
        """
        return self.texts.end(text, add_special_tokens=add_special_tokens, keep=keep, side=side)

    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
        side: Side = "right",
    ) -> list[tuple[int, ...]]:
        """Return the ids of each of many texts.

        Arguments and errors as `TextEncoder.encode`, and `ContextLengthError` as `encode`.
        """
        return self.texts.encode(texts, add_special_tokens=add_special_tokens, keep=keep, side=side)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, keep: int | None = None, side: Side = "right"
    ) -> list[Pair]:
        """Return the ids of each of many pairs.

        Arguments and errors as `TextEncoder.pairs`, and `ContextLengthError` as `encode`.
        """
        return self.texts.pairs(pairs, keep=keep, side=side)

    def clipped(self, texts: Sequence[str], tokens: Sequence[int]) -> list[str]:
        """Return the beginning of each text; arguments and errors as `TextEncoder.clipped`."""
        return self.texts.clipped(texts, tokens)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        rows: Sequence[Rows | Tokens] = (),
        media: ChatMedia = NO_MEDIA,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        keep: int | None = None,
        side: Side = "left",
    ) -> Prompt:
        """Return the prompt of a chat.

        Text of a message is never taken for embeddings or images; it is split only next to them.

        Args:
            messages: as OpenAI's; a content part `{"type": "prompt_embeds", "index": i}` stands for
                `rows[i]`, and `{"type": KIND, "index": i}` for an item of media.
            rows: each is named by one part, in order; ids stand in a prompt as rows do, as they
                are.
            media: likewise.
            tools: as OpenAI's, for the template.
            add_generation_prompt: end where the assistant's answer begins.
            continue_final_message: end where the last message's content ends.
            template_kwargs: further variables for the template.
            keep: number of positions wanted, or None for all; as for `encode`.
            side: the side that is cut off.

        Raises:
            InvalidRequestError: the messages are malformed, the model has no template, or the
                template refuses the messages, fails on them, or leaves out embeddings or images.
            ContextLengthError: all positions are wanted, and its text certainly takes more than
                `max_positions`.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        taken = sorted(_RESERVED & (template_kwargs or {}).keys())
        if taken:
            raise InvalidRequestError(
                f"{taken[0]} is not a variable for the template but a field of the request",
                param="chat_template_kwargs",
            )
        template = self.templates.choose(tools=bool(tools))
        marks = _NO_MARKS
        if rows or media.shown or continue_final_message:
            marks = PlaceholderMarks(len(rows), [shown.placeholder for shown in media.shown])
        placeholders = {shown.kind: shown.placeholder for shown in media.shown}
        prepared = template_messages(
            messages,
            marks,
            num_rows=len(rows),
            template=template,
            tools=bool(tools),
            media_part=lambda role, kind: template.media_part(role, kind, placeholders[kind]),
            continues=continue_final_message,
        )
        variables = template_kwargs or {}
        if media.segments:
            tools, variables = marks.hide_placeholders((tools, variables))
        render = partial(
            template.render,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        try:
            text = _render(render, prepared)
        except InvalidRequestError as error:
            raise InvalidRequestError(marks.hide(error.message), param=error.param) from error
        if continue_final_message:
            text = marks.cut(text)
        if media.segments:
            text = marks.number_media(text)
        elif not rows:
            return Prompt.of(
                Tokens(self.encode(text, add_special_tokens=False, keep=keep, side=side))
            )
        return self._rows_tokenizer().prompt(text, marks, rows, media, keep=keep, side=side)

    def with_special_tokens(self, prompt: Prompt) -> Prompt:
        """Return a prompt between the special tokens that the tokenizer puts around a text."""
        before, after = self.texts.special_ids
        return Prompt.of(Tokens(before), *prompt.segments, Tokens(after))

    @property
    def num_special_tokens(self) -> int:
        """Number of special tokens that the tokenizer puts around a text."""
        return sum(map(len, self.texts.special_ids))

    def template_variables(self, *, tools: bool) -> frozenset[str]:
        """Return the variables that the chat template, with or without tools, reads.

        Raises:
            InvalidRequestError: the model has no template, or no valid one.
        """
        return self.templates.choose(tools=tools).variables()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids; ids without a token are ignored.

        Raises:
            InvalidRequestError: an id is negative or does not fit into 32 bits.
        """
        return self._vocabulary.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        keep: Collection[str] = frozenset(),
    ) -> Detokenizer:
        """Return a new detokenizer for one sequence.

        Args:
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: False leaves out the spaces that the tokenizer puts
                between consecutive added tokens, if none are skipped; as in vLLM.
            keep: tokens that are never skipped.
        """
        if (
            not spaces_between_special_tokens
            and not skip_special_tokens
            and not self._vocabulary.byte_level
        ):
            return UnspacedDetokenizer(self._vocabulary)
        skipped = self._vocabulary.special if skip_special_tokens else frozenset[int]()
        if skipped and keep:
            skipped -= {self._tokenizer.token_to_id(token) for token in keep}
        kind = ByteLevelDetokenizer if self._vocabulary.byte_level else WindowDetokenizer
        return kind(self._vocabulary, skipped=skipped)

    @property
    def chat_templates(self) -> tuple[str, ...]:
        """Texts of the chat templates, the one for tools first; empty if the model has none."""
        return self.templates.sources

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        id_: int | None = self._tokenizer.token_to_id(token)
        return id_

    def is_added(self, id_: int) -> bool:
        return id_ in self._vocabulary.added

    def token(self, id_: int) -> str | None:
        """Return the token of an id as the vocabulary spells it, such as `Ġa`, or None."""
        return self._vocabulary.token(id_)

    def token_text(self, id_: int) -> str:
        """Return the text of an id inside a text, with its leading space.

        It is U+FFFD for a part of a character.
        """
        return self._vocabulary.text(id_)

    def token_bytes(self, id_: int) -> list[int]:
        """Return the bytes of an id, which may be a part of a character; empty without a token."""
        return list(self._vocabulary.data(id_))

    @property
    def texts(self) -> TextEncoder:
        """The tokenizer of many texts at once."""
        with self._lock:
            if self._texts is None:
                self._texts = TextEncoder(self._tokenizer, max_positions=self._max_positions)
            return self._texts

    def _rows_tokenizer(self) -> "_RowsTokenizer":
        with self._lock:
            if self._with_rows is None:
                self._with_rows = _RowsTokenizer(self._tokenizer, self._max_positions)
            return self._with_rows


class _Key(NamedTuple):
    path: str
    max_positions: int


class Renderers:
    """Renderers by model directory. Each is loaded once, in a thread.

    Args:
        chat_template: a template that replaces the models' own, as `read_template` takes it, or
            None.
        served: the directories whose renderers are kept when another is loaded.
    """

    def __init__(self, chat_template: str | None, served: Callable[[], Collection[str]]) -> None:
        self._served = served
        self._template = None if chat_template is None else read_template(chat_template)
        self._loaded: dict[_Key, Renderer] = {}
        self._loading: SingleFlight[_Key, Renderer] = SingleFlight(finishes=True)

    async def of(self, card: ModelCard) -> Renderer:
        """Return the renderer of the model of `card`.

        Raises `EngineError` if its directory has no usable tokenizer here; the log says why.
        """
        key = _Key(card.path, card.limits.max_model_len)
        renderer = self._loaded.get(key)
        if renderer is not None:
            return renderer
        return await self._loading.run(key, partial(self._load, key))

    async def _load(self, key: _Key) -> Renderer:
        renderer = self._loaded[key] = await asyncio.to_thread(self._read, key)
        served = {key.path, *self._served()}
        for other in [other for other in self._loaded if other.path not in served]:
            del self._loaded[other]
        return renderer

    def _read(self, key: _Key) -> Renderer:
        try:
            return Renderer.load(
                key.path, chat_template=self._template, max_positions=key.max_positions
            )
        except InlayError as error:
            # A fault of the server: the client is not shown the paths of its files.
            _log.error("cannot load a tokenizer or chat template: %s", error.message)
            raise EngineError(
                "this server cannot read the model's tokenizer or chat template"
            ) from error


def _render(
    render: Callable[[Sequence[Mapping[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
) -> str:
    """Render messages, in other turns where the template refuses them as they are."""
    try:
        return render(messages)
    except InvalidRequestError as error:
        others = say_after_calls(messages)
        # An error without a cause is a limit.
        if len(others) == len(messages) or error.__cause__ is None:
            raise
        with suppress(InvalidRequestError):
            return render(others)
        raise


class _RowsTokenizer:
    """A copy of a tokenizer with one more special token, as placeholder for rows and images.

    Text next to a special token is tokenized as if it stood alone. The token's text is random and
    never leaves this object.
    """

    def __init__(self, tokenizer: Tokenizer, max_positions: int | None) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._max_positions = max_positions
        self._text = f"<rows {secrets.token_hex(16)}>"
        self._tokenizer.add_special_tokens([AddedToken(self._text, normalized=False, special=True)])
        self._id = self._tokenizer.token_to_id(self._text)

    def prompt(
        self,
        text: str,
        marks: PlaceholderMarks,
        rows: Sequence[Rows | Tokens],
        media: ChatMedia,
        *,
        keep: int | None,
        side: Side,
    ) -> Prompt:
        """Return the prompt of a rendered text, with rows and images in place of their marks.

        With `keep`, it is one end of it with at least as many positions.
        """

        def shown(index: int) -> str:
            if index < len(rows):
                return self._text
            item = media.shown[index - len(rows)]
            return f"{item.before}{self._text}{item.after}"

        whole, order = marks.replace(text, shown)
        items: list[Sequence[Segment]] = [*([part] for part in rows), *media.segments]
        encode = partial(_encode, self._tokenizer, add_special_tokens=False)
        # A mark counts as one position, so there are never too few.
        if keep is None:
            ids: Sequence[int] = encode_long(encode, whole, self._max_positions)
        else:
            ids = end_of(partial(encode_long, encode), whole, keep, side).ids
        count = ids.count(self._id)
        segments: list[Segment] = []
        start = 0
        for index in order[:count] if side == "right" else order[len(order) - count :]:
            place = ids.index(self._id, start)
            segments += [Tokens(ids[start:place]), *items[index]]
            start = place + 1
        segments.append(Tokens(ids[start:]))
        return Prompt.of(*segments)


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    # The batch form leaves out offsets, which are not needed and take two thirds of the time.
    try:
        with reserved(MEMORY_OF_A_CHARACTER * len(text)):
            (made,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return tuple(made.ids)
    except TypeError as error:
        raise InvalidRequestError(
            "text must be valid Unicode, without unpaired surrogates"
        ) from error
