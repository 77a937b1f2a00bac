"""Sources of embeddings and media in completions and requests for vectors, in order."""

import msgspec

from inlay.api.generation.parts import in_messages, media_source
from inlay.api.openai.schema.completions import (
    CompletionRequest,
    EmbedsSource,
    MediaPart,
    PromptEmbedsPart,
)
from inlay.api.openai.schema.embeddings import PromptsRequest
from inlay.http.bodies.embeds import Source, TensorSource
from inlay.http.bodies.media import MediaSource


def in_completion(request: CompletionRequest) -> list[Source]:
    """Return the sources of a completions request, in order."""
    found: list[Source] = [*in_prompt_embeds(request.prompt_embeds)]
    if found:
        return found
    if isinstance(request.prompt, list):
        for index, item in enumerate(request.prompt):
            # A prompt may have a million ids, and this blocks the server: comparing types is twice
            # as fast as `isinstance`.
            if type(item) is int or type(item) is str:
                continue
            if isinstance(item, list):
                for inner, part in enumerate(item):
                    if type(part) is not int:
                        found += _in_part(part, f"prompt[{index}][{inner}]", index)
            else:
                found += _in_part(item, f"prompt[{index}]", 0)
    return found


def _in_part(part: object, param: str, prompt: int) -> list[Source]:
    if isinstance(part, PromptEmbedsPart):
        return [part_source(part, param)]
    if isinstance(part, MediaPart):
        return [media_part_source(part, param, prompt)]
    return []


def in_prompt_embeds(
    embeds: str | EmbedsSource | list[str | EmbedsSource] | None,
) -> list[TensorSource]:
    """Return the sources of a request's field `prompt_embeds`, in order."""
    if embeds is None:
        return []
    if not isinstance(embeds, list):
        return [embeds_source(embeds, "prompt_embeds")]
    return [embeds_source(item, f"prompt_embeds[{index}]") for index, item in enumerate(embeds)]


def in_prompts(request: PromptsRequest) -> list[Source]:
    """Return the sources of a request for vectors: `prompt_embeds`, then its chats, in order."""
    found: list[Source] = [*in_prompt_embeds(request.prompt_embeds)]
    for index, (path, chat) in enumerate(zip(request.chat_paths, request.chats, strict=True)):
        found += in_messages(chat, path, index)
    return found


def embeds_source(item: str | EmbedsSource, param: str) -> TensorSource:
    """Return the source of one tensor."""
    if isinstance(item, str):
        return TensorSource(item, None, None, param)
    return TensorSource(None, item.ref, item.part, param)


def part_source(part: PromptEmbedsPart, param: str) -> TensorSource:
    """Return the source of a part of a completion's prompt."""
    return TensorSource(part.data, part.ref, part.part, param)


def media_part_source(part: MediaPart, param: str, prompt: int = 0) -> MediaSource:
    """Return the source of media in a completion's prompt. Raises as `media_source`."""
    return media_source(msgspec.structs.asdict(part), param, prompt)
