"""Where a request says that rows come from.

Its own JSON, a part of its body, or what was stored before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inlay.api.openai.completions import CompletionRequest, EmbedsSource, PromptEmbedsPart
from inlay.api.openai.embeddings import PromptsRequest
from inlay.errors import EmbeddingsError, InvalidRequestError
from inlay.frontend.errors import HOW_TO_SEND
from inlay.frontend.quoting import shown_at


class TensorSource(NamedTuple):
    """Where a request says rows come from.

    Exactly one of the first three is to be set, to a string.

    Attributes:
        data: base64 of a tensor file.
        ref: id of a stored prompt.
        part: name of a part of a multipart body.
        param: where in the request it stands.
        object: all that stands there, of which an error may name the keys.
    """

    data: object
    ref: object
    part: object
    param: str
    object: Mapping[str, Any] | None = None


def in_completion(request: CompletionRequest) -> list[TensorSource]:
    """The sources of a completions request, in order."""
    found = in_prompt_embeds(request.prompt_embeds)
    if found:
        return found
    if isinstance(request.prompt, list):
        for index, item in enumerate(request.prompt):
            # There may be a million of these, which hold up everybody: by type is twice as fast as
            # by `isinstance`.
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
    """The sources of a request's field `prompt_embeds`, in order."""
    if embeds is None:
        return []
    if not isinstance(embeds, list):
        return [_embeds(embeds, "prompt_embeds")]
    return [_embeds(item, f"prompt_embeds[{index}]") for index, item in enumerate(embeds)]


def in_prompts(request: PromptsRequest) -> list[TensorSource]:
    """The sources of a request for vectors: of its `prompt_embeds`, and of its chats, in order."""
    found = in_prompt_embeds(request.prompt_embeds)
    for chat in request.chats:
        found += in_messages(chat)
    return found


def _embeds(item: str | EmbedsSource, param: str) -> TensorSource:
    if isinstance(item, str):
        return TensorSource(item, None, None, param)
    return TensorSource(None, item.ref, item.part, param)


def part_source(part: PromptEmbedsPart, param: str) -> TensorSource:
    """The source of a part of a completion's prompt."""
    return TensorSource(part.data, part.ref, part.part, param)


def in_messages(messages: Sequence[Mapping[str, Any]]) -> list[TensorSource]:
    """The sources of a chat, in order."""
    found: list[TensorSource] = []
    for number, message in enumerate(messages):
        found += in_content(message.get("content"), f"messages[{number}].content")
    return found


def in_content(content: object, where: str) -> list[TensorSource]:
    """The sources of a message's content, which stands at `where`, in order."""
    if not isinstance(content, list):
        return []
    return [
        content_source(part, f"{where}[{index}]")
        for index, part in enumerate(content)
        if isinstance(part, dict) and part.get("type") == "prompt_embeds"
    ]


def content_source(part: Mapping[str, Any], param: str) -> TensorSource:
    """The source of a part of a message's content."""
    return TensorSource(part.get("data"), part.get("ref"), part.get("part"), param, part)


def tensor_data(sources: Sequence[TensorSource]) -> list[str]:
    """The strings among `sources` that are tensor data."""
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
                f"{where}: prompt_embeds must be valid base64, got {type(value).__name__}: {HOW_TO_SEND}",
                param=where,
            )
        raise InvalidRequestError(
            f"{where} must be a string, got {type(value).__name__}", param=where
        )
