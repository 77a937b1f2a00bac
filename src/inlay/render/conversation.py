"""Messages in the form that chat templates read, with placeholder marks for embeddings."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inlay.errors import InvalidRequestError
from inlay.render.template import Reads

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields for a message's reasoning; templates read the first, some the second."""


ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of every chat; templates may name further ones."""


class PlaceholderMarks:
    """Placeholder texts for rows, and for the end of the last message, in a rendered template.

    They are digits only, which trimming, escaping, changes of case and JSON leave unchanged. They
    have 133 random bits, so that no text of a client can contain one.
    """

    _INDEX_DIGITS = 6

    def __init__(self, num_rows: int) -> None:
        if num_rows >= 10**self._INDEX_DIGITS:
            raise InvalidRequestError(
                f"a chat may have fewer than {10**self._INDEX_DIGITS} embeddings parts, got "
                f"{num_rows}",
                param="messages",
            )
        self._nonce = f"{secrets.randbelow(10**40):040}"
        self._num_rows = num_rows

    def rows(self, index: int) -> str:
        """Return the mark of rows `index`."""
        return f"{self._nonce}{index:0{self._INDEX_DIGITS}}"

    @property
    def end(self) -> str:
        """Mark of the end of the message to be continued.

        Its last character is a space, which shows whether the template trims.
        """
        return f"{self._nonce}{'9' * self._INDEX_DIGITS} "

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

    def replace(self, text: str, token: str) -> str:
        """Return `text` with every mark of rows replaced by `token`.

        Raises:
            InvalidRequestError: the template dropped a mark, doubled one, or changed their order.
        """
        before, found, after = self._split(text)
        if found != list(range(self._num_rows)):
            raise InvalidRequestError(self._complaint(found), param="messages")
        return token.join((before, *after))

    def hide(self, message: str) -> str:
        """Return an error message without marks."""
        before, _, after = self._split(message)
        return "<prompt_embeds>".join((before, *(text.removeprefix(" ") for text in after)))

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
        missing = sorted(set(range(self._num_rows)) - set(found))
        if missing:
            which = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            return (
                f"the chat template dropped {len(missing)} of {self._num_rows} prompt_embeds "
                f"parts (number {which}, from 0): it may not write content of that role, or of a "
                "list"
            )
        if len(found) > self._num_rows:
            return (
                f"the chat template wrote {self._num_rows} prompt_embeds parts {len(found)} times"
            )
        return "the chat template changed the order of the prompt_embeds parts"


def template_messages(
    messages: Sequence[Mapping[str, Any]],
    marks: PlaceholderMarks,
    *,
    num_rows: int,
    reads: Callable[[str], Reads],
    names: Callable[[str], bool],
    absent_content: Callable[[], Mapping[str, str | None]],
    continues: bool,
) -> list[dict[str, Any]]:
    """Return the messages for the template; `messages` are not changed.

    Fields that are None are left out. Reasoning is copied to each of its names. Arguments of tool
    calls, which clients send as text, become objects, because templates write them as JSON or
    iterate over them. A list of parts becomes text parts if the template supports several, else one
    text with line breaks between the parts, as in vLLM. Embeddings are joined to the text around
    them, in the same part, so that a text renders alike with some of it as embeddings.

    Args:
        messages: a part `{"type": "prompt_embeds", "index": i}` stands for rows `i`.
        marks: placeholders for rows.
        num_rows: number of rows.
        reads: returns the forms of content that the template supports for a role.
        names: returns True if a text is a literal of the template, as a further role is.
        absent_content: returns the content that the template expects in a message with only tool
            calls.
        continues: True to mark the end of the last message.

    Raises:
        InvalidRequestError: malformed messages, arguments that are no JSON object, or rows that
            are not named exactly once, in order.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    result = []
    indices: list[int] = []
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
            texts = _texts(content, f"messages[{number}].content", marks, indices)
            ready["content"] = _shape(texts, reads(role))
        elif isinstance(content, str):
            ready["content"] = content if reads(role).text else _shape([content], reads(role))
        elif content is not None:
            raise InvalidRequestError(
                f"content must be a string or a list of parts, got {type(content).__name__}",
                param=f"messages[{number}].content",
            )
        result.append(ready)
    if indices != list(range(num_rows)):
        raise InvalidRequestError(
            f"prompt_embeds parts name rows {indices[:8]}; each of the {num_rows} must be named "
            "once, in order",
            param="messages",
        )
    if continues:
        _mark_end(result[-1], marks)
    return result


def _texts(
    parts: Sequence[Any], where: str, marks: PlaceholderMarks, indices: list[int]
) -> list[str]:
    """Return the texts of a list of parts, with embeddings as marks joined to their neighbours.

    Appends the named rows to `indices`.
    """
    texts: list[str] = []
    glue = False
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "prompt_embeds" and isinstance(part.get("index"), int):
            indices.append(part["index"])
            text, embeds = marks.rows(part["index"]), True
        elif kind == "text" and isinstance(part.get("text"), str):
            text, embeds = part["text"], False
        else:
            raise InvalidRequestError(
                f"{where}[{number}] must be a part of type text or prompt_embeds",
                param=f"{where}[{number}]",
            )
        if texts and (glue or embeds):
            texts[-1] += text
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


__all__ = ["PlaceholderMarks", "template_messages"]
