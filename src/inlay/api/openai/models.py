"""`/v1/models`."""

from typing import Literal

import msgspec

from inlay.card import Exactness, Refusal


class ModelLimits(msgspec.Struct, frozen=True):
    """What one request may ask of the model."""

    max_model_len: int
    max_logprobs: int
    max_choices: int
    max_prompt_embeds_bytes: int
    max_prompt_embeds_abs: float | None
    max_body_bytes: int


class EmbeddingFacts(msgspec.Struct, frozen=True):
    """What requests may ask of a model that makes vectors or scores.

    Attributes:
        size: elements of a vector, or labels of a pair.
        normalize: whether vectors have length 1 unless asked otherwise.
        dimensions: the numbers of elements that may be asked for, or "any" up to `size`.
        prompts: what may be put before texts, by name.
        default_prompt: name of the one that is unless another is named.
    """

    size: int
    normalize: bool
    dimensions: list[int] | Literal["any"]
    prompts: dict[str, str]
    default_prompt: str | None


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One served model.

    Attributes:
        capabilities: "completions", "chat", "responses", "prompt_embeds", "embeddings", "score",
            "rerank", "classify".
        embedding_table_id: identity of the input embedding table, as clients stamp it into what
            they send.
        embedding_abs_max: largest absolute value in that table.
        refusals: what its engine does not do, and why.
        resuming: how an answer goes on whose worker was lost, by feature: "exact", "rounded",
            "sampled" or "impossible"; the last two end with an error.
        embedding: of a model that makes vectors or scores.
        adapters: names of the adapters that may be asked for.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "inlay"
    root: str
    parent: str | None = None
    max_model_len: int
    hidden_size: int
    vocab_size: int
    dtype: str
    embedding_table_id: str
    embedding_abs_max: float
    weights_id: str
    engine: str
    capabilities: list[str]
    limits: ModelLimits
    refusals: tuple[Refusal, ...] = ()
    resuming: dict[str, Exactness] = {}
    embedding: EmbeddingFacts | msgspec.UnsetType = msgspec.UNSET
    adapters: list[str] = []


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]
