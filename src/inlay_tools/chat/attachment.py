"""Files that a message carries: pictures and embeddings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pybase64

from inlay.base.errors import EmbeddingsError, InvalidRequestError
from inlay.client import EmbeddedPrompt, Uploader, loads
from inlay.media.image import FORMATS, read_image_header
from inlay_tools.files import read_to_send

_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM")


class Attachment(Protocol):
    """A file in a message."""

    @property
    def path(self) -> Path:
        """The file it was read from."""

    def described(self) -> str:
        """One line about it."""

    def part(self, uploader: Uploader) -> dict[str, Any]:
        """The part of a message's content. Raises `InlayError` if an upload fails."""


@dataclass(frozen=True)
class ImageFile:
    """An image file."""

    path: Path
    data: bytes
    size: str

    def described(self) -> str:
        """One line about it."""
        return f"{self.path.name}: {self.size}"

    def part(self, uploader: Uploader) -> dict[str, Any]:
        """The part of a message's content."""
        kind = self.size.split()[0].lower()
        url = f"data:image/{kind};base64,{pybase64.b64encode(self.data).decode('ascii')}"
        return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True)
class EmbeddingsFile:
    """A file of prompt embeddings, of one prompt."""

    path: Path
    prompt: EmbeddedPrompt

    def described(self) -> str:
        """One line about it."""
        rows = self.prompt
        return f"{self.path.name}: {rows.num_tokens} rows of {rows.hidden_size}, {rows.rows.dtype}"

    def part(self, uploader: Uploader) -> dict[str, Any]:
        """The part of a message's content: large rows by reference, so that they travel once."""
        part: dict[str, Any] = self.prompt.chat_part(uploader=uploader)
        return part


def attachment(path: Path) -> Attachment:
    """Read a file that is a picture or embeddings, by its content.

    Raises:
        FileError: it cannot be read, or is too large.
        InvalidRequestError: it is neither, or broken.
    """
    data = read_to_send(path)
    if data.startswith(_PICTURES):
        header = read_image_header(data)
        return ImageFile(path, data, f"{header.format} of {header.width} x {header.height} pixels")
    try:
        prompts = loads(data)
    except EmbeddingsError as error:
        raise InvalidRequestError(
            f"{path}: neither a picture ({', '.join(FORMATS)}) nor embeddings (torch.save, "
            f"safetensors, npy): {error.message}"
        ) from error
    if len(prompts) != 1:
        raise InvalidRequestError(f"{path}: holds {len(prompts)} prompts, one can be attached")
    return EmbeddingsFile(path, prompts[0])
