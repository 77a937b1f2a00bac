"""Every field of vLLM's request types is one of inlay's: served, or refused with a reason.

So none is forgotten when vLLM is updated.
"""

from importlib import import_module
from typing import Any

import msgspec
import pytest

from inlay.api.admin.schema import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from inlay.api.openai.schema.completions import CompletionRequest
from inlay.api.openai.schema.embeddings import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.api.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest
from inlay.api.schema.chat import ChatRequest
from inlay.api.schema.unserved import UNSERVED, unserved

PAIRS: list[tuple[str, type[msgspec.Struct]]] = [
    ("openai.completion.protocol.CompletionRequest", CompletionRequest),
    ("openai.chat_completion.protocol.ChatCompletionRequest", ChatRequest),
    ("openai.responses.protocol.ResponsesRequest", ResponsesRequest),
    ("pooling.embed.protocol.EmbeddingCompletionRequest", EmbeddingRequest),
    ("pooling.embed.protocol.EmbeddingChatRequest", EmbeddingRequest),
    ("pooling.embed.protocol.EmbeddingBatchChatRequest", EmbeddingRequest),
    ("pooling.embed.protocol.EmbeddingChatInputRequest", EmbeddingRequest),
    ("pooling.pooling.protocol.PoolingCompletionRequest", PoolingRequest),
    ("pooling.pooling.protocol.PoolingChatRequest", PoolingRequest),
    ("pooling.pooling.protocol.IOProcessorRequest", PoolingRequest),
    ("pooling.classify.protocol.ClassificationCompletionRequest", ClassificationRequest),
    ("pooling.classify.protocol.ClassificationChatRequest", ClassificationRequest),
    ("pooling.scoring.protocol.ScoreDataRequest", ScoreRequest),
    ("pooling.scoring.protocol.ScoreQueriesDocumentsRequest", ScoreRequest),
    ("pooling.scoring.protocol.ScoreQueriesItemsRequest", ScoreRequest),
    ("pooling.scoring.protocol.ScoreTextRequest", ScoreRequest),
    ("pooling.scoring.protocol.RerankRequest", RerankRequest),
    ("serve.tokenize.protocol.TokenizeCompletionRequest", TokenizeRequest),
    ("serve.tokenize.protocol.TokenizeChatRequest", TokenizeRequest),
    ("serve.tokenize.protocol.DetokenizeRequest", DetokenizeRequest),
    ("serve.lora.protocol.LoadLoRAAdapterRequest", LoadLoraAdapterRequest),
    ("serve.lora.protocol.UnloadLoRAAdapterRequest", UnloadLoraAdapterRequest),
]
"""vLLM's types, below `vllm.entrypoints`, and what parses the same bodies here."""


def fields_of(theirs: str) -> dict[str, Any]:
    """The fields of one of vLLM's types."""
    module, _, name = theirs.rpartition(".")
    fields: dict[str, Any] = getattr(import_module(f"vllm.entrypoints.{module}"), name).model_fields
    return fields


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_no_field_of_a_request_of_vllms_is_ignored(theirs: str, ours: type[msgspec.Struct]) -> None:
    assert sorted(set(fields_of(theirs)) - set(ours.__struct_fields__)) == []


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_vllms_default_of_a_refused_field_asks_for_nothing(
    theirs: str, ours: type[msgspec.Struct]
) -> None:
    fields = fields_of(theirs)
    for name in set(unserved(ours)) & set(fields):
        assert fields[name].is_required() or UNSERVED[name].allows(fields[name].get_default()), name
