"""Parameters of requests to stages: to make images, and to speak."""

from typing import Literal, TypeAlias

import msgspec

from inlay.messages.prompt import Media

ImageFormat: TypeAlias = Literal["png", "jpeg", "webp"]


class Diffusion(msgspec.Struct, frozen=True, kw_only=True, tag="diffusion", omit_defaults=True):
    """Parameters of a stage that makes images, or of a part of it.

    Attributes:
        width: of the images, in pixels.
        height: of the images, in pixels.
        steps: of the denoiser.
        guidance: the scale of guidance; 1 and less: none.
        seed: of all noise.
        count: number of images.
        negative: text that guidance leads away from, or None.
        preview_every: steps after which the images so far are given; 0: never.
        image_format: of the files.
    """

    width: int
    height: int
    steps: int
    guidance: float = 1.0
    seed: int = 0
    count: int = 1
    negative: str | None = None
    preview_every: int = 0
    image_format: ImageFormat = "png"

    @property
    def work(self) -> int:
        """Steps of all images, by which routers weigh the request."""
        return self.steps * self.count


class Speech(msgspec.Struct, frozen=True, kw_only=True, tag="speech", omit_defaults=True):
    """Parameters of a stage that speaks: a talker, or the vocoder behind it.

    Attributes:
        voice: one of the card's.
        prompt_tokens: positions before the text that is spoken.
        media: runs of media among them, as `inlay.media.positions.media_runs` gives them.
        seed: of what the talker draws, and of the vocoder's noise.
        max_tokens: codes at most.
        temperature: of the talker; 0 is greedy.
        top_k: 0 means all.
        chunk: codes of which sound is made at a time; 0: of all at once.
        port: of the vocoder, that gives its sound: "audio", piece by piece; "sound", all at once;
            "file".
        format: of the file, one of `inlay.media.sound_files.FORMATS`.
    """

    voice: str
    prompt_tokens: int = 0
    media: tuple[tuple[int, Media], ...] = ()
    seed: int = 0
    max_tokens: int = 4096
    temperature: float = 0.9
    top_k: int = 40
    top_p: float = 0.8
    repetition_penalty: float = 1.05
    chunk: int = 0
    port: Literal["audio", "sound", "file"] = "audio"
    format: str = "wav"


PARAMS = (Diffusion, Speech)
"""As `inlay.extension.Extension.params` names them."""
