"""Types of `/v1/score` and `/v1/rerank`."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.cohere import ApiVersion
from inlay.api.openai.schema.completions import EmbedsSource
from inlay.api.openai.schema.embeddings import TextsAnswer, TextsRequest, TextsUsage
from inlay.api.schema.described import ROWS, ListIndex, ModelName, PromptTokens, TotalTokens
from inlay.api.schema.unserved import Unserved
from inlay.messages.fields import example, field


class ScoringRequest(TextsRequest, kw_only=True):
    """Fields of `/v1/score` and `/v1/rerank`.

    Their items are texts, or objects (`Document`).

    Attributes:
        max_tokens_per_query: first tokens of a query that are kept, special tokens not counted,
            fewer than the model's limit; 0 or absent for all.
        max_tokens_per_doc: the same of a document; at /v2/rerank it may be any number.
        use_activation: apply a cross-encoder's activation to its logit; true when absent. Scores of
            embedding models are cosines either way.
        query_prompt_name: name of the embedding model's prompt before each text of the first side;
            when absent "query", or else its default prompt.
        document_prompt_name: the same of the second side; when absent the first of "document",
            "passage" and "corpus", or else the default prompt.
        output: of an embedding model, the output that is compared: "dense" by cosine, "sparse" by
            dot product, "tokens" by MaxSim; the model's first when absent.
        instruction: of a decoder that scores by a template, what its queries look for; the
            template's own when absent.
    """

    max_tokens_per_query: Annotated[int | None, example(64)] = None
    max_tokens_per_doc: Annotated[int | None, example(512)] = None
    query_prompt_name: Annotated[str | None, example("query")] = None
    document_prompt_name: Annotated[str | None, example("passage")] = None
    output: Literal["dense", "sparse", "tokens"] | None = None

    instruction: Annotated[str | None, example("Find passages that answer.")] = None

    chat_template_kwargs: Unserved = None


class Document(msgspec.Struct, frozen=True):
    """One item of a rerank or a score. Models that read pairs of texts take texts alone.

    Exactly one is set.

    Attributes:
        text: the text.
        ref: id of a stored document, `pv-...`, of the same API key, model and role.
        prompt_embeds: embeddings, for decoders, as in `/v1/embeddings`.
        content: parts of a message, as in chat completions: texts, images, embeddings.
    """

    text: Annotated[str | None, example("a red fox")] = None
    ref: Annotated[str | None, example("pv-...")] = None
    prompt_embeds: Annotated[str | EmbedsSource | None, example(ROWS)] = None
    content: Annotated[
        str | list[dict[str, Any]] | None, example([{"type": "text", "text": "a red fox"}])
    ] = None


Items: TypeAlias = str | Document | list[str | Document]


class ScoreRequest(ScoringRequest, kw_only=True):
    """A request to `/v1/score`: one text against many, or texts pair by pair.

    Each side has several names, as in vLLM.

    Attributes:
        text_1: the first side: one item, or as many as the second side has. Exactly one of
            `text_1`, `queries`, `data_1`.
        text_2: the second side: an item, or items. Exactly one of `text_2`, `documents`, `items`,
            `data_2`.
        queries: the first side under another name.
        data_1: the first side under another name.
        documents: the second side under another name.
        items: the second side under another name.
        data_2: the second side under another name.
    """

    text_1: Annotated[Items | None, example("a fox")] = None
    queries: Annotated[Items | None, example("a fox")] = None
    data_1: Annotated[Items | None, example("a fox")] = None
    text_2: Annotated[Items | None, example(["a stone", "an animal"])] = None
    documents: Annotated[Items | None, example(["a stone", "an animal"])] = None
    items: Annotated[Items | None, example(["a stone", "an animal"])] = None
    data_2: Annotated[Items | None, example(["a stone", "an animal"])] = None


class ScoreData(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: ListIndex
    object: Literal["score"] = "score"
    score: Annotated[float, field("score of the pair.", 0.93)]


class ScoreResponse(TextsAnswer, frozen=True, kw_only=True):
    """The response of `/v1/score`."""

    id: Annotated[str, field("id of this answer.", "score-5d0f")]
    data: Annotated[list[ScoreData], field("the entries.")]
    usage: Annotated[TextsUsage, field("Positions and tokens of this answer.")]


class RankedDocument(msgspec.Struct, frozen=True):
    """A document that was ranked; vLLM shows media under `multi_modal`."""

    text: Annotated[str | None, field("the document; null if it is no text.", "an animal")]
    multi_modal: None = None
    ref: Annotated[str | msgspec.UnsetType, field("id of the stored document.", "pv-...")] = (
        msgspec.UNSET
    )


class RankingRequest(ScoringRequest, kw_only=True):
    """Fields of a rerank beside its documents.

    Attributes:
        query: what the documents are ranked against: a text, or an object.
        top_n: maximum number of results; 0 or absent for all.
        return_documents: include each result's document (true when absent).
        top_k: Voyage's name of `top_n`.
        truncation: Voyage's name of `auto_truncate`. With one of its names, also null, results are
            in `data`.
    """

    query: Annotated[str | Document, example("a fox")]
    top_n: Annotated[int | None, example(1)] = None
    return_documents: bool | None = None
    top_k: Annotated[int | msgspec.UnsetType | None, example(1)] = msgspec.UNSET
    truncation: bool | msgspec.UnsetType | None = msgspec.UNSET


class RerankRequest(RankingRequest, kw_only=True):
    """A request to `/v1/rerank`, as Jina, Cohere and vLLM take it.

    Attributes:
        documents: texts or objects, mixed; or one of them.
    """

    documents: Annotated[Items, example(["a stone", "an animal"])]


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """Relevance score of one document; `index` is its place in the request."""

    index: Annotated[int, field("place of the document in the request, from 0.", 0)]
    document: Annotated[RankedDocument | msgspec.UnsetType, field("the document.")] = msgspec.UNSET
    relevance_score: Annotated[float, field("score of the document.", 0.93)]


class RerankUsage(msgspec.Struct, frozen=True):
    """Positions of all pairs."""

    prompt_tokens: PromptTokens
    total_tokens: TotalTokens


class SearchUnits(msgspec.Struct, frozen=True):
    """Search units, by which Cohere bills reranks."""

    search_units: Annotated[int, field("hundreds of documents, rounded up.", 1)]


class RerankMeta(msgspec.Struct, frozen=True):
    """Metadata of `/v2/rerank`."""

    billed_units: Annotated[SearchUnits, field("what was ranked.")]
    api_version: Annotated[ApiVersion, field("version of this form.")] = ApiVersion()


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/v1/rerank`, the best result first: in `results`, or Voyage's `data`."""

    id: Annotated[str, field("id of this answer.", "score-5d0f")]
    model: ModelName
    usage: Annotated[RerankUsage, field("Positions and tokens of this answer.")]
    results: Annotated[
        list[RerankResult] | msgspec.UnsetType, field("documents, the best first.")
    ] = msgspec.UNSET
    data: Annotated[
        list[RerankResult] | msgspec.UnsetType,
        field("the same, where the request has Voyage's names."),
    ] = msgspec.UNSET
    meta: Annotated[RerankMeta | msgspec.UnsetType, field("of /v2/rerank.")] = msgspec.UNSET
