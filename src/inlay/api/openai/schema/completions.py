"""Types of `/v1/completions`."""

from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.generation import UsageInfo, WholeResponse
from inlay.api.schema.generation import GenerationRequest, PromptLogprob


class EmbedsSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reference to embeddings: a stored prompt, or a part of a multipart body.

    Exactly one is set.

    Attributes:
        ref: id of a stored prompt, of the same API key.
        part: name of a file in the same multipart body.
    """

    ref: str | None = None
    part: str | None = None


class _Part(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """An element of a prompt made of parts."""


class TextPart(_Part, frozen=True, tag="text"):
    """Text within a prompt made of parts.

    Attributes:
        text: the text.
    """

    text: str


class TokenIdsPart(_Part, frozen=True, tag="token_ids"):
    """Token ids within a prompt made of parts.

    Attributes:
        token_ids: ids of the model's vocabulary.
    """

    token_ids: list[int]


class PromptEmbedsPart(_Part, frozen=True, tag="prompt_embeds"):
    """Embeddings within a prompt made of parts.

    Exactly one of `data` (base64), `ref` and `part` is set.

    Attributes:
        data: base64 of a tensor file of shape (num_tokens, hidden size), or with a leading 1, of
            any float dtype from 8 to 64 bits.
        ref: id of a stored prompt, of the same API key; not of a batch.
        part: name of a file in the same multipart body.
    """

    data: str | None = None
    ref: str | None = None
    part: str | None = None


class ImageUrlPart(_Part, frozen=True, tag="image_url"):
    """An image within a prompt made of parts, as in a chat.

    Attributes:
        image_url: `{"url": ..., "detail": ...}`, or the URL: data: in base64, https, or file: below
            --allowed-local-media-path.
        ref: id of a stored image, in the place of `image_url`.
        detail: "auto", "low" or "high"; "auto" when absent.
        uuid: accepted and not used: images are known by their content.
    """

    image_url: str | dict[str, Any] | None = None
    ref: str | None = None
    detail: str | None = None
    uuid: str | None = None


class ImageEmbedsPart(_Part, frozen=True, tag="image_embeds"):
    """Rows of an image from a client's own encoder, within a prompt made of parts.

    Attributes:
        image_embeds: base64 of a tensor file of shape (rows, hidden size), wider where the model
            has inner features; or an object of it and `image_grid_thw`, such as an element that
            `/v1/encode` answers with. Models that number positions by a grid, or have tokens
            between the rows, need it, there or in the file. Needs --enable-mm-embeds.
        uuid: accepted and not used.
    """

    image_embeds: str | dict[str, Any]
    uuid: str | None = None


class InputAudioPart(_Part, frozen=True, tag="input_audio"):
    """Audio within a prompt made of parts, as in a chat.

    Attributes:
        input_audio: `{"data": base64 of a file, "format": "wav", "mp3" or "flac"}`; the content
            decides.
        uuid: accepted and not used.
    """

    input_audio: dict[str, Any] | None = None
    uuid: str | None = None


class AudioUrlPart(_Part, frozen=True, tag="audio_url"):
    """Audio by its URL, within a prompt made of parts, as in a chat.

    Attributes:
        audio_url: `{"url": ...}`, or the URL: data: in base64, or https.
        uuid: accepted and not used.
    """

    audio_url: str | dict[str, Any] | None = None
    uuid: str | None = None


class AudioEmbedsPart(_Part, frozen=True, tag="audio_embeds"):
    """Rows of audio from a client's own encoder, within a prompt made of parts.

    Attributes:
        audio_embeds: base64 of a tensor file of shape (rows, hidden size), or an element that
            `/v1/encode` answers with. Needs --enable-mm-embeds.
        uuid: accepted and not used.
    """

    audio_embeds: str | dict[str, Any]
    uuid: str | None = None


class VideoUrlPart(_Part, frozen=True, tag="video_url"):
    """A video by its URL, within a prompt made of parts, as in a chat.

    Attributes:
        video_url: `{"url": ...}`, or the URL: of frames (data:video/jpeg;base64,FRAME,FRAME), of an
            animated GIF or WebP, or of an MP4 or WebM.
        uuid: accepted and not used.
    """

    video_url: str | dict[str, Any] | None = None
    uuid: str | None = None


MediaPart: TypeAlias = (
    ImageUrlPart | ImageEmbedsPart | InputAudioPart | AudioUrlPart | AudioEmbedsPart | VideoUrlPart
)
PromptPart: TypeAlias = TextPart | TokenIdsPart | PromptEmbedsPart | MediaPart


class CompletionRequest(GenerationRequest, kw_only=True):
    """A request to `/v1/completions`.

    What the engine of a model does not do is a 400; `/v1/models` names it under `refusals`.

    Attributes:
        prompt: text, texts, ids, lists of ids, parts, or lists of parts; each text or list in a
            list is a prompt of its own. Kinds do not mix in one list.
        prompt_embeds: base64 of a tensor file, a source, or a list of these; it takes precedence
            over `prompt`. The shape is (num_tokens, hidden size), or (batch, num_tokens, hidden
            size) for that many prompts. Needs --enable-prompt-embeds.
        logprobs: number of alternatives for each token, 0 to --max-logprobs; no logprobs when
            absent.
        best_of: outputs generated for each prompt, `n` when absent; the `n` with the highest mean
            logprob are returned. Not above `n` in a stream.
        suffix: only the empty text: nothing is filled in.
        max_tokens: output tokens at most, 1 or more, or 0 with `echo`; when absent 16, or less
            where the context leaves less.
        echo: return the prompt before the output, with `logprobs` its logprobs too; false when
            absent. Not with embeddings or media.
        add_special_tokens: put the tokenizer's special tokens around a text, or a first part that
            is a text; true when absent. A prompt that begins with rows gets no begin token: send
            one as `token_ids`.
    """

    prompt: str | list[int | str | PromptPart | list[int | PromptPart]] | None = None
    prompt_embeds: str | EmbedsSource | list[str | EmbedsSource] | None = None
    suffix: str | None = None
    logprobs: int | None = None

    DEFAULT_MAX_TOKENS: ClassVar[int | None] = 16
    PICKS_BEST: ClassVar[bool] = True

    @property
    def only_echoes(self) -> bool:
        """True if no token is to be generated: the answer is the prompt."""
        return bool(self.echo) and self.max_tokens == 0


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Logprobs as parallel lists with one entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: None = None


class Completion(WholeResponse, frozen=True, kw_only=True):
    """The response of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class CompletionChunkChoice(msgspec.Struct, frozen=True):
    """A piece of a continuation; the prompt's ids come with the first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Event of a completion's stream; the last one has `system_fingerprint`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType = msgspec.UNSET
