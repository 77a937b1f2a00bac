"""Prompts of `/v1/audio/speech`: a chat, and the text that is spoken as its answer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from inlay.api.fields import string_at
from inlay.api.generation.messages import read_messages
from inlay.api.generation.parts import content_source, kind_of
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import Embeddings
from inlay.http.quoting import shown_at, shown_value
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Prompt, Segment, Tokens
from inlay.render import Renderer
from inlay_stages.api.schema.speech import SpeechRequest

READ_ALOUD = "Read the text aloud."
"""The user's message where a request has no instructions."""


class SpeechPrompt(NamedTuple):
    """A prompt whose end is spoken.

    Attributes:
        whole: the chat, and the text behind it.
        before: positions of the chat.
    """

    whole: Prompt
    before: int


def spoken_prompt(
    request: SpeechRequest,
    embeddings: Embeddings,
    card: ModelCard,
    renderer: Renderer,
    system: str,
) -> SpeechPrompt:
    """Return the prompt of a request. CPU work, safe to call from any thread.

    The text is tokenized on its own, as a model writes it: what it begins with never joins the
    template's last token.

    Args:
        request: has the text and the instructions.
        embeddings: of the request.
        card: of the language model.
        renderer: of the language model.
        system: message of the system, or empty.

    Raises:
        InvalidRequestError: no text, a malformed part, or one that cannot be spoken.
        InlayError: as `Embeddings.one` and `Renderer.chat`.
    """
    spoken = _spoken(request.input, embeddings, renderer)
    if not len(spoken):
        raise InvalidRequestError("input is empty: there is nothing to speak", param="input")
    user = READ_ALOUD if request.instructions is None else request.instructions
    messages: list[dict[str, Any]] = [{"role": "user", "content": user}]
    named = ["instructions"]
    if system:
        messages.insert(0, {"role": "system", "content": system})
        named.insert(0, "system")
    chat = read_messages(messages, embeddings.one, embeddings.media, named=named)
    prompt = renderer.chat(chat.messages, rows=chat.rows, media=chat.media_for(card))
    return SpeechPrompt(prompt + spoken, len(prompt))


def _spoken(
    given: str | Sequence[dict[str, Any]], embeddings: Embeddings, renderer: Renderer
) -> Prompt:
    parts = [{"type": "text", "text": given}] if isinstance(given, str) else given
    segments: list[Segment] = []
    text = ""
    for index, part in enumerate(parts):
        where = f"input[{index}]"
        if kind_of(part) == "text":
            # Texts side by side are one.
            text += string_at(part, "text", where)
        elif kind_of(part) == "prompt_embeds":
            segments += [
                Tokens(renderer.encode(text, add_special_tokens=False)),
                embeddings.one(content_source(part, where)),
            ]
            text = ""
        else:
            kind = kind_of(part)
            shown = shown_at(part, "type") if kind is None else shown_value(kind)
            raise InvalidRequestError(
                f"{where}.type is {shown}; text and prompt_embeds can be spoken",
                param=f"{where}.type",
            )
    segments.append(Tokens(renderer.encode(text, add_special_tokens=False)))
    return Prompt.of(*segments)
