"""`/v1/prompt_embeds`: embeddings uploaded once and used by reference."""

from typing import Literal

import msgspec


class UploadRequest(msgspec.Struct, frozen=True):
    """An upload in JSON, for clients that cannot send raw bytes.

    Attributes:
        data: base64 of a tensor file.
    """

    data: str


class PinRequest(msgspec.Struct, frozen=True):
    """What becomes of a stored prompt's expiry.

    Attributes:
        pinned: keep it until it is unpinned or deleted; false lets it expire again.
    """

    pinned: bool = True


class PromptEmbeds(msgspec.Struct, frozen=True, kw_only=True):
    """A stored prompt.

    Attributes:
        id: what `{"ref": id}` names it by.
        num_prompts: how many prompts it holds, each of `num_tokens` rows: 1 unless a batch was
            uploaded.
        dtype: as it was uploaded.
        bytes: of the tensor.
        expires_at: Unix time it is forgotten at unless it is used before; null while it is pinned.
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
    """A stored prompt is gone."""

    id: str
    object: Literal["prompt_embeds"] = "prompt_embeds"
    deleted: bool = True
