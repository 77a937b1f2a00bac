"""Fields that the responses of completions and chat completions share."""

from typing import Annotated, Literal

import msgspec

from inlay.api.schema.described import (
    CachedTokens,
    OutputTokens,
    PromptTokens,
    ReasoningTokens,
    TotalTokens,
)
from inlay.messages.fields import field


class WholeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every whole response in vLLM 0.32; null where there is no value.

    Attributes:
        service_tier: "flex" where the request said so and gave way to all others.
    """

    service_tier: Literal["flex"] | None = None
    system_fingerprint: Annotated[
        str | None,
        field(
            "equal where release, engine, weights and dtype of the model are equal.",
            "inlay-0.2.0-1f2e3d4c",
        ),
    ] = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Counts of the prompt's positions."""

    cached_tokens: CachedTokens
    created_cache_tokens: msgspec.UnsetType | None = None
    multimodal_tokens: msgspec.UnsetType | None = None


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Counts of the output's tokens."""

    reasoning_tokens: ReasoningTokens


class StageTokens(msgspec.Struct, frozen=True):
    """Positions that one stage of a pipeline read, and what it made: tokens, codes or samples."""

    prompt_tokens: Annotated[int, field("positions that the stage read.", 17)]
    completion_tokens: Annotated[int, field("what it made: tokens, codes or samples.", 8)]


class UsageInfo(msgspec.Struct, frozen=True):
    """Prompt and output positions; embedding vectors count as tokens.

    In a stream, details that would be null are left out.
    """

    prompt_tokens: PromptTokens
    completion_tokens: OutputTokens
    total_tokens: TotalTokens
    prompt_tokens_details: Annotated[
        PromptTokensDetails | msgspec.UnsetType | None, field("more about the prompt.")
    ] = None
    completion_tokens_details: Annotated[
        CompletionTokensDetails | msgspec.UnsetType | None,
        field("more about the answer; null where reasoning is not counted."),
    ] = None
    stages: Annotated[
        dict[str, StageTokens] | msgspec.UnsetType,
        field("share of each stage of a pipeline, by its name."),
    ] = msgspec.UNSET
