"""Fields of answers are those of vLLM's classes, so that none is missed in an update."""

from typing import Any

import msgspec
import pytest

from inlay.api.openai.schema import chat, completions, generation
from inlay.api.schema.chat import ChatRequest

OF_OTHERS = {
    "reasoning_content", "modality", "stage", "stages", "audio", "hidden_states", "weight_versions",
}  # fmt: skip
"""Fields that vLLM's classes have not.

The older name of a field, which clients written for older releases read; vLLM-Omni's marks of a
pipeline's chunks, and the share of each stage; OpenAI's streamed sound; states of layers, which
SGLang has in another form; versions of weights, which vLLM sends from its route of token ids.
"""


def names(kind: type[Any]) -> set[str]:
    return set(kind.model_fields)


def own(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def pairs() -> list[tuple[type[msgspec.Struct], type[Any], set[str]]]:
    """Ours, vLLM's, and what of vLLM's only servers with features that inlay has not send."""
    from vllm.entrypoints.generate.base import protocol as base
    from vllm.entrypoints.openai.chat_completion import protocol as vllm_chat
    from vllm.entrypoints.openai.completion import protocol as vllm_completion
    from vllm.entrypoints.serve.engine import protocol as engine

    return [
        (completions.Completion, vllm_completion.CompletionResponse, set()),
        (completions.CompletionChoice, vllm_completion.CompletionResponseChoice, set()),
        (completions.CompletionLogprobs, vllm_completion.CompletionLogProbs, set()),
        (completions.CompletionChunk, vllm_completion.CompletionStreamResponse, set()),
        (completions.CompletionChunkChoice, vllm_completion.CompletionResponseStreamChoice, set()),
        (chat.ChatCompletion, vllm_chat.ChatCompletionResponse, set()),
        (chat.ChatChoice, vllm_chat.ChatCompletionResponseChoice, set()),
        (chat.ChatMessage, vllm_chat.ChatMessage, set()),
        (chat.TokenLogprob, vllm_chat.ChatCompletionLogProbsContent, set()),
        (chat.TopLogprob, vllm_chat.ChatCompletionLogProb, set()),
        (chat.ChatChunk, vllm_chat.ChatCompletionStreamResponse, set()),
        (chat.ChatChunkChoice, vllm_chat.ChatCompletionResponseStreamChoice, set()),
        (chat.ChatDelta, base.DeltaMessage, set()),
        (generation.UsageInfo, engine.UsageInfo, set()),
        (generation.PromptTokensDetails, engine.PromptTokenUsageInfo, set()),
        (generation.CompletionTokensDetails, engine.CompletionTokenUsageInfo, set()),
    ]


@pytest.mark.engines
def test_every_field_of_vllms_answers_is_in_ours() -> None:
    for ours, theirs, never_sent in pairs():
        assert names(theirs) - own(ours) == never_sent, (ours, theirs)
        assert own(ours) - names(theirs) <= OF_OTHERS, (ours, theirs)


@pytest.mark.engines
def test_the_default_of_max_tokens_is_vllms() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for ours, theirs in (
        (completions.CompletionRequest, CompletionRequest),
        (ChatRequest, ChatCompletionRequest),
    ):
        assert theirs.model_fields["max_tokens"].default == ours.DEFAULT_MAX_TOKENS
