"""Fields of a chat's message: checked, and all that is said under the names of the renderer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inlay.api.fields import string_at
from inlay.base.errors import InvalidRequestError
from inlay.http.quoting import shown_at, shown_value
from inlay.render.turns import REASONING

_OF_ASSISTANT = (*REASONING, "tool_calls", "function_call", "refusal", "audio")
"""Fields that only a turn of the assistant has."""

_OTHERS = ("system", "developer", "user", "tool", "function")

_EMPTY: tuple[object, ...] = (None, "", [])
"""Values that clients send for what is not there."""


class Thought(NamedTuple):
    """A part of the reasoning of a turn, and its path in the request."""

    part: object
    where: str


def thoughts_of(message: Mapping[str, Any], where: str) -> list[Thought]:
    """Return the reasoning of a message, whose path in the request is `where`.

    It is text, a part of embeddings as in vLLM 0.33, or a list of such parts, under one of its
    names; or parts of the content of type `thinking`.

    Raises:
        InvalidRequestError: two names with different reasoning, or parts that are none.
    """
    given = {name: message[name] for name in REASONING if message.get(name) not in _EMPTY}
    content = message.get("content")
    if isinstance(content, list):
        inside = [part for part in content if is_thought(part)]
        if inside:
            given["content"] = _texts(inside, f"{where}.content")
    names = list(given)
    for name in names[1:]:
        if given[name] != given[names[0]]:
            raise InvalidRequestError(
                f"{where} has {names[0]} and {name}, which differ: send the reasoning once",
                param=f"{where}.{name}",
            )
    if not names:
        return []
    value, place = given[names[0]], f"{where}.{names[0]}"
    if isinstance(value, str):
        return [Thought({"type": "text", "text": value}, place)]
    if not isinstance(value, list):
        return [Thought(value, place)]
    return [Thought(part, f"{place}[{index}]") for index, part in enumerate(value)]


def is_thought(part: object) -> bool:
    """Return True for a part of a content that is reasoning, of this server or another."""
    return isinstance(part, Mapping) and part.get("type") in ("thinking", "redacted_thinking")


def _texts(parts: Sequence[Mapping[str, Any]], where: str) -> str:
    texts: list[str] = []
    for part in parts:
        thinking = part.get("thinking", "" if part["type"] == "redacted_thinking" else None)
        # Mistral's have a list of texts.
        inner = thinking if isinstance(thinking, list) else [{"text": thinking}]
        for each in inner:
            text = each.get("text") if isinstance(each, Mapping) else None
            if not isinstance(text, str):
                raise InvalidRequestError(
                    f"{where}: thinking must be a string, or a list of parts with text, got "
                    f"{shown_at(part, 'thinking')}",
                    param=where,
                )
            texts.append(text)
    return "\n".join(filter(None, texts))


def said_in(message: Mapping[str, Any], where: str, id_: str) -> dict[str, Any]:
    """Return a message in which everything said is content, reasoning or tool calls.

    A transcript and a refusal are text, an old `function_call` is a tool call. Fields that are null
    are left out, and so are empty lists of calls, which templates take for calls. Reasoning stays
    as it is, for `thoughts_of`; further fields are kept.

    Args:
        message: as a client sent it.
        where: its path in the request.
        id_: id of an old `function_call`, which has none.

    Raises:
        InvalidRequestError: a field of another type than it must have, or one that cannot be said.
    """
    role = string_at(message, "role", where)
    said = {name: value for name, value in message.items() if value is not None}
    for name in ("name", "tool_call_id", "refusal"):
        if name in said:
            string_at(said, name, where)
    if role in _OTHERS:
        misplaced = next((name for name in _OF_ASSISTANT if said.get(name) not in _EMPTY), None)
        if misplaced is not None:
            raise InvalidRequestError(
                f"{where}.{misplaced} is a field of the assistant's messages; the role is {role!r}",
                param=f"{where}.{misplaced}",
            )
    calls = [
        *_old_call(said.pop("function_call", None), f"{where}.function_call", id_),
        *_calls(said.pop("tool_calls", None), f"{where}.tool_calls"),
    ]
    if calls:
        said["tool_calls"] = calls
    spoken = _transcript(said.pop("audio", None), f"{where}.audio")
    _add_text(said, spoken)
    _add_text(said, said.pop("refusal", ""))
    return said


def _add_text(said: dict[str, Any], text: str) -> None:
    """Add a text behind the content, unless it is the content."""
    content = said.get("content")
    if not text or content == text:
        return
    if content in _EMPTY:
        said["content"] = text
    else:
        parts = content if isinstance(content, list) else [content]
        said["content"] = [*parts, {"type": "text", "text": text}]


def _transcript(audio: object, where: str) -> str:
    if audio in _EMPTY:
        return ""
    if not isinstance(audio, Mapping):
        raise InvalidRequestError(
            f"{where} must be an object with transcript, got {shown_value(audio)}", param=where
        )
    if not isinstance(audio.get("transcript"), str):
        raise InvalidRequestError(
            f"{where}.transcript must be a string, what was said, got "
            f"{shown_at(audio, 'transcript')}: no sound is kept by its id",
            param=f"{where}.transcript",
        )
    return str(audio["transcript"])


def _old_call(call: object, where: str, id_: str) -> list[dict[str, Any]]:
    if call is None:
        return []
    if not isinstance(call, dict):
        raise InvalidRequestError(
            f"{where} must be an object with name and arguments, got {shown_value(call)}",
            param=where,
        )
    return [{"id": id_, "type": "function", "function": _function(call, where)}]


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if calls in _EMPTY:
        return []
    if not isinstance(calls, list):
        raise InvalidRequestError(
            f"{where} must be a list of calls, got {shown_value(calls)}", param=where
        )
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise InvalidRequestError(
            f"{where} must be an object with id, type and function, got {shown_value(call)}",
            param=where,
        )
    if call.get("id") is not None:
        string_at(call, "id", where)
    if call.get("type") not in (None, "function"):
        raise InvalidRequestError(
            f"{where}.type must be 'function', got {shown_at(call, 'type')}", param=f"{where}.type"
        )
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(
            f"{where}.function must be an object with name and arguments, got "
            f"{shown_at(call, 'function')}",
            param=f"{where}.function",
        )
    return {**call, "type": "function", "function": _function(function, f"{where}.function")}


def _function(function: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a function's name and arguments, of any server. Raises `InvalidRequestError`."""
    string_at(function, "name", where)
    if not isinstance(function.get("arguments"), str | dict | None):
        raise InvalidRequestError(
            f"{where}.arguments must be a string with a JSON object, got "
            f"{shown_at(function, 'arguments')}",
            param=f"{where}.arguments",
        )
    return function
