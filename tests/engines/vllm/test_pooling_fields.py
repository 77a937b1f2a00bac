"""The fields of answers about vectors are those of vLLM's types.

None is missed when vLLM is updated.
"""

import msgspec

from inlay.api.openai.schema import embeddings as ours

READ = {"input_tokens", "truncated"}
OWN = {
    ours.EmbeddingData: READ | {"scale", "sparse", "token_labels", "tokens"},
    ours.PoolingData: READ | {"scale", "shape"},
}
"""What an item has beyond vLLM's: named outputs and their layout, and how much was read."""


def test_no_field_of_vllms_answers_is_left_out() -> None:
    from vllm.entrypoints.pooling.classify import protocol as classify
    from vllm.entrypoints.pooling.embed import protocol as embed
    from vllm.entrypoints.pooling.pooling import protocol as pooling
    from vllm.entrypoints.pooling.scoring import protocol as scoring
    from vllm.entrypoints.serve.engine import protocol as engine

    for mine, theirs in (
        (ours.EmbeddingResponse, embed.EmbeddingResponse),
        (ours.EmbeddingData, embed.EmbeddingResponseData),
        (ours.PoolingResponse, pooling.PoolingResponse),
        (ours.PoolingData, pooling.PoolingResponseData),
        (ours.ClassificationResponse, classify.ClassificationResponse),
        (ours.ClassificationData, classify.ClassificationData),
        (ours.ScoreResponse, scoring.ScoreResponse),
        (ours.ScoreData, scoring.ScoreResponseData),
        (ours.RerankResponse, scoring.RerankResponse),
        (ours.RerankResult, scoring.RerankResult),
        (ours.RankedDocument, scoring.RerankDocument),
        (ours.RerankUsage, scoring.RerankUsage),
        (ours.TextsUsage, engine.UsageInfo),
    ):
        fields = {field.encode_name for field in msgspec.structs.fields(mine)}
        assert fields - OWN.get(mine, set()) == set(theirs.model_fields), mine
