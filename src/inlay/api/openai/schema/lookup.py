"""Types of the routes between texts and embeddings: encode, and the rows of an upload."""

from typing import Annotated, Any

import msgspec

from inlay.api.schema.described import CHAT, QUESTION, HiddenSize, ModelName, TokenText
from inlay.messages.fields import example, field


class EncodePromptRequest(msgspec.Struct, kw_only=True):
    """Embeddings to be made and stored: of a text, a chat or an upload; exactly one of them.

    Attributes:
        model: name of the model whose embedding table is used; the first model when absent.
        prompt: a text; the tokenizer's special tokens are added.
        messages: a chat of texts; its template is applied.
        ref: id of the caller's own upload, of one prompt.
        noise: length of the Gaussian noise that is added to a row, as a share of the rows' median
            length; 0 (when absent) to 64.
        seed: of the noise, 0 (when absent) to 2^63 - 1.
    """

    model: str | None = None
    prompt: Annotated[str | None, example(QUESTION)] = None
    messages: Annotated[list[dict[str, Any]] | None, example(CHAT)] = None
    ref: Annotated[str | None, example("pe-...")] = None
    noise: Annotated[float, example(0.5)] = 0.0
    seed: int = 0


class RowsRequest(msgspec.Struct, kw_only=True):
    """Request for what the rows of the caller's own upload are.

    Attributes:
        model: name of the model that they are meant for; the first model when absent.
        nearest: tokens to be named for each row, nearest first; 0 (when absent) to 8. More than 0
            needs --enable-embedding-lookup.
    """

    model: str | None = None
    nearest: Annotated[int, example(3)] = 0


class NearToken(msgspec.Struct, frozen=True):
    """A token near a row: `exact` if the row is its own."""

    id: Annotated[int, field("id of the token.", 464)]
    text: TokenText
    distance: Annotated[float, field("distance between the row and the token's row (L2).", 0.0)]
    cosine: Annotated[float, field("cosine of the angle between them.", 1.0)]
    exact: Annotated[bool, field("True if the row is the token's own.")]


class RowFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row: its length (L2), its largest absolute element, and tokens near it."""

    norm: Annotated[float, field("length of the row (L2).", 1.03)]
    abs_max: Annotated[float, field("largest absolute element.", 0.21)]
    nearest: Annotated[list[NearToken], field("tokens near the row, nearest first.")] = []


class RowsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of an upload as the model takes them.

    Attributes:
        num_tokens: rows of the upload, which may be more than are shown.
        rows: the first 4,096, or with `nearest` the first 128.
        median_norm: of the rows shown.
        table_median_norm: of the model's embedding table; null without lookup.
    """

    id: Annotated[str, field("id of the upload.", "pe-5d0f")]
    model: ModelName
    num_tokens: Annotated[int, example(17)]
    hidden_size: HiddenSize
    dtype: Annotated[str, field("dtype of the elements.", "bfloat16")]
    median_norm: Annotated[float, example(1.03)]
    table_median_norm: Annotated[float | None, example(1.01)]
    rows: list[RowFacts]
