"""One item of media, from the bytes of its file to the segments of a prompt."""

from typing import NamedTuple

from inlay.media.audio import MAX_SECONDS, read_audio_header
from inlay.media.geometry import Layout
from inlay.media.image import read_image_header
from inlay.media.spec import (
    Detail,
    Kind,
    MediaSpec,
    audio_layout,
    layout,
    media_segments,
    video_header,
    video_layout,
)
from inlay.media.video import Encode
from inlay.messages.digest import Secret, media_digest
from inlay.messages.prompt import Buffer, Segment


class Item(NamedTuple):
    """An item that was sized, not decoded.

    Attributes:
        segments: its marker tokens and the runs of its rows.
        positions: of all segments.
        decoded_bytes: that its picture or sound takes in memory once it is decoded.
    """

    segments: tuple[Segment, ...]
    positions: int
    decoded_bytes: int


def image_item(
    spec: MediaSpec, data: Buffer, secret: Secret, *, detail: Detail | None = None
) -> Item:
    """An image by its file.

    It is read once to digest it, at memory speed, and otherwise only its headers.

    Raises:
        InvalidRequestError: no image that the model takes.
    """
    header = read_image_header(data.view, max_pixels=spec.max_pixels)
    laid = layout(spec, header.height, header.width, detail)
    settings = "low" if detail == "low" else ""
    return _item(spec, laid, data, secret, "image", settings, header.decoded_bytes)


def audio_item(
    spec: MediaSpec, data: Buffer, secret: Secret, *, max_seconds: float = MAX_SECONDS
) -> Item:
    """Audio by its file, as `image_item`.

    Raises:
        InvalidRequestError: no audio that the model takes.
    """
    header = read_audio_header(data.view, max_seconds=max_seconds)
    laid = audio_layout(spec, header)
    decoded = header.samples * header.channels * 4
    return _item(spec, laid, data, secret, "audio", "", decoded)


def video_item(spec: MediaSpec, data: Buffer, secret: Secret, encode: Encode) -> Item:
    """A video by its file, as `image_item`; `encode` tokenizes the times between its frames.

    Raises:
        InvalidRequestError: no video that the model takes.
    """
    header = video_header(spec, data.view)
    laid, interval = video_layout(spec, header, encode)
    decoded = header.height * header.width * 4
    return _item(spec, laid, data, secret, "video", "", decoded, interval)


def _item(
    spec: MediaSpec,
    laid: Layout,
    data: Buffer,
    secret: Secret,
    kind: Kind,
    settings: str,
    decoded_bytes: int,
    interval: float = 1.0,
) -> Item:
    digest = media_digest(
        data.view, secret, kind=kind, encoder_id=spec.encoder_id, settings=settings
    )
    segments = media_segments(
        laid,
        digest,
        data,
        kind=kind,
        detail="low" if settings == "low" else None,
        atomic=spec.atomic,
        interval=interval,
        rate=spec.video.rate if kind == "video" and spec.video is not None else 0.0,
    )
    return Item(tuple(segments), laid.positions, decoded_bytes)
