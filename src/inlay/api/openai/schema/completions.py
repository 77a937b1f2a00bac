"""Types of `/v1/completions`."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.generation import (
    ChunkMetrics,
    UsageInfo,
    WeightVersions,
    WholeResponse,
)
from inlay.api.schema.described import (
    QUESTION,
    ROWS,
    AnswerText,
    CreatedAt,
    Fingerprint,
    FinishReason,
    ListIndex,
    ModelName,
    PromptTokenIds,
    StopReason,
    TokenIds,
)
from inlay.api.schema.generation import GenerationRequest, PromptLogprob
from inlay.api.schema.hidden_states import ShownStates
from inlay.messages.fields import example, field


class EmbedsSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reference to embeddings: a stored prompt, or a part of a multipart body.

    Exactly one is set.

    Attributes:
        ref: id of a stored prompt, of the same API key.
        part: name of a file in the same multipart body.
    """

    ref: Annotated[str | None, example("pe-...")] = None
    part: Annotated[str | None, example("rows")] = None


class _Part(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """An element of a prompt made of parts."""


class TextPart(_Part, frozen=True, tag="text"):
    """Text within a prompt made of parts.

    Attributes:
        text: the text.
    """

    text: Annotated[str, example("a red fox")]


class TokenIdsPart(_Part, frozen=True, tag="token_ids"):
    """Token ids within a prompt made of parts.

    Attributes:
        token_ids: ids of the model's vocabulary.
    """

    token_ids: Annotated[list[int], example([1, 2, 3])]


class PromptEmbedsPart(_Part, frozen=True, tag="prompt_embeds"):
    """Embeddings within a prompt made of parts.

    Exactly one of `data` (base64), `ref` and `part` is set.

    Attributes:
        data: base64 of a tensor file of shape (num_tokens, hidden size), or with a leading 1, of
            any float dtype from 8 to 64 bits.
        ref: id of a stored prompt, of the same API key; not of a batch.
        part: name of a file in the same multipart body.
    """

    data: Annotated[str | None, example(ROWS)] = None
    ref: Annotated[str | None, example("pe-...")] = None
    part: Annotated[str | None, example("rows")] = None


class ImageUrlPart(_Part, frozen=True, tag="image_url"):
    """An image within a prompt made of parts, as in a chat.

    Attributes:
        image_url: `{"url": ..., "detail": ...}`, or the URL: data: in base64, https, or file: below
            --allowed-local-media-path.
        ref: id of a stored image, in the place of `image_url`.
        detail: "auto", "low" or "high"; "auto" when absent.
        uuid: accepted and not used: images are known by their content.
    """

    image_url: Annotated[
        str | dict[str, Any] | None, example({"url": "https://example.com/harbour.jpg"})
    ] = None
    ref: Annotated[str | None, example("pe-...")] = None
    detail: Annotated[str | None, example("low")] = None
    uuid: Annotated[str | None, example("harbour-1")] = None


class ImageEmbedsPart(_Part, frozen=True, tag="image_embeds"):
    """Rows of an image from a client's own encoder, within a prompt made of parts.

    Attributes:
        image_embeds: base64 of a tensor file of shape (rows, hidden size), wider where the model
            has inner features; or an object of it and `image_grid_thw`, such as an element that
            `/v1/encode` answers with. Models that number positions by a grid, or have tokens
            between the rows, need it, there or in the file. Needs --enable-mm-embeds.
        uuid: accepted and not used.
    """

    image_embeds: Annotated[str | dict[str, Any], example(ROWS)]
    uuid: Annotated[str | None, example("harbour-1")] = None


class InputAudioPart(_Part, frozen=True, tag="input_audio"):
    """Audio within a prompt made of parts, as in a chat.

    Attributes:
        input_audio: `{"data": base64 of a file, "format": "wav"}`; the content decides.
        uuid: accepted and not used.
    """

    input_audio: Annotated[
        dict[str, Any] | None, example({"data": "<base64 of a file>", "format": "wav"})
    ] = None
    uuid: Annotated[str | None, example("harbour-1")] = None


class AudioUrlPart(_Part, frozen=True, tag="audio_url"):
    """Audio by its URL, within a prompt made of parts, as in a chat.

    Attributes:
        audio_url: `{"url": ...}`, or the URL: data: in base64, or https.
        uuid: accepted and not used.
    """

    audio_url: Annotated[
        str | dict[str, Any] | None, example({"url": "https://example.com/harbour.wav"})
    ] = None
    uuid: Annotated[str | None, example("harbour-1")] = None


class AudioEmbedsPart(_Part, frozen=True, tag="audio_embeds"):
    """Rows of audio from a client's own encoder, within a prompt made of parts.

    Attributes:
        audio_embeds: base64 of a tensor file of shape (rows, hidden size), or an element that
            `/v1/encode` answers with. Needs --enable-mm-embeds.
        uuid: accepted and not used.
    """

    audio_embeds: Annotated[str | dict[str, Any], example(ROWS)]
    uuid: Annotated[str | None, example("harbour-1")] = None


class VideoUrlPart(_Part, frozen=True, tag="video_url"):
    """A video by its URL, within a prompt made of parts, as in a chat.

    Attributes:
        video_url: `{"url": ...}`, or the URL: of frames (data:video/jpeg;base64,FRAME,FRAME), of an
            animated GIF or WebP, or of an MP4 or WebM.
        uuid: accepted and not used.
    """

    video_url: Annotated[
        str | dict[str, Any] | None, example({"url": "https://example.com/harbour.mp4"})
    ] = None
    uuid: Annotated[str | None, example("harbour-1")] = None


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
        max_tokens: output tokens at most, 1 or more, or 0 with `echo` or for hidden states of
            the prompt; when absent 16, or less where the context leaves less.
        echo: return the prompt before the output, with `logprobs` its logprobs too; false when
            absent. Not with embeddings or media.
        add_special_tokens: put the tokenizer's special tokens around a text, or a first part that
            is a text; true when absent. A prompt that begins with rows gets no begin token: send
            one as `token_ids`.
    """

    prompt: Annotated[
        str | list[int | str | PromptPart | list[int | PromptPart]] | None, example(QUESTION)
    ] = None
    prompt_embeds: Annotated[
        str | EmbedsSource | list[str | EmbedsSource] | None, example({"ref": "pe-..."})
    ] = None
    suffix: Annotated[str | None, example("")] = None
    logprobs: Annotated[int | None, example(3)] = None

    DEFAULT_MAX_TOKENS: ClassVar[int | None] = 16
    PICKS_BEST: ClassVar[bool] = True

    @property
    def only_reads(self) -> bool:
        """True if no token is to be generated: the prompt alone is of interest."""
        return (bool(self.echo) and self.max_tokens == 0) or super().only_reads


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Logprobs as parallel lists with one entry for each token."""

    text_offset: Annotated[
        list[int], field("where each token begins in the text, in characters.", [0, 6])
    ]
    token_logprobs: Annotated[
        list[float | None],
        field(
            "logprob of each token; null for the first one of a prompt that is echoed.",
            [-0.25, -1.5],
        ),
    ]
    tokens: Annotated[list[str], field("text of each token.", [" Paris", "."])]
    top_logprobs: Annotated[
        list[dict[str, float] | None],
        field(
            "logprobs of the likeliest tokens at each place, by their text.", [{" Paris": -0.25}]
        ),
    ]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One continuation."""

    index: ListIndex
    text: AnswerText
    logprobs: Annotated[
        CompletionLogprobs | None, field("logprobs of the tokens; null unless asked for.")
    ] = None
    finish_reason: FinishReason = None
    stop_reason: StopReason = None
    token_ids: TokenIds = None
    prompt_logprobs: Annotated[
        list[dict[str, PromptLogprob] | None] | None,
        field("logprobs by token id at each position of the prompt; null unless asked for."),
    ] = None
    prompt_token_ids: PromptTokenIds = None
    routed_experts: None = None
    hidden_states: ShownStates = msgspec.UNSET
    weight_versions: WeightVersions = msgspec.UNSET


class Completion(WholeResponse, frozen=True, kw_only=True):
    """The response of `/v1/completions`."""

    id: Annotated[str, field("id of this answer.", "cmpl-5d0f")]
    object: Literal["text_completion"] = "text_completion"
    created: CreatedAt
    model: ModelName
    choices: Annotated[list[CompletionChoice], field("answers; in a stream, what is new of them.")]
    usage: Annotated[UsageInfo, field("Positions and tokens of this answer.")]


class CompletionChunkChoice(msgspec.Struct, frozen=True):
    """A piece of a continuation.

    The prompt's ids come with the first, hidden states in an event of their own behind the last.
    """

    index: ListIndex
    text: AnswerText
    logprobs: Annotated[
        CompletionLogprobs | None, field("logprobs of the tokens; null unless asked for.")
    ] = None
    finish_reason: FinishReason = None
    stop_reason: StopReason = None
    prompt_token_ids: PromptTokenIds = None
    token_ids: TokenIds = None
    hidden_states: ShownStates = msgspec.UNSET
    weight_versions: WeightVersions = msgspec.UNSET


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Event of a completion's stream; the last one has `system_fingerprint`."""

    id: Annotated[str, field("id of this answer.", "cmpl-5d0f")]
    object: Literal["text_completion"] = "text_completion"
    created: CreatedAt
    model: ModelName
    choices: Annotated[
        list[CompletionChunkChoice], field("answers; in a stream, what is new of them.")
    ]
    usage: Annotated[
        UsageInfo | msgspec.UnsetType, field("Positions and tokens of this answer.")
    ] = msgspec.UNSET
    system_fingerprint: Fingerprint = msgspec.UNSET
    metrics: ChunkMetrics = msgspec.UNSET
