"""Images as a client sends them: files, references, or rows that a server encoded."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from inlay.client.connection import JSON, Connection
from inlay.client.prompts import Array, container
from inlay.client.steps import RETRIES, Question, Steps, asked
from inlay.client.uploader import Uploader, image_type
from inlay.errors import EngineError, InvalidRequestError
from inlay.media.spec import Detail
from inlay.tensors import ReadLimits, TensorFormat, read, write

Grid: TypeAlias = tuple[int, int, int]

ImageFile: TypeAlias = str | Path | bytes
"""An image: its path, or its bytes."""


@dataclass(frozen=True, eq=False)
class EmbeddedImage:
    """Rows of one image, as an encoder made them.

    Attributes:
        rows: (num_tokens, width). The width is the model's hidden size; inner features of the image
            follow where the model has them.
        grid: (time, height, width) in patches; None for models without a grid.
    """

    rows: Array
    grid: Grid | None = None

    def __post_init__(self) -> None:
        if self.rows.ndim != 2:
            raise InvalidRequestError(
                f"an image's rows have shape (num_tokens, width), got {self.rows.shape}"
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
        value: Any = data
        if self.grid is not None:
            value = {"image_embeds": data, "image_grid_thw": list(self.grid)}
        return {"type": "image_embeds", "image_embeds": value}


def load_image(path: str | Path) -> EmbeddedImage:
    """Rows of an image from a file that `EmbeddedImage.to_bytes` made, or base64 of one.

    Raises:
        InvalidRequestError: the file cannot be read, or holds no rows.
    """
    try:
        return image_of(Path(path).read_bytes())
    except OSError as error:
        raise InvalidRequestError(f"{str(path)!r}: {error.strerror}") from error


def image_of(data: bytes, grid: Grid | None = None) -> EmbeddedImage:
    """Rows of an image from the bytes of a file.

    Args:
        data: the file, or base64 of it.
        grid: in the place of the file's own.

    Raises:
        InvalidRequestError: it holds no rows of one image.
    """
    data = container(data)
    tensor = read(data, limits=ReadLimits(max_bytes=max(len(data), 1)))
    rows = tensor.array
    return EmbeddedImage(
        rows[0] if rows.ndim == 3 and len(rows) == 1 else rows, grid or tensor.grid
    )


def image_part(
    image: ImageFile, *, detail: Detail | None = None, uploader: Uploader | None = None
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
    data = image_bytes(image)
    more = {} if detail is None else {"detail": detail}
    if uploader is not None and len(data) >= uploader.upload_from:
        return {"type": "image_url", "ref": uploader.image_ref(data), **more}
    url = f"data:{image_type(data)};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def image_bytes(image: ImageFile) -> bytes:
    """The bytes of an image file. Raises `InvalidRequestError` where it cannot be read."""
    if isinstance(image, bytes):
        return image
    try:
        return Path(image).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{str(image)!r}: {error.strerror}") from error


class _Element(msgspec.Struct):
    image_embeds: str
    image_grid_thw: Grid | None = None


class _Encoded(msgspec.Struct):
    data: list[_Element]


class ImageEncoder:
    """Encodes images on a server, by `POST /v1/encode`.

    The rows are an image to any server of the same model: also where it has no encoder, and the
    picture itself need not be sent to it.

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
        self._connection = Connection(base_url, api_key, timeout)
        self._model = model
        self._retries = max_retries

    def encode(self, image: ImageFile, *, detail: Detail | None = None) -> EmbeddedImage:
        """The rows of one image; arguments and errors as `encode_all`."""
        return self.encode_all([image], detail=detail)[0]

    def encode_all(
        self, images: Sequence[ImageFile], *, detail: Detail | None = None
    ) -> list[EmbeddedImage]:
        """The rows of images, in their order.

        Args:
            images: paths or bytes.
            detail: as of `image_part`.

        Raises:
            InvalidRequestError: an image that cannot be read, or that the model does not take.
            InlayError: as the server answers, or `OverloadedError` when it cannot be reached.
        """
        return self._connection.run(self._encoded(images, detail))

    async def encode_all_async(
        self, images: Sequence[ImageFile], *, detail: Detail | None = None
    ) -> list[EmbeddedImage]:
        """As `encode_all`, without blocking the event loop."""
        return await self._connection.run_async(self._encoded(images, detail))

    def _encoded(
        self, images: Sequence[ImageFile], detail: Detail | None
    ) -> Steps[list[EmbeddedImage]]:
        body: dict[str, Any] = {"input": [image_part(image, detail=detail) for image in images]}
        if self._model is not None:
            body["model"] = self._model
        question = Question("POST", "/encode", msgspec.json.encode(body), JSON)
        answer = yield from asked(question, self._retries)
        try:
            found = msgspec.json.decode(answer, type=_Encoded).data
        except msgspec.MsgspecError as error:
            raise EngineError(f"/encode answered something else than rows: {error}") from error
        if len(found) != len(images):
            raise EngineError(f"/encode answered {len(found)} elements for {len(images)} images")
        return [image_of(one.image_embeds.encode(), one.image_grid_thw) for one in found]


__all__ = [
    "EmbeddedImage",
    "ImageEncoder",
    "ImageFile",
    "image_bytes",
    "image_of",
    "image_part",
    "load_image",
]
