"""Messages of a chat request: checks, and rows for their embeddings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inlay.errors import InvalidRequestError
from inlay.frontend.bodies.sources import TensorSource, content_source
from inlay.frontend.bodies.structure import check_structure
from inlay.frontend.quoting import shown_at, shown_value
from inlay.pace import yield_gil
from inlay.prompt import Rows

MAX_DEPTH = 64
"""Maximum levels of nesting in the free-form parts of a request."""

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def check_depth(value: object, param: str) -> None:
    """Raise `InvalidRequestError` when `value` is nested deeper than `MAX_DEPTH`."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for item in level:
            yield_gil()
            if isinstance(item, dict):
                deeper.extend(child for child in item.values() if isinstance(child, dict | list))
            elif isinstance(item, list):
                deeper.extend(child for child in item if isinstance(child, dict | list))
        if not deeper:
            return
        level = deeper
    raise InvalidRequestError(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)


def with_rows(
    messages: Sequence[Mapping[str, Any]],
    read: Callable[[TensorSource], Rows],
    *,
    named: Sequence[str] | None = None,
    served: str = "text, prompt_embeds",
) -> tuple[list[dict[str, Any]], list[Rows]]:
    """Return the messages for the renderer, and the rows of their `prompt_embeds` parts.

    Args:
        messages: as the client sent them.
        read: returns the rows of a part's source.
        named: path in the request of each message's content; None if the request has the messages
            themselves.
        served: supported types of parts, for error messages.

    Returns:
        The messages, each such part replaced by `{"type": "prompt_embeds", "index": i}`, and the
        rows by index.

    Raises:
        InvalidRequestError: malformed messages, or a content part that is not supported.
        NotFoundError: a stored prompt or part does not exist.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    # Arguments are JSON text that will be parsed.
    check_structure(*_arguments(messages), where="the arguments of all tool calls")
    rows: list[Rows] = []
    result: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"{where}.role must be a string, got {shown_at(message, 'role')}",
                param=f"{where}.role",
            )
        content = message.get("content")
        if content is None:
            # Other roles may have no content; a user's message has nothing else.
            if message["role"] == "user" and "content" not in message:
                raise InvalidRequestError(
                    f"{where}.content must be a string or a list of parts, got "
                    f"{shown_at(message, 'content')}",
                    param=f"{where}.content",
                )
            result.append(dict(message))
        else:
            place = f"{where}.content" if named is None else named[number]
            result.append({**message, "content": _content(content, place, rows, read, served)})
    return result, rows


def _arguments(messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield the arguments of all tool calls."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                yield arguments.encode("utf-8", "surrogatepass")


def _content(
    content: object, where: str, rows: list[Rows], read: Callable[[TensorSource], Rows], served: str
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return [
            _part(part, f"{where}[{index}]", rows, read, served)
            for index, part in enumerate(content)
        ]
    raise InvalidRequestError(
        f"{where} must be a string or a list of parts, got {shown_value(content)}", param=where
    )


def _part(
    part: object, where: str, rows: list[Rows], read: Callable[[TensorSource], Rows], served: str
) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise InvalidRequestError(
            f"{where} must be an object with a type, got {shown_value(part)}", param=where
        )
    if not isinstance(part.get("type"), str):
        raise InvalidRequestError(
            f"{where}.type must be one of {served}, got {shown_at(part, 'type')}",
            param=f"{where}.type",
        )
    kind = part["type"]
    if kind in _TEXT_PARTS:
        key = "refusal" if kind == "refusal" else "text"
        text = part.get(key)
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{where}.{key} must be a string, got {shown_at(part, key)}", param=f"{where}.{key}"
            )
        return {**part, "type": "text", "text": text}
    if kind == "prompt_embeds":
        rows.append(read(content_source(part, where)))
        return {"type": "prompt_embeds", "index": len(rows) - 1}
    raise InvalidRequestError(
        f"{where}: content parts of type {kind[:40]!r} are not supported; supported: {served}",
        param=f"{where}.type",
    )
