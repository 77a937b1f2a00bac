"""Fields that the responses of completions and chat completions share."""

from typing import Literal

import msgspec


class WholeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every whole response in vLLM 0.32; null where there is no value.

    Attributes:
        service_tier: "flex" where the request said so and gave way to all others.
    """

    service_tier: Literal["flex"] | None = None
    system_fingerprint: str | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Counts of the prompt's positions."""

    cached_tokens: int
    created_cache_tokens: msgspec.UnsetType | None = None
    multimodal_tokens: msgspec.UnsetType | None = None


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Counts of the output's tokens."""

    reasoning_tokens: int


class StageTokens(msgspec.Struct, frozen=True):
    """Positions that one stage of a pipeline read, and what it made: tokens, codes or samples."""

    prompt_tokens: int
    completion_tokens: int


class UsageInfo(msgspec.Struct, frozen=True):
    """Prompt and output positions; embedding vectors count as tokens.

    In a stream, details that would be null are left out.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType | None = None
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType | None = None
    stages: dict[str, StageTokens] | msgspec.UnsetType = msgspec.UNSET
