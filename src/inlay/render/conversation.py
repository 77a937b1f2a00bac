"""Messages in the form that chat templates read, with marks for embeddings and media."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Segment
from inlay.render.arguments import read_arguments
from inlay.render.marks import PlaceholderMarks
from inlay.render.template import ChatTemplate, Reads
from inlay.render.turns import REASONING, Holds, name_reasoning

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of every chat; templates may name further ones."""


MEDIA = ("image", "audio", "video")
"""Types of the parts that stand for media."""


class MediaForm(NamedTuple):
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
    shown: Sequence[MediaForm]


NO_MEDIA = ChatMedia((), ())
"""The media of a chat without any."""


def template_messages(
    messages: Sequence[Mapping[str, Any]],
    marks: PlaceholderMarks,
    *,
    num_rows: int,
    template: ChatTemplate,
    tools: bool,
    media_part: Callable[[str, str], Mapping[str, Any] | None],
    continues: bool,
) -> list[dict[str, Any]]:
    """Return the messages for the template; `messages` are not changed.

    Fields that are None are left out; no content is an empty text. A turn of the assistant is said
    in the form that the template writes whole (`inlay.render.turns`). Arguments of tool calls,
    which clients send as text, become objects, because templates write them as JSON or
    iterate over them. A list of parts becomes text parts if the template supports several, else one
    text with line breaks between the parts, as in vLLM. Embeddings are joined to the text around
    them, in the same part, so that a text renders alike with some of it as embeddings. An item of
    media becomes a part that the template writes a placeholder for; where it writes none, a mark
    among the texts.

    Args:
        messages: a part `{"type": "prompt_embeds", "index": i}` stands for rows `i`, and
            `{"type": KIND, "index": i}` for an item of media. Reasoning is text, or a list of parts
            that are text and rows.
        marks: marks of embeddings and images.
        num_rows: number of rows.
        template: that reads the messages.
        tools: True if it reads tools too.
        media_part: returns the part for which the template writes the placeholder of a kind of
            media in a message of a role, or None.
        continues: True to mark the end of the last message.

    Raises:
        InvalidRequestError: malformed messages, calls or results that the template leaves out, or
            rows that are not named exactly once, in order.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    said = _Said()
    indices: list[int] = []
    media: list[int] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        ready = {name: value for name, value in message.items() if value is not None}
        role = ready["role"] = _role(ready.get("role"), where, template)
        reads = template.reads(role)
        reasoning = next((ready.pop(name) for name in REASONING if ready.get(name)), None)
        if isinstance(reasoning, list):
            thoughts = _pieces(reasoning, f"{where}.reasoning", marks, indices)
            reasoning = "\n".join(piece for piece in thoughts if isinstance(piece, str))
        if reasoning:
            ready["reasoning"] = reasoning
        calls = ready.pop("tool_calls", None)
        if calls:
            ready["tool_calls"] = [
                _open_arguments(call, f"{where}.tool_calls[{index}]")
                for index, call in enumerate(calls)
            ]
        content = ready.get("content", "")
        if isinstance(content, list):
            pieces = _pieces(content, f"{where}.content", marks, indices)
            found = [piece for piece in pieces if isinstance(piece, _Item)]
            media += [item.number for item in found]
            parts = {kind: media_part(role, kind) for kind in {item.kind for item in found}}
            ready["content"] = _content(pieces, parts, reads, marks)
        elif isinstance(content, str):
            ready["content"] = reads.say(content) if content or role != "assistant" else ""
        else:
            raise InvalidRequestError(
                f"content must be a string or a list of parts, got {type(content).__name__}",
                param=f"{where}.content",
            )
        if calls and isinstance(content, str) and not content.strip():
            # White space beside calls is layout, and would be a turn of its own.
            ready["content"] = ""
        if role == "assistant":
            said.turn(_turn(ready, where, template, tools))
        elif role == "tool":
            said.result(ready)
        else:
            said.turn([name_reasoning(ready) if reasoning else ready])
        if role == "tool" and template.loses_results:
            raise InvalidRequestError(
                f"{where}: the model's chat template writes no messages of the role 'tool'",
                param=where,
            )
    result = said.all()
    _check_named(indices, num_rows, "prompt_embeds", "rows")
    _check_named(media, marks.num_media, "media", "items")
    if marks.num_media:
        result = marks.hide_placeholders(result)
    if continues:
        _mark_end(result[-1], marks)
    return result


def _role(role: object, where: str, template: ChatTemplate) -> str:
    """Return the role of a message in the template."""
    if not isinstance(role, str):
        raise InvalidRequestError("a message must have a role", param=f"{where}.role")
    if role not in ROLES and not template.names(role):
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, or a role that the model's chat "
            f"template names; got {role[:80]!r}",
            param=f"{where}.role",
        )
    if role == "developer" and not any(template.reads(role)):
        # Older templates drop or refuse `developer`; its meaning is that of `system`.
        return "system"
    return role


def _turn(
    turn: dict[str, Any], where: str, template: ChatTemplate, tools: bool
) -> list[dict[str, Any]]:
    """Return the messages that say a turn of the assistant to the template."""
    form = template.form_of(Holds.of(turn), tools=tools)
    if form is None:
        raise InvalidRequestError(
            f"{where}: the model's chat template writes neither tool calls nor text of the "
            "assistant: what this turn holds would be lost",
            param=where,
        )
    return form.say(turn, template.reads("assistant").say)


class _Said:
    """Messages for a template. Calls of a turn that are messages of their own wait for results.

    So each stands before its result, whose function some templates name by the last call.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._called: set[object] = set()
        self._waiting: list[dict[str, Any]] = []

    def turn(self, messages: Sequence[dict[str, Any]]) -> None:
        """Add the messages of one turn."""
        self._call(len(self._waiting))
        first = next(
            (number for number, each in enumerate(messages) if "tool_calls" in each), len(messages)
        )
        self._waiting = list(messages[first + 1 :])
        self._called = set()
        for message in messages[: first + 1]:
            self._add(message)

    def result(self, message: dict[str, Any]) -> None:
        """Add the result of a call, behind that call if it waits."""
        id_ = message.get("tool_call_id")
        if not (isinstance(id_, str) and id_ in self._called):
            known = [
                number
                for number, each in enumerate(self._waiting)
                if each["tool_calls"][0].get("id") == id_
            ]
            self._call(known[0] + 1 if known else len(self._waiting))
        self._messages.append(message)

    def all(self) -> list[dict[str, Any]]:
        """Return all messages."""
        self._call(len(self._waiting))
        return self._messages

    def _call(self, count: int) -> None:
        for message in self._waiting[:count]:
            self._add(message)
        del self._waiting[:count]

    def _add(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self._called |= {
            call["id"] for call in message.get("tool_calls", ()) if isinstance(call.get("id"), str)
        }


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
        return reads.shape(texts)
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


def _open_arguments(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object.

    Raises `InvalidRequestError` if it is no call of a function.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(
            f"{where} must be an object with a function, got {type(call).__name__}", param=where
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    if not isinstance(arguments, dict | None):
        param = f"{where}.function.arguments"
        raise InvalidRequestError(
            f"{param} must be a string with a JSON object, got {type(arguments).__name__}",
            param=param,
        )
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _mark_end(message: dict[str, Any], marks: PlaceholderMarks) -> None:
    content = message.get("content")
    if "tool_calls" in message or content is None:
        ends = "it ends with tool calls"
    elif isinstance(content, str):
        message["content"] = content + marks.end
        return
    elif "text" in content[-1]:
        last = {"type": "text", "text": content[-1]["text"] + marks.end}
        message["content"] = [*content[:-1], last]
        return
    else:
        ends = "it ends with media"
    raise InvalidRequestError(
        f"the final message cannot be continued: {ends}", param="continue_final_message"
    )
