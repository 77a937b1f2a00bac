"""Types of `/v1/audio/speech`."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from inlay.api.schema.described import OutputTokens, PromptTokens, Stages, TotalTokens
from inlay.api.schema.unserved import Unserved
from inlay.messages.fields import example, field
from inlay_stages.api.schema.failure import StreamFailure


class VoiceId(msgspec.Struct, frozen=True):
    """A voice by its id, as OpenAI's.

    Attributes:
        id: name of the voice.
    """

    id: Annotated[str, example("Chelsie")]


class SpeechRequest(msgspec.Struct, kw_only=True):
    """A request to `/v1/audio/speech`. Names beyond OpenAI's are vLLM-Omni's.

    Attributes:
        input: what is spoken: text, or parts as of a chat's content: `text`, and `prompt_embeds`
            with exactly one of `data` (base64), `ref`, `part`. Not empty.
        model: served name; when absent the first pipeline that speaks.
        voice: one of the model's, by name or as `{"id": name}`; its first when absent.
        instructions: the user's message to which `input` is the answer, as text or as parts: how it
            is to be spoken. A short one that asks to read aloud when absent.
        response_format: "mp3" (as when absent), "opus", "flac", "wav", or "pcm", which is 16 bits,
            little endian; of one channel.
        stream_format: "audio": the file piece by piece, while it is made; "sse": server-sent
            events. When absent, "audio" for "mp3", "opus" and "pcm", and one whole file for others.
        stream: as vLLM-Omni's: true is `stream_format` "sse" where that is absent; false is one
            whole file, and refused beside it.
        seed: of the sound; a random one when absent or -1.
        max_new_tokens: codes of sound at most; what the pipeline says when absent, and never more.
        user: accepted; nothing depends on it.
        request_id: name of the request in logs: 1 to 128 visible ASCII characters.
        priority: lower values are served first, 0 when absent; others only with --scheduling-policy
            priority.
    """

    input: Annotated[str | list[dict[str, Any]], example("Good morning.")]
    model: str | None = None
    voice: Annotated[str | VoiceId | None, example("Chelsie")] = None
    instructions: Annotated[
        str | list[dict[str, Any]] | None, example("Read the text aloud, slowly.")
    ] = None
    response_format: Annotated[str | None, example("pcm")] = None
    stream_format: Literal["audio", "sse"] | None = None
    stream: bool | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_new_tokens: Annotated[Annotated[int, msgspec.Meta(ge=1)] | None, example(1500)] = None
    user: str | None = None
    request_id: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    speed: Unserved = None

    ambient_sound: Unserved = None
    duration_seconds: Unserved = None
    extra_params: Unserved = None
    initial_codec_chunk_frames: Unserved = None
    language: Unserved = None
    non_streaming_mode: Unserved = None
    ref_audio: Unserved = None
    ref_audio_2: Unserved = None
    ref_text: Unserved = None
    sample_rate: Unserved = None
    speaker_embedding: Unserved = None
    task_type: Unserved = None
    word_timestamps: Unserved = None
    x_vector_only_mode: Unserved = None


class SpeechUsage(msgspec.Struct, frozen=True):
    """Positions of the prompt and of the text that is spoken, and codes of the sound.

    `stages` has the share of each stage, by its name.
    """

    input_tokens: PromptTokens
    output_tokens: OutputTokens
    total_tokens: TotalTokens
    stages: Stages


class SpeechDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="speech.audio.delta"
):
    """Event with a piece of the file, in base64."""

    audio: Annotated[str, field("a piece of the file, in base64.", "UklGRv...")]


class SpeechDone(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="speech.audio.done"
):
    """Event of the end. `finish_reason` is "length" where the sound ends before the text does."""

    usage: Annotated[SpeechUsage, field("Positions and tokens of this answer.")]
    finish_reason: Annotated[
        Literal["stop", "length"],
        field(
            "`stop`, `length` at a limit of tokens, or `tool_calls`; null until the answer ends."
        ),
    ]


SpeechEvent: TypeAlias = SpeechDelta | SpeechDone | StreamFailure
"""An event of a stream."""
