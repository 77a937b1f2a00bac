"""Marks for what stands for itself in a rendered template: embeddings, media, a message's end."""

import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inlay.base.errors import InvalidRequestError


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
                "from 0): it may not write reasoning, content of that role, or of a list"
            )
        if len(found) > total:
            return f"the chat template wrote {total} {parts} {len(found)} times"
        return "the chat template changed the order of the prompt_embeds parts"
