"""Sources of embeddings in the field `prompt_embeds` of completions, vectors and images."""

from inlay.api.openai.schema.completions import EmbedsSource
from inlay.http.bodies.embeds import TensorSource


def in_prompt_embeds(
    embeds: str | EmbedsSource | list[str | EmbedsSource] | None,
) -> list[TensorSource]:
    """Return the sources of a request's field `prompt_embeds`, in order."""
    if embeds is None:
        return []
    if not isinstance(embeds, list):
        return [embeds_source(embeds, "prompt_embeds")]
    return [embeds_source(item, f"prompt_embeds[{index}]") for index, item in enumerate(embeds)]


def embeds_source(item: str | EmbedsSource, param: str) -> TensorSource:
    if isinstance(item, str):
        return TensorSource(item, None, None, param)
    return TensorSource(None, item.ref, item.part, param)
