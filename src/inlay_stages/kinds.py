"""Kinds of stages: what each takes and gives, and what runs it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from inlay.messages.edges import Window


class PortType(StrEnum):
    """Types of what passes between stages.

    TEXT is UTF-8; IDS are those of all tokens of a language model's answer but its end; HIDDEN
    hidden states of a language model, as rows of another's prompt; EMBEDS a bundle of named tensors
    that stands for a prompt; LATENTS a denoiser's result, and before it, where previews are asked
    for, its estimates of it; IMAGE the file of an image; PCM a whole sound, float32 [samples] in
    [-1, 1], with the rate of the model's card; BLOB a finished file, uint8 [bytes], with its media
    type as ".type" beside it.
    Streams, which the next stage or the client reads while they are made: IMAGES are files of an
    image so far; STATES what the first layer of a language model reads and its last gives, position
    by position; TOKENS ids of tokens, as of a codec of sound; AUDIO pieces of sound, as of PCM.
    """

    TEXT = "Text"
    IDS = "TokenIds"
    HIDDEN = "HiddenStates"
    EMBEDS = "Embeds"
    LATENTS = "Latents"
    IMAGE = "Image"
    PCM = "AudioPcm"
    BLOB = "Blob"
    IMAGES = "ImageStream"
    STATES = "HiddenStream"
    TOKENS = "TokenStream"
    AUDIO = "AudioStream"


STREAMS: Mapping[PortType, Window] = {
    PortType.STATES: Window(256, 64 << 20),
    PortType.TOKENS: Window(256, 1 << 20),
    PortType.AUDIO: Window(16, 16 << 20),
}
"""Types that are streams, with what is kept of one before the stage that makes it waits."""


@dataclass(frozen=True)
class StageKind:
    """One kind of stage.

    Attributes:
        inputs: type of each port that takes something. A stage is fed on exactly one of them.
        outputs: type of each port that gives something.
        engine: name of the engine that runs it unless the deployment names another.
        engines: names of those that can.
        part: `EngineSettings.part` of its worker.
    """

    inputs: Mapping[str, PortType]
    outputs: Mapping[str, PortType]
    engine: str
    engines: frozenset[str] = field(default=frozenset())
    part: str = "pipeline"


_TEXT, _EMBEDS = {"prompt": PortType.TEXT}, {"embeds": PortType.EMBEDS}
_IDS, _HIDDEN = {"tokens": PortType.IDS}, {"hidden": PortType.HIDDEN}
_IMAGES = {"image": PortType.IMAGE, "preview": PortType.IMAGES}
_DIFFUSERS = frozenset({"diffusers"})
_SPEECH = frozenset({"speech"})

KINDS: Mapping[str, StageKind] = {
    "generate": StageKind(
        _TEXT | _IDS | _HIDDEN,
        {"text": PortType.TEXT} | _IDS | _HIDDEN | {"states": PortType.STATES},
        "torch",
        frozenset({"torch", "vllm", "sglang", "echo"}),
    ),
    "image": StageKind(_TEXT | _EMBEDS, _IMAGES, "diffusers", _DIFFUSERS | {"vllm-omni"}),
    "encode": StageKind(_TEXT, _EMBEDS, "diffusers", _DIFFUSERS, "text_encoder"),
    "denoise": StageKind(
        _EMBEDS,
        {"latents": PortType.LATENTS},
        "diffusers",
        _DIFFUSERS,
        "denoiser",
    ),
    "decode": StageKind({"latents": PortType.LATENTS}, _IMAGES, "diffusers", _DIFFUSERS, "vae"),
    "talk": StageKind(
        {"states": PortType.STATES}, {"codes": PortType.TOKENS}, "speech", _SPEECH, "talker"
    ),
    "vocode": StageKind(
        {"codes": PortType.TOKENS},
        {"audio": PortType.AUDIO, "sound": PortType.PCM, "file": PortType.BLOB},
        "speech",
        _SPEECH,
        "token2wav",
    ),
}
"""Kinds of stages by their name in a graph."""
