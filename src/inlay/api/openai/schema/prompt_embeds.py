"""Types of `/v1/prompt_embeds`: embeddings and images uploaded once and used by reference."""

from typing import Literal, TypeAlias

import msgspec


class UploadRequest(msgspec.Struct, frozen=True):
    """An upload in JSON, for clients that cannot send raw bytes.

    Attributes:
        data: base64 of a tensor file of shape (num_tokens, hidden size) or (batch, num_tokens,
            hidden size), or a data: URL of an image.
    """

    data: str


class PinRequest(msgspec.Struct, frozen=True):
    """Request to pin or unpin a stored prompt.

    Attributes:
        pinned: true, as when absent, keeps it until it is unpinned or deleted; false lets it
            expire.
    """

    pinned: bool = True


class PromptEmbeds(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="prompt_embeds"
):
    """Stored embeddings.

    Attributes:
        id: id for `{"ref": id}`.
        num_prompts: number of prompts, each of `num_tokens` vectors: 1 unless a batch was
            uploaded.
        dtype: dtype of the uploaded tensor.
        bytes: size of the tensor.
        expires_at: Unix time at which it expires unless it is used before; null while pinned.
    """

    id: str
    num_prompts: int
    num_tokens: int
    hidden_size: int
    dtype: str
    bytes: int
    expires_at: int | None
    pinned: bool


class StoredImage(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="image"):
    """A stored image.

    Attributes:
        id: id for `{"type": "image_url", "ref": id}`.
        format: format of the file, by its content.
        width: in pixels as it is seen, after its orientation.
        height: likewise.
        num_tokens: positions that it takes in a prompt of the model that the upload named; null
            for others.
        bytes: size of the file.
        expires_at: Unix time at which it expires unless it is used before; null while pinned.
    """

    id: str
    format: str
    width: int
    height: int
    num_tokens: int | None
    bytes: int
    expires_at: int | None
    pinned: bool


Stored: TypeAlias = PromptEmbeds | StoredImage
"""A stored prompt."""


class PromptEmbedsDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Response to the deletion of a stored prompt."""

    id: str
    object: Literal["prompt_embeds"] = "prompt_embeds"
    deleted: bool = True
