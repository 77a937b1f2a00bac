"""Images and audio as a client sends them: files, references, or rows that a server encoded."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec

from inlay.base.errors import EngineError, InvalidRequestError, why_unusable
from inlay.client.connection import JSON, RETRIES, ApiClient, Question, Steps, asked
from inlay.client.prompts import Array, container
from inlay.client.uploader import Uploader, image_type
from inlay.media.spec import NAMED, Detail, Kind
from inlay.tensors import ReadLimits, TensorFormat, read, write

Grid: TypeAlias = tuple[int, int, int]

MediaFile: TypeAlias = str | Path | bytes
"""An image or audio: its path, or its bytes."""


@dataclass(frozen=True, eq=False)
class EmbeddedMedia:
    """Rows of one image or of one piece of audio, as an encoder made them.

    Attributes:
        rows: (num_tokens, width). The width is the model's hidden size; inner features of an image
            follow where the model has them.
        grid: (time, height, width) in patches, or in rows or tiles where tokens stand between
            these; None for audio and for models without a grid.
        kind: "image" or "audio".
    """

    rows: Array
    grid: Grid | None = None
    kind: Kind = "image"

    def __post_init__(self) -> None:
        if self.rows.ndim != 2:
            raise InvalidRequestError(
                f"rows of {NAMED[self.kind]} have shape (num_tokens, width), got {self.rows.shape}"
            )

    @property
    def num_tokens(self) -> int:
        """Positions that the rows take in a prompt."""
        return int(self.rows.shape[0])

    def to_bytes(self, format: TensorFormat = "safetensors") -> bytes:
        """The rows in a file; safetensors alone keeps the grid.

        Raises:
            EmbeddingsError: no rows, or a dtype or a grid that the format has no place for.
        """
        return write(self.rows, format, grid=self.grid)

    def chat_part(self) -> Any:
        """A part for a chat message's `content`, or for the prompt of a completion.

        The server needs `--enable-mm-embeds`. vLLM reads it too.
        """
        data = base64.b64encode(write(self.rows, "torch")).decode("ascii")
        name = f"{self.kind}_embeds"
        value: Any = data
        if self.grid is not None:
            value = {name: data, "image_grid_thw": list(self.grid)}
        return {"type": name, name: value}


def load_media(path: str | Path, kind: Kind = "image") -> EmbeddedMedia:
    """Rows from a file that `EmbeddedMedia.to_bytes` made, or base64 of one.

    Raises:
        InvalidRequestError: the file cannot be read, or holds no rows.
    """
    return media_of(media_bytes(path), kind)


def media_of(data: bytes, kind: Kind = "image", grid: Grid | None = None) -> EmbeddedMedia:
    """Rows from the bytes of a file.

    Args:
        data: the file, or base64 of it.
        kind: of what was encoded.
        grid: in the place of the file's own.

    Raises:
        InvalidRequestError: it holds no rows of one image, or of one piece of audio.
    """
    data = container(data)
    tensor = read(data, limits=ReadLimits(max_bytes=max(len(data), 1)))
    rows = tensor.array
    return EmbeddedMedia(
        rows[0] if rows.ndim == 3 and len(rows) == 1 else rows, grid or tensor.grid, kind
    )


def image_part(
    image: MediaFile, *, detail: Detail | None = None, uploader: Uploader | None = None
) -> Any:
    """An image file as a part of a chat message's `content`, or of a completion's prompt.

    Args:
        image: its path or bytes.
        detail: OpenAI's; "low" takes fewer positions where the model has a smaller layout.
        uploader: sends large files once and then refers to them.

    Raises:
        InvalidRequestError: no image, or none of a format that servers read.
        InlayError: the upload failed.
    """
    data = media_bytes(image)
    more = {} if detail is None else {"detail": detail}
    if uploader is not None and len(data) >= uploader.upload_from:
        return {"type": "image_url", "ref": uploader.image_ref(data), **more}
    url = f"data:{image_type(data)};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def audio_part(audio: MediaFile) -> Any:
    """An audio file as a part of a chat message's `content`, or of a completion's prompt.

    Raises:
        InvalidRequestError: it cannot be read.
    """
    data = base64.b64encode(media_bytes(audio)).decode("ascii")
    return {"type": "input_audio", "input_audio": {"data": data}}


def media_bytes(file: MediaFile) -> bytes:
    """The bytes of a file. Raises `InvalidRequestError` where it cannot be read."""
    if isinstance(file, bytes):
        return file
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{str(file)!r}: {why_unusable(error)}") from error


class _Element(msgspec.Struct):
    image_embeds: str | None = None
    audio_embeds: str | None = None
    image_grid_thw: Grid | None = None

    def media(self) -> EmbeddedMedia:
        """The rows. Raises `EngineError` where it holds none."""
        for kind, rows in (("image", self.image_embeds), ("audio", self.audio_embeds)):
            if rows is not None:
                return media_of(rows.encode(), cast("Kind", kind), self.image_grid_thw)
        raise EngineError("/encode answered an element without rows")


class _EncodedItem(msgspec.Struct):
    data: list[_Element]


class MediaEncoder:
    """Encodes images and audio on a server, by `POST /v1/encode`.

    The rows are an image, or audio, to any server of the same model: also where it has no encoder,
    and the file itself need not be sent to it.

    Args:
        base_url: of a server with the model, or with its encoder alone (`--task encode`).
        api_key: as the `openai` client's.
        model: name of the model there; its only one unless given.
        timeout: seconds an answer may take.
        max_retries: further tries where the server is full or cannot be reached.

    Raises:
        InvalidRequestError: not an HTTP URL.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout: float = 300.0,
        max_retries: int = RETRIES,
    ) -> None:
        self._connection = ApiClient(base_url, api_key, timeout)
        self._model = model
        self._retries = max_retries

    def encode(
        self, file: MediaFile, *, kind: Kind = "image", detail: Detail | None = None
    ) -> EmbeddedMedia:
        """The rows of one file; arguments and errors as `encode_all`."""
        return self.encode_all([file], kind=kind, detail=detail)[0]

    def encode_all(
        self, files: Sequence[MediaFile], *, kind: Kind = "image", detail: Detail | None = None
    ) -> list[EmbeddedMedia]:
        """The rows of files, in their order.

        Args:
            files: paths or bytes.
            kind: "image" or "audio".
            detail: of images, as of `image_part`.

        Raises:
            InvalidRequestError: a file that cannot be read, or that the model does not take.
            InlayError: as the server answers, or `OverloadedError` when it cannot be reached.
        """
        return self._connection.run(self._encoded(files, kind, detail))

    async def encode_all_async(
        self, files: Sequence[MediaFile], *, kind: Kind = "image", detail: Detail | None = None
    ) -> list[EmbeddedMedia]:
        """As `encode_all`, without blocking the event loop."""
        return await self._connection.run_async(self._encoded(files, kind, detail))

    def _encoded(
        self, files: Sequence[MediaFile], kind: Kind, detail: Detail | None
    ) -> Steps[list[EmbeddedMedia]]:
        if kind == "audio":
            parts = [audio_part(file) for file in files]
        else:
            parts = [image_part(file, detail=detail) for file in files]
        body: dict[str, Any] = {"input": parts}
        if self._model is not None:
            body["model"] = self._model
        question = Question("POST", "/encode", msgspec.json.encode(body), JSON)
        answer = yield from asked(question, self._retries)
        try:
            found = msgspec.json.decode(answer, type=_EncodedItem).data
        except msgspec.MsgspecError as error:
            raise EngineError(f"/encode answered something else than rows: {error}") from error
        if len(found) != len(files):
            raise EngineError(f"/encode answered {len(found)} elements for {len(files)} files")
        return [one.media() for one in found]
