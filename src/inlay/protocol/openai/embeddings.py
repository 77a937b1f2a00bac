"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`."""

from typing import Literal, TypeAlias

import msgspec

from inlay.protocol.openai.completions import EmbedsSource
from inlay.protocol.openai.unserved import Unserved


class TextsRequest(msgspec.Struct, kw_only=True):
    """What all requests that hand in texts understand. Names beyond OpenAI's are vLLM's.

    Attributes:
        model: served name; the only model served when absent.
        truncate_prompt_tokens: positions of an input that are kept, special tokens included; -1 is as many as the model takes.
        truncation_side: "right" keeps the first positions, as when absent; "left" the last.
        add_special_tokens: put the tokenizer's own tokens around a text, as when absent.
        cache_salt: results are shared only under equal salts.
        priority: lower is sooner.
        request_id: the answer's `id`, behind its prefix.
    """

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    use_activation: bool | None = None

    embed_dtype: Unserved = None
    endianness: Unserved = None
    input_type: Unserved = None
    messages: Unserved = None
    mm_processor_kwargs: Unserved = None
    padding: Unserved = None


EmbeddingInput: TypeAlias = str | list[int | str | list[int]]


class EmbeddingRequest(TextsRequest, kw_only=True):
    """A request to `/v1/embeddings`.

    Attributes:
        input: a text, token ids, or a list of either; each text or list in a list is an input of its own.
        prompt_embeds: inputs as embeddings, of decoders: base64 of a tensor file, a source, or a list of these; in the place of `input`.
        dimensions: first elements of a vector that are kept; it gets length 1 again.
        encoding_format: "float", or "base64" of little-endian float32.
        normalize: give vectors length 1; as the model says when absent. vLLM's `use_activation` is the same.
        prompt_name: name of a prompt of the model's configuration, which is put before every text.
    """

    input: EmbeddingInput | None = None
    prompt_embeds: str | EmbedsSource | list[str | EmbedsSource] | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class TextsUsage(msgspec.Struct, frozen=True):
    """Positions of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingData(msgspec.Struct, frozen=True, kw_only=True):
    """One vector: numbers, or base64 of them."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[EmbeddingData]
    model: str
    usage: TextsUsage


class ScoreRequest(TextsRequest, kw_only=True):
    """A request to `/v1/score`: one text against many, or as many against as many. The two sides have several names, as vLLM's have.

    Attributes:
        text_1: the first side; also `queries`, `data_1`.
        text_2: the second side; also `documents`, `items`, `data_2`.
        use_activation: whether the model's activation makes scores of logits, as when absent.
    """

    text_1: str | list[str] | None = None
    queries: str | list[str] | None = None
    data_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_2: str | list[str] | None = None

    chat_template_kwargs: Unserved = None
    instruction: Unserved = None
    max_tokens_per_doc: Unserved = None
    max_tokens_per_query: Unserved = None


class ScoreData(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/v1/score`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: TextsUsage


class Document(msgspec.Struct, frozen=True):
    """A document to be ranked."""

    text: str


class RerankRequest(TextsRequest, kw_only=True):
    """A request to `/v1/rerank`, as Jina, Cohere and vLLM take it.

    Attributes:
        query: what the documents are ranked by.
        documents: texts, or objects with `text`.
        top_n: results at most; 0 or absent for all.
        return_documents: show each result's document, as when absent.
    """

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None

    chat_template_kwargs: Unserved = None
    instruction: Unserved = None
    max_tokens_per_doc: Unserved = None
    max_tokens_per_query: Unserved = None


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """One document and how it does; `index` is its place in the request."""

    index: int
    document: Document | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/v1/rerank`, the best result first."""

    id: str
    model: str
    usage: TextsUsage
    results: list[RerankResult]
