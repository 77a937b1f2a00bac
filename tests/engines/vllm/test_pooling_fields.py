"""The fields of answers about vectors are those of vLLM's types.

None is missed when vLLM is updated.
"""

import msgspec

from inlay.api.openai.schema import embeddings as ours
from inlay.api.openai.schema import scoring as scores

READ = {"input_tokens", "truncated"}
STORED = {"expires_at", "num_vectors", "ref"}
IN_PARTS = {"approximate", "late_chunking", "pieces", "token_range"}
OWN = {
    ours.EmbeddingData: READ | STORED | IN_PARTS | {"scale", "sparse", "token_labels", "tokens"},
    ours.PoolingData: READ | {"scale", "shape"},
    scores.RankedDocument: {"ref"},
    scores.RerankResponse: {"data", "meta"},
}
"""What answers have beyond vLLM's.

Named outputs, how much was read, what is stored, parts of a text, names of Voyage and Cohere.
"""


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
        (scores.ScoreResponse, scoring.ScoreResponse),
        (scores.ScoreData, scoring.ScoreResponseData),
        (scores.RerankResponse, scoring.RerankResponse),
        (scores.RerankResult, scoring.RerankResult),
        (scores.RankedDocument, scoring.RerankDocument),
        (scores.RerankUsage, scoring.RerankUsage),
        (ours.TextsUsage, engine.UsageInfo),
    ):
        fields = {field.encode_name for field in msgspec.structs.fields(mine)}
        assert fields - OWN.get(mine, set()) == set(theirs.model_fields), mine
