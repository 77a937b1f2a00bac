"""Answers of `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from typing import Annotated, Literal

import msgspec

from inlay.messages.fields import field


class TranscriptionUsage(msgspec.Struct, frozen=True, tag="tokens", tag_field="type"):
    """Positions and tokens of all pieces of the sound."""

    input_tokens: Annotated[int, field("positions of the prompts.", 770)]
    output_tokens: Annotated[int, field("tokens of the answers.", 30)]
    total_tokens: Annotated[int, field("of both.", 800)]


class Transcription(msgspec.Struct, frozen=True):
    """Text of a sound; what follows `usage` only in `verbose_json`.

    `segments` and `words` are null: their times are not known.
    """

    text: Annotated[str, field("the text.", "Count the ships.")]
    usage: Annotated[TranscriptionUsage, field("positions and tokens.")]
    task: Annotated[str | msgspec.UnsetType, field("transcribe or translate.", "transcribe")] = (
        msgspec.UNSET
    )
    language: Annotated[str | msgspec.UnsetType, field("as the request had it.", "en")] = (
        msgspec.UNSET
    )
    duration: Annotated[float | msgspec.UnsetType, field("seconds of the sound.", 28.4)] = (
        msgspec.UNSET
    )
    segments: msgspec.UnsetType | None = msgspec.UNSET
    words: msgspec.UnsetType | None = msgspec.UNSET


class TextDelta(msgspec.Struct, frozen=True, tag="transcript.text.delta", tag_field="type"):
    """Next piece of the text."""

    delta: Annotated[str, field("what is new.", "Count")]


class TextDone(msgspec.Struct, frozen=True, tag="transcript.text.done", tag_field="type"):
    """The whole text; the last event."""

    text: Annotated[str, field("the text.", "Count the ships.")]
    usage: Annotated[TranscriptionUsage, field("positions and tokens.")]


TranscriptionEvent = TextDelta | TextDone
Task = Literal["transcribe", "translate"]
