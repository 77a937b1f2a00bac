"""Types of the routes between texts and embeddings: encode, and the rows of an upload."""

from typing import Any

import msgspec


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
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    ref: str | None = None
    noise: float = 0.0
    seed: int = 0


class RowsRequest(msgspec.Struct, kw_only=True):
    """Request for what the rows of the caller's own upload are.

    Attributes:
        model: name of the model that they are meant for; the first model when absent.
        nearest: tokens to be named for each row, nearest first; 0 (when absent) to 8. More than 0
            needs --enable-embedding-lookup.
    """

    model: str | None = None
    nearest: int = 0


class NearToken(msgspec.Struct, frozen=True):
    """A token near a row: `exact` if the row is its own."""

    id: int
    text: str
    distance: float
    cosine: float
    exact: bool


class RowFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row: its length (L2), its largest absolute element, and tokens near it."""

    norm: float
    abs_max: float
    nearest: list[NearToken] = []


class RowsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of an upload as the model takes them.

    Attributes:
        num_tokens: rows of the upload, which may be more than are shown.
        rows: the first 4,096, or with `nearest` the first 128.
        median_norm: of the rows shown.
        table_median_norm: of the model's embedding table; null without lookup.
    """

    id: str
    model: str
    num_tokens: int
    hidden_size: int
    dtype: str
    median_norm: float
    table_median_norm: float | None
    rows: list[RowFacts]
