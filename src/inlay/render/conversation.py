"""Messages in the form that chat templates read, with marks for embeddings and media."""

import json
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from inlay.errors import InvalidRequestError
from inlay.prompt import Segment
from inlay.render.template import Reads

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields for a message's reasoning; templates read the first, some the second."""


ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of every chat; templates may name further ones."""


MEDIA = ("image", "audio", "video")
"""Types of the parts that stand for media."""


class Shown(NamedTuple):
    """The form in which a model's chats show items of one kind.

    Attributes:
        kind: one of `MEDIA`.
        placeholder: text that the model's chat template writes for an item.
        before: text that the model's family puts before each item.
        after: the same after it.
    """

    kind: str
    placeholder: str
    before: str = ""
    after: str = ""


class ChatMedia(NamedTuple):
    """Media of a chat.

    Attributes:
        segments: positions of each item, in the order of the chat.
        shown: how each of them is shown.
    """

    segments: Sequence[Sequence[Segment]]
    shown: Sequence[Shown]


NO_MEDIA = ChatMedia((), ())
"""The media of a chat without any."""


class PlaceholderMarks:
    """Marks for embeddings, media, and the end of the last message, in a rendered template.

    They are digits only, which trimming, escaping, changes of case and JSON leave unchanged. They
    have 133 random bits, so that no text of a client can contain one. Embeddings have the first
    indices, media the next. A template that writes media itself is given no marks: its
    placeholders are numbered after it was rendered. Placeholders in a client's text are hidden from
    that by marks of their own, and are restored as text.
    """

    _INDEX_DIGITS = 6
    _LITERAL = 999_990
    _END = 999_999

    def __init__(self, num_rows: int, placeholders: Sequence[str] = ()) -> None:
        self.num_media = len(placeholders)
        if num_rows + self.num_media >= self._LITERAL:
            raise InvalidRequestError(
                f"a chat may have fewer than {self._LITERAL} embeddings and media, got "
                f"{num_rows + self.num_media}",
                param="messages",
            )
        self._nonce = f"{secrets.randbelow(10**40):040}"
        self._num_rows = num_rows
        self._placeholders = tuple(placeholders)
        self._kinds = tuple(dict.fromkeys(placeholders))
        self._written: list[int] = []

    def _mark(self, index: int) -> str:
        return f"{self._nonce}{index:0{self._INDEX_DIGITS}}"

    def rows(self, index: int) -> str:
        """Return the mark of rows `index`."""
        return self._mark(index)

    def media(self, index: int) -> str:
        """Return the mark of item `index`."""
        return self._mark(self._num_rows + index)

    def leave_to_template(self, index: int) -> None:
        """Note that the template itself writes the placeholder of item `index`."""
        self._written.append(index)

    @property
    def end(self) -> str:
        """Mark of the end of the message to be continued.

        Its last character is a space, which shows whether the template trims.
        """
        return f"{self._mark(self._END)} "

    def hide_placeholders(self, value: Any) -> Any:
        """Return a JSON value in which a client's own placeholder texts are marks."""
        if isinstance(value, str):
            for index, placeholder in enumerate(self._kinds):
                value = value.replace(placeholder, self._mark(self._LITERAL + index))
            return value
        if isinstance(value, Mapping):
            return {
                self.hide_placeholders(key): self.hide_placeholders(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide_placeholders(item) for item in value]
        return value

    def number_media(self, text: str) -> str:
        """Return `text` with marks in place of the template's own placeholders.

        Raises:
            InvalidRequestError: they are not those of the media, in order.
        """
        found = re.split("(" + "|".join(map(re.escape, self._kinds)) + ")", text)
        wrote, wanted = found[1::2], [self._placeholders[index] for index in self._written]
        for placeholder in self._kinds:
            times, items = wrote.count(placeholder), wanted.count(placeholder)
            if times != items:
                raise InvalidRequestError(
                    f"the chat template wrote {placeholder!r} {times} times for {items} items of "
                    "media",
                    param="messages",
                )
        # Kinds may change places with each other; items of one kind stay in order.
        waiting = {placeholder: deque[int]() for placeholder in self._kinds}
        for index in self._written:
            waiting[self._placeholders[index]].append(index)
        found[1::2] = [self.media(waiting[placeholder].popleft()) for placeholder in wrote]
        return "".join(found)

    def cut(self, text: str) -> str:
        """Return `text` up to the mark of the end.

        Raises:
            InvalidRequestError: the template did not write the mark exactly once.
        """
        times = text.count(self.end.rstrip())
        if times != 1:
            raise InvalidRequestError(
                "the final message cannot be continued: the chat template writes its content "
                f"{times} times",
                param="continue_final_message",
            )
        place = text.index(self.end.rstrip())
        # Without the space the template trims contents, so the end of this one is trimmed too.
        return text[:place] if text.startswith(self.end, place) else text[:place].rstrip()

    def replace(self, text: str, shown: Callable[[int], str]) -> tuple[str, list[int]]:
        """Return `text` with `shown(index)` for every mark, and the indices in their order.

        Media come after all embeddings in the indices, wherever they stand.

        Raises:
            InvalidRequestError: the template dropped a mark, doubled one, or changed the order of
                embeddings.
        """
        before, found, after = self._split(text)
        order = [index for index in found if not self._is_literal(index)]
        rows = [index for index in order if index < self._num_rows]
        total = self._num_rows + self.num_media
        if rows != list(range(self._num_rows)) or sorted(order) != list(range(total)):
            raise InvalidRequestError(self._complaint(order), param="messages")
        pieces = (
            (self._literal(index) if self._is_literal(index) else shown(index)) + rest
            for index, rest in zip(found, after, strict=True)
        )
        return "".join((before, *pieces)), order

    def hide(self, message: str) -> str:
        """Return an error message without marks."""
        before, found, after = self._split(message)
        pieces = (
            self._literal(index) + rest
            if self._is_literal(index)
            else "<prompt_embeds>" + rest.removeprefix(" ")
            for index, rest in zip(found, after, strict=True)
        )
        return "".join((before, *pieces))

    def _is_literal(self, index: int) -> bool:
        return 0 <= index - self._LITERAL < len(self._kinds)

    def _literal(self, index: int) -> str:
        return self._kinds[index - self._LITERAL]

    def _split(self, text: str) -> tuple[str, list[int], list[str]]:
        """Return the text before the first mark, and the index of each mark with the text after it.

        The index of an incomplete mark is -1.
        """
        # A regular expression would have to be compiled for each chat, which costs more than this.
        before, *rest = text.split(self._nonce)
        size = self._INDEX_DIGITS
        indices = [piece[:size] for piece in rest]
        found = [
            int(index) if len(index) == size and index.isdecimal() else -1 for index in indices
        ]
        return before, found, [piece[size:] for piece in rest]

    def _complaint(self, found: Sequence[int]) -> str:
        total = self._num_rows + self.num_media
        parts = "prompt_embeds parts" if not self.num_media else "prompt_embeds and media parts"
        missing = sorted(set(range(total)) - set(found))
        if missing:
            which = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            return (
                f"the chat template dropped {len(missing)} of {total} {parts} (number {which}, "
                "from 0): it may not write content of that role, or of a list"
            )
        if len(found) > total:
            return f"the chat template wrote {total} {parts} {len(found)} times"
        return "the chat template changed the order of the prompt_embeds parts"


def template_messages(
    messages: Sequence[Mapping[str, Any]],
    marks: PlaceholderMarks,
    *,
    num_rows: int,
    reads: Callable[[str], Reads],
    names: Callable[[str], bool],
    absent_content: Callable[[], Mapping[str, str | None]],
    media_part: Callable[[str, str], Mapping[str, Any] | None],
    continues: bool,
) -> list[dict[str, Any]]:
    """Return the messages for the template; `messages` are not changed.

    Fields that are None are left out. Reasoning is copied to each of its names. Arguments of tool
    calls, which clients send as text, become objects, because templates write them as JSON or
    iterate over them. A list of parts becomes text parts if the template supports several, else one
    text with line breaks between the parts, as in vLLM. Embeddings are joined to the text around
    them, in the same part, so that a text renders alike with some of it as embeddings. An item of
    media becomes a part that the template writes a placeholder for; where it writes none, a mark
    among the texts.

    Args:
        messages: a part `{"type": "prompt_embeds", "index": i}` stands for rows `i`, and
            `{"type": KIND, "index": i}` for an item of media.
        marks: marks of embeddings and images.
        num_rows: number of rows.
        reads: returns the forms of content that the template supports for a role.
        names: returns True if a text is a literal of the template, as a further role is.
        absent_content: returns the content that the template expects in a message with only tool
            calls.
        media_part: returns the part for which the template writes the placeholder of a kind of
            media in a message of a role, or None.
        continues: True to mark the end of the last message.

    Raises:
        InvalidRequestError: malformed messages, arguments that are no JSON object, or rows that
            are not named exactly once, in order.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    result = []
    indices: list[int] = []
    media: list[int] = []
    for number, message in enumerate(messages):
        ready = {name: value for name, value in message.items() if value is not None}
        role = ready.get("role")
        if not isinstance(role, str):
            raise InvalidRequestError(
                "a message must have a role", param=f"messages[{number}].role"
            )
        if role not in ROLES and not names(role):
            raise InvalidRequestError(
                f"messages[{number}].role must be one of {', '.join(ROLES)}, or a role that the "
                f"model's chat template names; got {role[:80]!r}",
                param=f"messages[{number}].role",
            )
        if role == "developer" and not any(reads(role)):
            # Older templates drop or refuse `developer`; its meaning is that of `system`.
            ready["role"] = role = "system"
        _name_reasoning(ready)
        content = ready.get("content")
        calls = ready.get("tool_calls")
        if isinstance(calls, list):
            where = f"messages[{number}].tool_calls"
            ready["tool_calls"] = [
                _open_arguments(call, f"{where}[{index}]") for index, call in enumerate(calls)
            ]
            if calls and content is None:
                ready |= absent_content()
        if isinstance(content, list):
            pieces = _pieces(content, f"messages[{number}].content", marks, indices)
            found = [piece for piece in pieces if isinstance(piece, _Item)]
            media += [item.number for item in found]
            parts = {kind: media_part(role, kind) for kind in {item.kind for item in found}}
            ready["content"] = _content(pieces, parts, reads(role), marks)
        elif isinstance(content, str):
            ready["content"] = content if reads(role).text else _shape([content], reads(role))
        elif content is not None:
            raise InvalidRequestError(
                f"content must be a string or a list of parts, got {type(content).__name__}",
                param=f"messages[{number}].content",
            )
        result.append(ready)
    _check_named(indices, num_rows, "prompt_embeds", "rows")
    _check_named(media, marks.num_media, "media", "items")
    if marks.num_media:
        result = marks.hide_placeholders(result)
    if continues:
        _mark_end(result[-1], marks)
    return result


def _check_named(found: Sequence[int], count: int, kind: str, things: str) -> None:
    if list(found) != list(range(count)):
        raise InvalidRequestError(
            f"{kind} parts name {things} {found[:8]}; each of the {count} must be named once, in "
            "order",
            param="messages",
        )


class _Item(NamedTuple):
    """An item of media among texts."""

    kind: str
    number: int


def _content(
    pieces: "Sequence[str | _Item]",
    parts: Mapping[str, Mapping[str, Any] | None],
    reads: Reads,
    marks: PlaceholderMarks,
) -> str | list[dict[str, Any]]:
    """Return pieces in the form that the template supports, media as the `parts` of their kinds."""
    ready: list[str | dict[str, Any]] = []
    for piece in pieces:
        part = parts[piece.kind] if isinstance(piece, _Item) else None
        if isinstance(piece, str):
            ready.append(piece)
        elif part is None:
            ready.append(marks.media(piece.number))
        else:
            marks.leave_to_template(piece.number)
            ready.append(dict(part))
    texts = [piece for piece in ready if isinstance(piece, str)]
    if len(texts) == len(ready):
        return _shape(texts, reads)
    return [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in ready]


def _pieces(
    parts: Sequence[Any], where: str, marks: PlaceholderMarks, indices: list[int]
) -> "list[str | _Item]":
    """Return a list of parts as texts and items of media.

    Embeddings are marks, joined to their neighbours; the named rows are appended to `indices`.
    """
    texts: list[str | _Item] = []
    glue = False
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in MEDIA and isinstance(part.get("index"), int):
            texts.append(_Item(kind, part["index"]))
            glue = False
            continue
        if kind == "prompt_embeds" and isinstance(part.get("index"), int):
            indices.append(part["index"])
            text, embeds = marks.rows(part["index"]), True
        elif kind == "text" and isinstance(part.get("text"), str):
            text, embeds = part["text"], False
        else:
            raise InvalidRequestError(
                f"{where}[{number}] must be a part of type text, prompt_embeds or "
                f"{', '.join(MEDIA)}",
                param=f"{where}[{number}]",
            )
        last = texts[-1] if texts else None
        if isinstance(last, str) and (glue or embeds):
            texts[-1] = last + text
        else:
            texts.append(text)
        glue = embeds
    return texts


def _shape(texts: Sequence[str], reads: Reads) -> str | list[dict[str, Any]]:
    """Return the texts in the richest form of content that the template supports."""
    if texts and reads.parts:
        return [{"type": "text", "text": text} for text in texts]
    joined = "\n".join(texts)
    return [{"type": "text", "text": joined}] if reads.part and not reads.text else joined


def _name_reasoning(message: dict[str, Any]) -> None:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
        message.setdefault("thinking", reasoning)


def _open_arguments(call: Any, where: str) -> Any:
    """Return a tool call with its arguments as an object.

    Raises `InvalidRequestError` if they are no object.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or arguments is None or isinstance(arguments, dict):
        return call
    param = f"{where}.function.arguments"
    if not isinstance(arguments, str):
        raise InvalidRequestError(
            f"{param} must be a string with a JSON object, got {type(arguments).__name__}",
            param=param,
        )
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{param} must be a JSON object, got {arguments[:40]!r}: {error}", param=param
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{param} must be a JSON object, got {arguments[:40]!r}, a {type(value).__name__}",
            param=param,
        )
    return {**call, "function": {**function, "arguments": value}}


def _mark_end(message: dict[str, Any], marks: PlaceholderMarks) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + marks.end
    elif isinstance(content, list) and "text" not in content[-1]:
        raise InvalidRequestError(
            "the final message cannot be continued: it ends with media",
            param="continue_final_message",
        )
    elif isinstance(content, list):
        message["content"] = [
            *content[:-1],
            {"type": "text", "text": content[-1]["text"] + marks.end},
        ]
    else:
        raise InvalidRequestError(
            "the final message cannot be continued: it has no content",
            param="continue_final_message",
        )
