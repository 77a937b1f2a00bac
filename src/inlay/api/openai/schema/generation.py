"""Fields that the responses of completions and chat completions share."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from inlay.api.schema.described import (
    CachedTokens,
    OutputTokens,
    PromptTokens,
    ReasoningTokens,
    TotalTokens,
)
from inlay.messages.fields import field


class RequestMetrics(msgspec.Struct, frozen=True):
    """Times of an answer, as vLLM counts them; null where the engine does not say when it began."""

    time_to_first_token_ms: Annotated[
        float | None, field("from its first step to its first token.", 21.5)
    ]
    generation_time_ms: Annotated[float | None, field("from its first token to its last.", 310.0)]
    queue_time_ms: Annotated[float | None, field("at its worker, before its first step.", 0.8)]
    mean_itl_ms: Annotated[float | None, field("between two tokens.", 10.0)]
    tokens_per_second: Annotated[
        float | None, field("tokens in the time from its first step to its last token.", 96.5)
    ]


ChunkMetrics: TypeAlias = Annotated[
    RequestMetrics | msgspec.UnsetType,
    field("times of an answer of one choice, beside the usage at its end."),
]


class WeightVersion(msgspec.Struct, frozen=True):
    """Tokens `start` to `end` of an answer, and the weights that made them."""

    version: Annotated[str, field("identity of configuration and weights.", "9f86d081884c7d65")]
    start: Annotated[int, field("always 0: an answer is of one set of weights.", 0)]
    end: Annotated[int, field("number of its tokens.", 32)]


WeightVersions: TypeAlias = Annotated[
    list[WeightVersion] | msgspec.UnsetType,
    field("weights that made the answer, where `return_weight_versions` asks for them."),
]


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
    metrics: Annotated[
        RequestMetrics | None,
        field("times of an answer of one choice; null without --enable-per-request-metrics."),
    ] = None


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
