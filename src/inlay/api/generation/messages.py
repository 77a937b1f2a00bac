"""Messages of a chat request: checks, and positions for their embeddings and media."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from inlay.api.fields import string_at
from inlay.api.generation.parts import MEDIA_PARTS, content_source, kind_of, media_source
from inlay.card import ModelCard
from inlay.errors import InvalidRequestError
from inlay.http.bodies.embeds import Source, TensorSource
from inlay.http.bodies.media import MediaSource
from inlay.http.bodies.structure import check_structure
from inlay.http.quoting import shown_at, shown_value
from inlay.media.spec import Kind
from inlay.prompt import Rows, Segment, Tokens
from inlay.render import NO_MEDIA, ChatMedia, Shown

PARTS = (
    "text, prompt_embeds, image_url, image_embeds, input_audio, audio_url, audio_embeds, video_url"
)
"""Types of the parts of a chat's content."""

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class ReadMessages(NamedTuple):
    """Messages for the renderer, and what their parts stand for.

    Attributes:
        messages: with `{"type": "prompt_embeds", "index": i}` or `{"type": KIND, "index": i}` in
            place of each such part.
        rows: of embeddings, or ids that another model has made, by index.
        media: positions of each item of media, by index.
        kinds: of the items.
    """

    messages: list[dict[str, Any]]
    rows: list[Rows | Tokens]
    media: list[Sequence[Segment]]
    kinds: list[Kind]

    def media_for(self, card: ModelCard) -> ChatMedia:
        """Return the media as the model of `card` has them in its chats."""
        if not self.media or card.media is None:
            return NO_MEDIA
        placeholders = [(kind, card.media.placeholders[kind]) for kind in self.kinds]
        return ChatMedia(
            self.media, [Shown(kind, it.text, it.before, it.after) for kind, it in placeholders]
        )


MessageReader: TypeAlias = Callable[
    [Callable[[TensorSource], Rows], Callable[[MediaSource], Sequence[Segment]]], ReadMessages
]
"""Makes the messages for the renderer, given readers of sources (`read_messages`)."""


class _Reader(NamedTuple):
    """Reading of parts into positions."""

    rows: list[Rows | Tokens]
    media: list[Sequence[Segment]]
    kinds: list[Kind]
    read: Callable[[TensorSource], Rows]
    read_media: Callable[[MediaSource], Sequence[Segment]]
    served: str

    def take(self, source: Source) -> dict[str, Any]:
        """Read a source; return what stands for it in a message."""
        if isinstance(source, TensorSource):
            self.rows.append(self.read(source))
            return {"type": "prompt_embeds", "index": len(self.rows) - 1}
        self.media.append(self.read_media(source))
        self.kinds.append(source.kind)
        return {"type": source.kind, "index": len(self.media) - 1}


def read_messages(
    messages: Sequence[Mapping[str, Any]],
    read: Callable[[TensorSource], Rows],
    read_media: Callable[[MediaSource], Sequence[Segment]],
    *,
    named: Sequence[str] | None = None,
    served: str = PARTS,
) -> ReadMessages:
    """Return the messages for the renderer, and the positions of their embeddings and media.

    Args:
        messages: as the client sent them; an API that finds the sources itself has them in place
            of parts.
        read: returns the rows of a part's source.
        read_media: returns the positions of an item of media.
        named: path in the request of each message's content; None if the request has the messages
            themselves.
        served: supported types of parts, for error messages.

    Raises:
        InvalidRequestError: malformed messages, or a content part that is not supported.
        NotFoundError: a stored prompt or part does not exist.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    # Arguments are JSON text that will be parsed.
    check_structure(*_arguments(messages), where="the arguments of all tool calls")
    reader = _Reader([], [], [], read, read_media, served)
    result: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        string_at(message, "role", where)
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
            result.append({**message, "content": _content(content, place, reader)})
    return ReadMessages(result, reader.rows, reader.media, reader.kinds)


def read_texts(messages: Sequence[Mapping[str, Any]], refusal: str) -> list[dict[str, Any]]:
    """Return the messages of a chat of texts alone, for the renderer.

    Raises `InvalidRequestError`: as `read_messages`, or with `refusal` for any other part.
    """

    def refuse(_: Source) -> Any:
        raise InvalidRequestError(refusal, param="messages")

    return read_messages(messages, refuse, refuse).messages


def _arguments(messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield the arguments of all tool calls."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                yield arguments.encode("utf-8", "surrogatepass")


def _content(content: object, where: str, reader: _Reader) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return [_part(part, f"{where}[{index}]", reader) for index, part in enumerate(content)]
    raise InvalidRequestError(
        f"{where} must be a string or a list of parts, got {shown_value(content)}", param=where
    )


def _part(part: object, where: str, reader: _Reader) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, TensorSource | MediaSource):
        return reader.take(part)
    if not isinstance(part, dict):
        raise InvalidRequestError(
            f"{where} must be an object with a type, got {shown_value(part)}", param=where
        )
    kind = kind_of(part)
    if not isinstance(kind, str):
        raise InvalidRequestError(
            f"{where}.type must be one of {reader.served}, got {shown_at(part, 'type')}",
            param=f"{where}.type",
        )
    if kind in _TEXT_PARTS:
        key = "refusal" if kind == "refusal" else "text"
        return {**part, "type": "text", "text": string_at(part, key, where)}
    if kind == "prompt_embeds":
        return reader.take(content_source(part, where))
    if kind in MEDIA_PARTS:
        return reader.take(media_source(part, where))
    raise InvalidRequestError(
        f"{where}: content parts of type {kind[:40]!r} are not supported; supported: "
        f"{reader.served}",
        param=f"{where}.type",
    )
