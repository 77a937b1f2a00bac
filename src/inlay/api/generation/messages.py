"""Messages of a chat request: checks, and positions for their embeddings and media."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from inlay.api.fields import string_at
from inlay.api.generation.parts import (
    MEDIA_PARTS,
    content_source,
    in_messages,
    kind_of,
    media_source,
)
from inlay.api.generation.said import Thought, is_thought, said_in, thoughts_of
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import Source, TensorSource
from inlay.http.bodies.media import MediaSource
from inlay.http.bodies.structure import check_structure
from inlay.http.quoting import shown_at, shown_value
from inlay.media.spec import Kind
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Rows, Segment, Tokens
from inlay.render import NO_MEDIA, ChatMedia, MediaForm
from inlay.render.turns import REASONING

PARTS = (
    "text, prompt_embeds, image_url, image_embeds, input_audio, audio_url, audio_embeds, video_url"
)
"""Types of the parts of a chat's content."""

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "output_audio": "transcript",
}
"""Types of parts that are text, and the field that holds it."""


class ReadMessages(NamedTuple):
    """Messages for the renderer, and what their parts stand for.

    Attributes:
        messages: with `{"type": "prompt_embeds", "index": i}` or `{"type": KIND, "index": i}` in
            place of each such part.
        rows: of embeddings, or ids that another model has made, by index.
        media: positions of each item of media, by index.
        kinds: of the items.
        sheds: the oldest turns may be left out where the prompt is too long.
    """

    messages: list[dict[str, Any]]
    rows: list[Rows | Tokens]
    media: list[Sequence[Segment]]
    kinds: list[Kind]
    sheds: bool = False

    def without(self, numbers: Collection[int]) -> "ReadMessages":
        """Return the messages without those of some numbers, and what they stand for."""
        left = ReadMessages([], [], [], [])

        def placed(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] == "text":
                return part
            if part["type"] == "prompt_embeds":
                left.rows.append(self.rows[part["index"]])
                return {**part, "index": len(left.rows) - 1}
            left.media.append(self.media[part["index"]])
            left.kinds.append(self.kinds[part["index"]])
            return {**part, "index": len(left.media) - 1}

        for number, message in enumerate(self.messages):
            if number not in numbers:
                # Templates write the reasoning first, and so stand its rows.
                moved = {
                    name: [placed(part) for part in message[name]]
                    for name in ("reasoning", "content")
                    if isinstance(message.get(name), list)
                }
                left.messages.append({**message, **moved})
        return left

    def media_for(self, card: ModelCard) -> ChatMedia:
        """Return the media as the model of `card` has them in its chats."""
        if not self.media or card.media is None:
            return NO_MEDIA
        placeholders = [(kind, card.media.placeholders[kind]) for kind in self.kinds]
        return ChatMedia(
            self.media, [MediaForm(kind, it.text, it.before, it.after) for kind, it in placeholders]
        )


ReadMedia: TypeAlias = Callable[[MediaSource], Sequence[Segment] | None]
"""Returns the positions of an item of media; None for one that is left out."""

ReadRows: TypeAlias = Callable[[TensorSource], Rows | None]
"""Returns the rows of a source of embeddings; None for one that is left out."""

MessageReader: TypeAlias = Callable[[ReadRows, ReadMedia], ReadMessages]
"""Makes the messages for the renderer, given readers of sources (`read_messages`)."""


class _Reader(NamedTuple):
    """Reading of parts into positions."""

    rows: list[Rows | Tokens]
    media: list[Sequence[Segment]]
    kinds: list[Kind]
    read: ReadRows
    read_media: ReadMedia
    served: str

    def take(self, source: Source) -> list[dict[str, Any]]:
        """Read a source; return what stands for it in a message."""
        if isinstance(source, TensorSource):
            rows = self.read(source)
            if rows is None:
                return []
            self.rows.append(rows)
            return [{"type": "prompt_embeds", "index": len(self.rows) - 1}]
        segments = self.read_media(source)
        if segments is None:
            return []
        self.media.append(segments)
        self.kinds.append(source.kind)
        return [{"type": source.kind, "index": len(self.media) - 1}]


_PLAIN_ROLES = frozenset(("system", "user", "assistant"))


def is_plain(message: Mapping[str, Any]) -> bool:
    """Return True for a message that is a role and a text, of which nothing is to be read."""
    return (
        len(message) == 2
        and isinstance(message.get("content"), str)
        and isinstance(message.get("role"), str)
        and message["role"] in _PLAIN_ROLES
    )


def sources_in(messages: Sequence[Mapping[str, Any]]) -> list[Source]:
    """Return the sources of a chat, in order. Raises as `in_messages`."""
    return [] if all(map(is_plain, messages)) else in_messages(messages)


def read_messages(
    messages: Sequence[Mapping[str, Any]],
    read: ReadRows,
    read_media: ReadMedia,
    *,
    named: Sequence[str] | None = None,
    served: str = PARTS,
    sheds: bool = False,
) -> ReadMessages:
    """Return the messages for the renderer, and the positions of their embeddings and media.

    Args:
        messages: as the client sent them; an API that finds the sources itself has them in place
            of parts.
        read: returns the rows of a part's source, or None to leave it out.
        read_media: returns the positions of an item of media, or None to leave it out.
        named: path in the request of each message's content; None if the request has the messages
            themselves.
        served: supported types of parts, for error messages.
        sheds: as in what is returned.

    Raises:
        InvalidRequestError: malformed messages, or a content part that is not supported.
        NotFoundError: a stored prompt or part does not exist.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    reader = _Reader([], [], [], read, read_media, served)
    result: list[dict[str, Any]] = []
    called = ""
    for number, message in enumerate(messages):
        if is_plain(message):
            result.append(dict(message))
            continue
        where, id_ = f"messages[{number}]", f"{number:09}"
        said = said_in(message, where, id_)
        if message.get("function_call") is not None:
            called = id_
        elif said["role"] == "function":
            said |= {"role": "tool", "tool_call_id": called}
        elif said["role"] == "user" and "content" not in message:
            raise InvalidRequestError(
                f"{where}.content must be a string or a list of parts, got "
                f"{shown_at(message, 'content')}",
                param=f"{where}.content",
            )
        # Templates write the reasoning first, and so stand its rows.
        thoughts = thoughts_of(said, where)
        said = {name: value for name, value in said.items() if name not in REASONING}
        if thoughts:
            said["reasoning"] = _reasoning(thoughts, reader)
        if "content" in said:
            place = f"{where}.content" if named is None else named[number]
            of_answer = said["role"] == "assistant"
            said["content"] = _content(said["content"], place, reader, of_answer)
        result.append(said)
    # Arguments are JSON text that will be parsed.
    if arguments := [*_arguments(result)]:
        check_structure(*arguments, where="the arguments of all tool calls")
    return ReadMessages(result, reader.rows, reader.media, reader.kinds, sheds)


def _reasoning(thoughts: Sequence[Thought], reader: _Reader) -> str | list[dict[str, Any]]:
    """Return reasoning as one text, or as parts of text and rows."""
    found: list[dict[str, Any]] = []
    for part, place in thoughts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind == "text":
            found.append({"type": "text", "text": string_at(part, "text", place)})
        elif isinstance(part, dict) and kind == "prompt_embeds":
            found += reader.take(content_source(part, place))
        else:
            got = shown_at(part, "type") if isinstance(part, dict) else shown_value(part)
            raise InvalidRequestError(
                f"{place} must be a string, a part of type text or prompt_embeds, or a list of "
                f"them, got {got}",
                param=place,
            )
    return found[0]["text"] if len(found) == 1 and found[0]["type"] == "text" else found


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
        for call in message.get("tool_calls", ()):
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str):
                yield arguments.encode("utf-8", "surrogatepass")


def _content(
    content: object, where: str, reader: _Reader, of_answer: bool
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return [
            ready
            for index, part in enumerate(content)
            for ready in _part(part, f"{where}[{index}]", reader, of_answer)
        ]
    raise InvalidRequestError(
        f"{where} must be a string or a list of parts, got {shown_value(content)}", param=where
    )


def _part(part: object, where: str, reader: _Reader, of_answer: bool) -> list[dict[str, Any]]:
    if isinstance(part, str):
        return [{"type": "text", "text": part}]
    if isinstance(part, TensorSource | MediaSource):
        return reader.take(part)
    if of_answer and is_thought(part):
        return []
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
        return [{**part, "type": "text", "text": string_at(part, _TEXT_PARTS[kind], where)}]
    if kind == "prompt_embeds":
        return reader.take(content_source(part, where))
    if kind in MEDIA_PARTS:
        source = media_source(part, where)
        return reader.take(source._replace(of_answer=True) if of_answer else source)
    raise InvalidRequestError(
        f"{where}: content parts of type {kind[:40]!r} are not supported; supported: "
        f"{reader.served}",
        param=f"{where}.type",
    )
