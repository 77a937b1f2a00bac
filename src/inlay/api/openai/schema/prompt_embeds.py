"""Types of `/v1/prompt_embeds`: contents that are kept and used by reference."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from inlay.api.schema.described import ROWS, HiddenSize
from inlay.messages.fields import example, field


class UploadRequest(msgspec.Struct, frozen=True):
    """An upload in JSON, for clients that cannot send raw bytes.

    Attributes:
        data: base64 of a tensor file of shape (num_tokens, hidden size) or (batch, num_tokens,
            hidden size), or a data: URL of an image.
    """

    data: Annotated[str, example(ROWS)]


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

    id: Annotated[str, example("pe-5d0f")]
    num_prompts: Annotated[int, example(1)]
    num_tokens: Annotated[int, field("rows of a prompt.", 17)]
    hidden_size: HiddenSize
    dtype: Annotated[str, example("bfloat16")]
    bytes: Annotated[int, example(69632)]
    expires_at: Annotated[int | None, example(1764000000)]
    pinned: Annotated[bool, field("True if it does not expire.", False)]


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

    id: Annotated[str, example("pe-5d0f")]
    format: Annotated[str, example("png")]
    width: Annotated[int, example(640)]
    height: Annotated[int, example(480)]
    num_tokens: Annotated[int | None, example(17)]
    bytes: Annotated[int, example(4096)]
    expires_at: Annotated[int | None, example(1764000000)]
    pinned: Annotated[bool, field("True if it does not expire.", False)]


class StoredVectors(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="vectors"):
    """Stored vectors of a document.

    Attributes:
        id: id for `{"ref": id}` in a rerank or a score.
        num_vectors: vectors of its largest output: 1 unless they are of tokens.
        size: elements of each.
        dtype: dtype of the vectors.
        bytes: size of the file.
        expires_at: Unix time at which it expires unless it is used before; null while pinned.
    """

    id: Annotated[str, example("pv-5d0f")]
    num_vectors: Annotated[int, example(177)]
    size: Annotated[int, example(128)]
    dtype: Annotated[str, example("float32")]
    bytes: Annotated[int, example(90880)]
    expires_at: Annotated[int | None, example(1764000000)]
    pinned: Annotated[bool, field("True if it does not expire.", False)]


Stored: TypeAlias = PromptEmbeds | StoredImage | StoredVectors
"""A stored content."""


class PromptEmbedsDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Response to the deletion of a stored prompt."""

    id: Annotated[str, field("id of what was deleted.", "pe-5d0f")]
    object: Literal["prompt_embeds"] = "prompt_embeds"
    deleted: Annotated[bool, field("True: it is gone.", True)] = True
