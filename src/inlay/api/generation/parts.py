"""Parts of chats that are embeddings or media: their sources, in order."""

from collections.abc import Mapping, Sequence
from typing import Any

from inlay.api.fields import one_of
from inlay.api.generation.said import thoughts_of
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import Source, TensorSource
from inlay.http.bodies.media import MediaSource
from inlay.http.quoting import shown_at, shown_value
from inlay.media.data_url import as_data_url
from inlay.media.embeds import parse_embeds
from inlay.media.spec import Detail, Kind

MEDIA_PARTS: dict[str, Kind] = {
    "image_url": "image",
    "input_image": "image",
    "image_embeds": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
}
"""Types of parts that are media, and their kinds."""

_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "webm", "m4a", "mp4", "aac")
"""Names that clients give; content decides."""

_DETAILS: dict[str, Detail] = {"auto": "auto", "low": "low", "high": "high", "original": "high"}
"""OpenAI's, as models have them: none takes an image larger than its settings say."""

_NOT_MEDIA = ("detail", "format")
"""Fields of a part's value that say nothing of where the media are."""


def in_messages(
    messages: Sequence[Mapping[str, Any]], where: str = "messages", prompt: int = 0
) -> list[Source]:
    """Return the sources of a chat, in order.

    Args:
        messages: of the chat.
        where: their path in the request.
        prompt: index of the chat in the request.

    Raises:
        InvalidRequestError: a malformed part that is media.
    """
    found: list[Source] = []
    for number, message in enumerate(messages):
        place = f"{where}[{number}]"
        found += [
            content_source(part, at)
            for part, at in thoughts_of(message, place)
            if isinstance(part, dict) and part.get("type") == "prompt_embeds"
        ]
        found += in_content(
            message.get("content"), f"{place}.content", prompt, message.get("role") == "assistant"
        )
    return found


def in_content(
    content: object, where: str, prompt: int = 0, of_answer: bool = False
) -> list[Source]:
    """Return the sources of a message's content at the path `where`, in order.

    Args:
        content: text, or parts.
        where: its path in the request.
        prompt: index of its chat in the request.
        of_answer: True for a turn of the assistant.

    Raises:
        InvalidRequestError: a malformed part that is an image.
    """
    if not isinstance(content, list):
        return []
    found: list[Source] = []
    for index, part in enumerate(content):
        kind = kind_of(part) if isinstance(part, dict) else None
        if kind == "prompt_embeds":
            found.append(content_source(part, f"{where}[{index}]"))
        elif isinstance(kind, str) and kind in MEDIA_PARTS:
            source = media_source(part, f"{where}[{index}]", prompt)
            found.append(source._replace(of_answer=True) if of_answer else source)
    return found


def kind_of(part: Mapping[str, Any]) -> object:
    """Return the type of a part; as in vLLM, one without a type is named by its field."""
    kind = part.get("type")
    if kind is None:
        return next((name for name in MEDIA_PARTS if name in part), None)
    return kind


def content_source(part: Mapping[str, Any], param: str) -> TensorSource:
    """Return the source of a part of a message's content."""
    return TensorSource(part.get("data"), part.get("ref"), part.get("part"), param, part)


def media_source(part: Mapping[str, Any], param: str, prompt: int = 0) -> MediaSource:
    """Return the source of a part that is an image, audio or a video.

    Raises:
        InvalidRequestError: a malformed part.
    """
    name = str(kind_of(part))
    kind = MEDIA_PARTS[name]
    if kind == "image":
        return image_source(part, param, prompt)
    _check_uuid(part, param, name)
    if name == "audio_embeds":
        return _embeds_source(part, param, prompt, "audio")
    where, value = f"{param}.{name}", part.get(name)
    if name == "input_audio":
        return MediaSource(_input_audio(value, where), None, None, param, prompt, kind=kind)
    url = value.get("url") if isinstance(value, dict) else value
    where += ".url" if isinstance(value, dict) else ""
    if not isinstance(url, str) or not url:
        raise InvalidRequestError(
            f"{where} must be a string, a URL: data:{kind}/...;base64,... or https://..., got "
            f"{shown_value(url)}",
            param=where,
        )
    return MediaSource(url, None, None, param, prompt, kind=kind)


def _input_audio(value: object, where: str) -> str:
    """Return OpenAI's `{data, format}` as a data: URL."""
    if not isinstance(value, dict) or not isinstance(value.get("data"), str):
        raise InvalidRequestError(
            f"{where} must be an object with data, base64 of a file, and format; got "
            f"{shown_value(value)}",
            param=where,
        )
    given = one_of(value.get("format"), _AUDIO_FORMATS, f"{where}.format")
    return as_data_url(value["data"], f"audio/{given or 'wav'}")


def _check_uuid(part: Mapping[str, Any], param: str, name: str) -> None:
    """Raise `InvalidRequestError` for media that are named by their uuid alone.

    vLLM's forms of these are a null, an empty object, and an object whose URL is null.
    """
    uuid, value = part.get("uuid"), part.get(name)
    if uuid is None:
        return
    if not isinstance(uuid, str):
        raise InvalidRequestError(
            f"{param}.uuid must be a string, got {shown_value(uuid)}", param=f"{param}.uuid"
        )
    if isinstance(value, dict):
        value = any(given for key, given in value.items() if key not in _NOT_MEDIA)
    if not value:
        where, kind = f"{param}.{name}", MEDIA_PARTS[name]
        if kind == "image":
            why = (
                "images are not kept by their uuid; send the image again, or store it once (POST "
                "/v1/prompt_embeds) and send its id as ref"
            )
        else:
            why = f"{kind} is not kept by its uuid; send it again"
        raise InvalidRequestError(f"{where}: {why}", param=where)


def image_source(part: Mapping[str, Any], param: str, prompt: int = 0) -> MediaSource:
    """Return the source of a part that is an image: of chats, completions, or responses.

    Raises:
        InvalidRequestError: a malformed part.
    """
    name = "file_id" if part.get("file_id") is not None else "ref"
    ref = part.get(name)
    embeds = kind_of(part) == "image_embeds"
    if ref is None:
        _check_uuid(part, param, "image_embeds" if embeds else "image_url")
    if embeds:
        return _embeds_source(part, param, prompt, "image")
    where = f"{param}.image_url"
    image = part.get("image_url")
    given, url = part.get("detail"), image
    if isinstance(image, dict):
        given, url = image.get("detail", given), image.get("url")
        where += ".url"
    detail = _DETAILS.get(one_of(given, _DETAILS, f"{param}.detail") or "")
    if ref is not None:
        if image is not None or not isinstance(ref, str):
            raise InvalidRequestError(
                f"{param}.{name} must be a string, the id of a stored image, without an image_url "
                f"beside it, got {shown_value(ref)}",
                param=f"{param}.{name}",
            )
        return MediaSource(None, None, detail, param, prompt, ref)
    if not isinstance(url, str) or not url:
        raise InvalidRequestError(
            f"{where} must be a string, a URL: data:image/...;base64,... or https://..., got "
            f"{shown_at(part, 'image_url') if url is image else shown_value(url)}",
            param=where,
        )
    return MediaSource(url, None, detail, param, prompt)


def _embeds_source(part: Mapping[str, Any], param: str, prompt: int, kind: Kind) -> MediaSource:
    name = f"{kind}_embeds"
    where = f"{param}.{name}"
    try:
        embeds = parse_embeds(part.get(name), kind)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error.message}", param=where) from None
    if not isinstance(embeds.source, str):
        raise InvalidRequestError(
            f"{where} must be base64 of a tensor file, or an object that holds it, got "
            f"{shown_value(embeds.source)}",
            param=where,
        )
    return MediaSource(None, embeds, None, param, prompt, kind=kind)
