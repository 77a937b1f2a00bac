"""Messages as clients send them to messages as chat templates read them, with marks where embeddings go."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inlay.errors import InvalidRequestError
from inlay.render.template import Reads

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message carries its reasoning; templates read the first, some the second."""


ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of every chat; templates may name further ones."""


class PlaceholderMarks:
    """Texts that stand for rows while a template is rendered, and one for the place where the last message ends.

    They are digits alone, which trimming, escaping, changing case and writing as JSON all leave as
    they are, and 133 random bits make them such that no text sent beforehand can hold one.
    """

    _INDEX_DIGITS = 6

    def __init__(self, num_rows: int) -> None:
        if num_rows >= 10**self._INDEX_DIGITS:
            raise InvalidRequestError(
                f"a chat may have fewer than {10**self._INDEX_DIGITS} embeddings parts, got {num_rows}",
                param="messages",
            )
        self._nonce = f"{secrets.randbelow(10**40):040}"
        self._num_rows = num_rows

    def rows(self, index: int) -> str:
        """The mark of rows `index`."""
        return f"{self._nonce}{index:0{self._INDEX_DIGITS}}"

    @property
    def end(self) -> str:
        """The mark of the end of the message to be continued.

        Its last character is a space, to see whether it was trimmed.
        """
        return f"{self._nonce}{'9' * self._INDEX_DIGITS} "

    def cut(self, text: str) -> str:
        """`text` up to the mark of the end.

        Raises:
            InvalidRequestError: the template did not write it, or not only once.
        """
        times = text.count(self.end.rstrip())
        if times != 1:
            raise InvalidRequestError(
                f"the final message cannot be continued: the chat template writes its content {times} times",
                param="continue_final_message",
            )
        place = text.index(self.end.rstrip())
        # Without the space the template trims what it writes, so the content's own end is trimmed
        # too.
        return text[:place] if text.startswith(self.end, place) else text[:place].rstrip()

    def replace(self, text: str, token: str) -> str:
        """`text` with every mark of rows replaced by `token`.

        Raises:
            InvalidRequestError: the template dropped a mark, doubled one, or changed their order.
        """
        before, found, after = self._split(text)
        if found != list(range(self._num_rows)):
            raise InvalidRequestError(self._complaint(found), param="messages")
        return token.join((before, *after))

    def hide(self, message: str) -> str:
        """An error message without marks."""
        before, _, after = self._split(message)
        return "<prompt_embeds>".join((before, *(text.removeprefix(" ") for text in after)))

    def _split(self, text: str) -> tuple[str, list[int], list[str]]:
        """What stands before the first mark, and the index of each and what stands after it.

        -1 for one that is cut short.
        """
        # A regular expression would be compiled for each chat, which takes longer than all else
        # that is done with marks.
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
                f"the chat template dropped {len(missing)} of {self._num_rows} prompt_embeds parts (number {which}, "
                "from 0): it may not write content of that role, or of a list"
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
    """Messages for the template; `messages` are left as they are.

    Fields that are None are left out, reasoning is found under each of its names, and tool calls'
    arguments, which clients send as text, become the objects they say, since templates write them
    as JSON again or go through them. Content that is a list becomes text parts where the template
    reads several, else one text with line breaks between the parts, as vLLM has it. Embeddings
    stand directly beside the text around them, in the same part: a text and the same text with some
    of it as embeddings render alike.

    Args:
        messages: a part `{"type": "prompt_embeds", "index": i}` stands for rows `i`.
        marks: where rows go.
        num_rows: how many rows there are.
        reads: the forms of content the template writes out, by role.
        names: whether the template has a literal, as it has of the roles that few know.
        absent_content: what the template takes for the content of a message that has only tool
            calls.
        continues: the last message is marked where it ends.

    Raises:
        InvalidRequestError: not messages, arguments that are no JSON object, or rows named twice,
            never, or out of order.
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
                f"messages[{number}].role must be one of {', '.join(ROLES)}, or a role that the model's chat template names; "
                f"got {role[:80]!r}",
                param=f"messages[{number}].role",
            )
        if role == "developer" and not any(reads(role)):
            # Templates from before there were developers pass them over or refuse them; to a model
            # both are one voice.
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
            f"prompt_embeds parts name rows {indices[:8]}; each of the {num_rows} must be named once, in order",
            param="messages",
        )
    if continues:
        _mark_end(result[-1], marks)
    return result


def _texts(
    parts: Sequence[Any], where: str, marks: PlaceholderMarks, indices: list[int]
) -> list[str]:
    """The texts of a list of parts, embeddings as marks glued to their neighbours.

    Appends the rows named to `indices`.
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
    """Texts in the form that shows most of what they are."""
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
    """A tool call with its arguments as an object.

    Raises `InvalidRequestError` when they are none.
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
