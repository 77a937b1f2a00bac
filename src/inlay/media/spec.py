"""The media a model takes, as its card tells it, and the segments an item becomes."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.media.audio import AudioGeometry, AudioHeader
from inlay.media.frames import VideoHeader, read_video_header
from inlay.media.geometry import MAX_PIXELS, AnyResolution, FixedSize, Layout, PatchGrid
from inlay.media.tiles import Canvas, ChunkTiles, Lines, Pooled, Split
from inlay.media.video import Encode, FrameGrid, VideoLayout
from inlay.messages.prompt import Buffer, Media, Segment, Tokens

Kind: TypeAlias = Literal["image", "audio", "video"]
"""Kinds of media."""

KINDS: tuple[Kind, ...] = ("image", "audio", "video")

NAMED = {"image": "an image", "audio": "audio", "video": "a video"}
"""One item of each kind, in messages."""

ImageGeometry: TypeAlias = (
    FixedSize | AnyResolution | PatchGrid | Canvas | Lines | Split | ChunkTiles | Pooled
)
"""Every kind of layout of an image."""

Detail: TypeAlias = Literal["auto", "low", "high"]
"""OpenAI's `detail` of an image. "auto" and "high" are a family's own setting."""


class Placeholder(msgspec.Struct, frozen=True):
    """The token a chat template writes for one item, to be replaced by the item's positions.

    Attributes:
        text: a special token's text.
        id: its id.
        before: text that the family puts before it; tokenized together with what stands before.
        after: the same after it.
    """

    text: str
    id: int
    before: str = ""
    after: str = ""


class MediaSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a model's media: all that a frontend needs to lay an item out.

    Attributes:
        family: transformers' `model_type`.
        encoder_id: digest of the encoder's weights, of its processor's settings and of the backend
            that runs it, 32 hex digits. Rows of one file are equal where this is.
        placeholders: by kind.
        image: layout of images; None where the model takes none.
        audio: layout of audio; None where the model takes none.
        video: layout of videos; None where the model takes none.
        image_token: id that transformers puts at positions of an image's rows. It stands for
            nothing here but helps engines that need ids.
        audio_token: the same at positions of audio.
        mrope: rows have three-dimensional positions (`inlay.media.positions`).
        deepstack: levels of inner features that come with the rows.
        atomic: attention inside an item is bidirectional.
        max_pixels: of an image, as it comes and while it is resized.
        max_items: of a prompt, by kind; kinds that are not named are unlimited.
        embeds: embeddings of items that a client made are accepted (`inlay.media.embeds`).
    """

    family: str
    encoder_id: str
    placeholders: dict[Kind, Placeholder] = {}
    image: ImageGeometry | None = None
    audio: AudioGeometry | None = None
    video: FrameGrid | None = None
    image_token: int = -1
    audio_token: int = -1
    mrope: bool = False
    deepstack: int = 0
    atomic: bool = False
    max_pixels: int = MAX_PIXELS
    max_items: dict[Kind, int] = {}
    embeds: bool = False

    def takes(self, kind: str) -> bool:
        """Return True for a kind of media that the model takes."""
        known = {"image": self.image, "audio": self.audio, "video": self.video}
        return known.get(kind) is not None

    def check_counts(self, counts: Mapping[Kind, int]) -> None:
        """Check the numbers of items in one prompt.

        Raises:
            InvalidRequestError: a kind that the model does not take, or too many of one.
        """
        for kind, count in counts.items():
            if not count:
                continue
            if kind not in self.placeholders:
                allowed = ", ".join(self.placeholders) or "none"
                raise InvalidRequestError(
                    f"this model takes no {kind}; kinds of media it takes: {allowed}"
                )
            limit = self.max_items.get(kind)
            if limit is not None and count > limit:
                raise InvalidRequestError(
                    f"at most {limit} {kind}(s) may be given in one prompt, got {count} "
                    "(--limit-mm-per-prompt)"
                )

    def processor_settings(self, detail: Detail | None) -> dict[str, Any]:
        """Arguments that make transformers' image processor do what `layout` says."""
        if self.image is None:
            return {}
        return (self.image.low() if detail == "low" else self.image).settings()


def max_items_of(value: object) -> dict[Kind, int]:
    """Most items of a kind, from vLLM's `--limit-mm-per-prompt` after JSON.

    Args:
        value: {"image": 2} or {"image": {"count": 2, ...}}; options beside the count, which vLLM
            takes for its memory profile, are ignored.

    Raises:
        InvalidRequestError: another kind, or no count of at least 0.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError(f"limits of media are an object, got {str(value)[:80]!r}")
    found: dict[Kind, int] = {}
    for kind, limit in value.items():
        count = limit.get("count") if isinstance(limit, dict) else limit
        if kind not in KINDS or type(count) is not int or count < 0:
            raise InvalidRequestError(
                f"limits of media are counts from 0 of {', '.join(KINDS)}; got "
                f"{str(kind)[:40]!r}: {str(limit)[:80]!r} (--limit-mm-per-prompt)"
            )
        found[kind] = count
    return found


def layout(spec: MediaSpec, height: int, width: int, detail: Detail | None = None) -> Layout:
    """The layout of an image.

    Args:
        spec: of the model.
        height: in pixels, as it is seen: after its EXIF orientation.
        width: likewise.
        detail: OpenAI's.

    Raises:
        InvalidRequestError: a model without images, or an image too large, too small or too long
            for it.
    """
    if spec.image is None:
        raise InvalidRequestError("this model takes no image")
    if height < 1 or width < 1 or height * width > spec.max_pixels:
        raise InvalidRequestError(
            f"an image is {width} x {height} pixels; allowed: 1 to {spec.max_pixels} pixels in all"
        )
    geometry = spec.image.low() if detail == "low" else spec.image
    found = geometry.layout(height, width)
    if found.rows < 1:
        raise InvalidRequestError(f"an image of {width} x {height} pixels is too small to be seen")
    # All lines get their new width before there are fewer of them.
    resizing = max(found.resizing, max(height, found.size[0]) * found.size[1])
    if resizing > spec.max_pixels:
        raise InvalidRequestError(
            f"an image of {width} x {height} pixels is too thin: to resize it takes {resizing} "
            f"pixels; allowed: at most {spec.max_pixels}"
        )
    return found._replace(resizing=resizing)


def audio_layout(spec: MediaSpec, header: AudioHeader) -> Layout:
    """The layout of audio, after it was resampled to the encoder's rate and mixed to one channel.

    Raises:
        InvalidRequestError: a model without audio, or audio too long or too short for it.
    """
    if spec.audio is None:
        raise InvalidRequestError("this model takes no audio")
    found = spec.audio.layout(header.samples_at(spec.audio.rate))
    if found.rows < 1:
        raise InvalidRequestError(f"audio of {header.seconds:.3f} s is too short to be heard")
    return found


def video_header(spec: MediaSpec, data: memoryview) -> VideoHeader:
    """The header of a video, with the frames that the model sees.

    Raises:
        InvalidRequestError: a model without videos, or no video that is read.
    """
    if spec.video is None:
        raise InvalidRequestError("this model takes no video")
    return read_video_header(
        data,
        max_frames=spec.video.max_frames,
        max_pixels=spec.max_pixels,
        sampling=spec.video.sampling,
        containers=spec.video.containers,
    )


def video_layout(spec: MediaSpec, header: VideoHeader, encode: Encode) -> VideoLayout:
    """The layout of a video; `encode` tokenizes times.

    Raises:
        InvalidRequestError: a model without videos, or one too short or too long for it.
    """
    if spec.video is None:
        raise InvalidRequestError("this model takes no video")
    return spec.video.layout(header.height, header.width, header.seconds, header.fps, encode)


def media_segments(
    laid: Layout,
    digest: bytes,
    data: Buffer | None = None,
    *,
    kind: Kind = "image",
    detail: Detail | None = None,
    atomic: bool = False,
    interval: float = 1.0,
    rate: float = 0.0,
    ref: str | None = None,
) -> list[Segment]:
    """The segments of an item: its marker tokens, and one `Media` for each run of its rows.

    Args:
        laid: its layout.
        digest: `inlay.messages.digest.media_digest` of it.
        data: its bytes; the first run has them.
        kind: of the item.
        detail: what `laid` was made with.
        atomic: of the family.
        interval: of a video's layout.
        rate: of the model's videos.
        ref: name of the bytes, where `data` is None.
    """
    segments: list[Segment] = []
    start, total = 0, laid.rows
    for part in laid.parts:
        if isinstance(part, Tokens):
            segments.append(part)
            continue
        segments.append(
            Media(
                kind,
                digest,
                part,
                None if start else data,
                None if start else ref,
                laid.grid,
                atomic,
                start,
                total,
                "low" if detail == "low" else None,
                interval,
                rate=rate,
            )
        )
        start += part
    return segments
