"""Types of `/v1/prompt_embeds`: embeddings uploaded once and used by reference."""

from typing import Literal

import msgspec


class UploadRequest(msgspec.Struct, frozen=True):
    """An upload in JSON, for clients that cannot send raw bytes.

    Attributes:
        data: base64 of a tensor file.
    """

    data: str


class PinRequest(msgspec.Struct, frozen=True):
    """Request to pin or unpin a stored prompt.

    Attributes:
        pinned: true keeps it until it is unpinned or deleted; false lets it expire.
    """

    pinned: bool = True


class PromptEmbeds(msgspec.Struct, frozen=True, kw_only=True):
    """A stored prompt.

    Attributes:
        id: id for `{"ref": id}`.
        num_prompts: number of prompts, each of `num_tokens` vectors: 1 unless a batch was
            uploaded.
        dtype: dtype of the uploaded tensor.
        bytes: size of the tensor.
        expires_at: Unix time at which it expires unless it is used before; null while pinned.
    """

    id: str
    object: Literal["prompt_embeds"] = "prompt_embeds"
    num_prompts: int
    num_tokens: int
    hidden_size: int
    dtype: str
    bytes: int
    expires_at: int | None
    pinned: bool


class PromptEmbedsDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Response to the deletion of a stored prompt."""

    id: str
    object: Literal["prompt_embeds"] = "prompt_embeds"
    deleted: bool = True
