"""Sources of embeddings in a request: base64 in its JSON, a multipart part, or a stored prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inlay.api.openai.completions import CompletionRequest, EmbedsSource, PromptEmbedsPart
from inlay.api.openai.embeddings import PromptsRequest
from inlay.errors import EmbeddingsError, InvalidRequestError
from inlay.frontend.errors import HOW_TO_SEND
from inlay.frontend.quoting import shown_at


class TensorSource(NamedTuple):
    """One source of embeddings.

    Exactly one of the first three must be set, to a string.

    Attributes:
        data: base64 of a tensor file.
        ref: id of a stored prompt.
        part: name of a part of a multipart body.
        param: path in the request.
        object: the object at that path, for error messages.
    """

    data: object
    ref: object
    part: object
    param: str
    object: Mapping[str, Any] | None = None


def in_completion(request: CompletionRequest) -> list[TensorSource]:
    """Return the sources of a completions request, in order."""
    found = in_prompt_embeds(request.prompt_embeds)
    if found:
        return found
    if isinstance(request.prompt, list):
        for index, item in enumerate(request.prompt):
            # A prompt may have a million ids, and this blocks the server: comparing types is twice
            # as fast as `isinstance`.
            if type(item) is int or type(item) is str:
                continue
            if isinstance(item, PromptEmbedsPart):
                found.append(part_source(item, f"prompt[{index}]"))
            elif isinstance(item, list):
                found += [
                    part_source(part, f"prompt[{index}][{inner}]")
                    for inner, part in enumerate(item)
                    if isinstance(part, PromptEmbedsPart)
                ]
    return found


def in_prompt_embeds(
    embeds: str | EmbedsSource | list[str | EmbedsSource] | None,
) -> list[TensorSource]:
    """Return the sources of a request's field `prompt_embeds`, in order."""
    if embeds is None:
        return []
    if not isinstance(embeds, list):
        return [_embeds(embeds, "prompt_embeds")]
    return [_embeds(item, f"prompt_embeds[{index}]") for index, item in enumerate(embeds)]


def in_prompts(request: PromptsRequest) -> list[TensorSource]:
    """Return the sources of a request for vectors: `prompt_embeds`, then its chats, in order."""
    found = in_prompt_embeds(request.prompt_embeds)
    for chat in request.chats:
        found += in_messages(chat)
    return found


def _embeds(item: str | EmbedsSource, param: str) -> TensorSource:
    if isinstance(item, str):
        return TensorSource(item, None, None, param)
    return TensorSource(None, item.ref, item.part, param)


def part_source(part: PromptEmbedsPart, param: str) -> TensorSource:
    """Return the source of a part of a completion's prompt."""
    return TensorSource(part.data, part.ref, part.part, param)


def in_messages(messages: Sequence[Mapping[str, Any]]) -> list[TensorSource]:
    """Return the sources of a chat, in order."""
    found: list[TensorSource] = []
    for number, message in enumerate(messages):
        found += in_content(message.get("content"), f"messages[{number}].content")
    return found


def in_content(content: object, where: str) -> list[TensorSource]:
    """Return the sources of a message's content at the path `where`, in order."""
    if not isinstance(content, list):
        return []
    return [
        content_source(part, f"{where}[{index}]")
        for index, part in enumerate(content)
        if isinstance(part, dict) and part.get("type") == "prompt_embeds"
    ]


def content_source(part: Mapping[str, Any], param: str) -> TensorSource:
    """Return the source of a part of a message's content."""
    return TensorSource(part.get("data"), part.get("ref"), part.get("part"), param, part)


def tensor_data(sources: Sequence[TensorSource]) -> list[str]:
    """Return the strings among `sources` that are tensor data."""
    return [source.data for source in sources if isinstance(source.data, str)]


def check_source(source: TensorSource) -> None:
    """Raise `InvalidRequestError` unless exactly one of data, ref and part is set, to a string."""
    given = {
        name: value
        for name, value in (("data", source.data), ("ref", source.ref), ("part", source.part))
        if value is not None
    }
    if len(given) != 1:
        got = " and ".join(given) or shown_at(source.object or {}, "data")
        raise InvalidRequestError(
            f"{source.param}: give exactly one of data, ref and part, got {got}",
            param=source.param,
        )
    ((name, value),) = given.items()
    if not isinstance(value, str):
        where = f"{source.param}.{name}"
        if name == "data":
            raise EmbeddingsError(
                f"{where}: prompt_embeds must be valid base64, got {type(value).__name__}: "
                f"{HOW_TO_SEND}",
                param=where,
            )
        raise InvalidRequestError(
            f"{where} must be a string, got {type(value).__name__}", param=where
        )
