"""Clients of other servers of vectors, unchanged: their answers are those of our own routes."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.serving import Served, serving

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

TEXTS = ["the harbour counts its lanterns", "cold wind", "ships sail south"]
QUERY = "how many ships sail south"
LONG = "cold wind " * 400
KEY = "k"


@pytest.fixture(scope="module")
def server(models: dict[str, str]) -> Iterator[Served]:
    with serving(models["embed"], "--task", "embed", "--served-model-name", "m") as served:
        yield served


@pytest.fixture(scope="module")
def pairs(models: dict[str, str]) -> Iterator[Served]:
    with serving(models["score"], "--task", "score", "--served-model-name", "m") as served:
        yield served


def post(served: Served, path: str, **body: Any) -> Any:
    response = httpx.post(served.url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def vectors(served: Served, role: str | None, texts: list[str] = TEXTS, **body: Any) -> Any:
    data = post(served, "/v1/embeddings", input=texts, role=role, auto_truncate=True, **body)[
        "data"
    ]
    return np.array([item["embedding"] for item in data], np.float32)


def order(served: Served) -> list[tuple[int, Any]]:
    found = post(served, "/v1/rerank", query=QUERY, documents=TEXTS)["results"]
    return [(one["index"], pytest.approx(one["relevance_score"], abs=1e-6)) for one in found]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found, np.float32), expected, atol=1e-6)


def test_cohere_embeds_in_all_types_and_cuts_as_it_says(server: Served) -> None:
    import cohere

    client = cohere.ClientV2(api_key=KEY, base_url=server.url)
    types: Any = ["float", "int8", "binary", "ubinary", "base64"]
    for kind, role in (("search_query", "query"), ("search_document", "document")):
        found = client.embed(model="m", texts=TEXTS, input_type=kind, embedding_types=types)
        close(found.embeddings.float_, vectors(server, role))
        for name in ("int8", "binary", "ubinary"):
            close(getattr(found.embeddings, name), vectors(server, role, embed_dtype=name))
        raw = [np.frombuffer(base64.b64decode(one), np.float32) for one in found.embeddings.base64]
        close(raw, vectors(server, role))
        assert found.meta.billed_units.input_tokens > 0
    with pytest.raises(cohere.BadRequestError, match="maximum context length"):
        client.embed(model="m", texts=[LONG], input_type="search_query", truncate="NONE")
    first = cohere.Client(api_key=KEY, base_url=server.url)
    plain = first.embed(texts=TEXTS * 40, model="m", input_type="search_document")
    close(plain.embeddings, np.tile(vectors(server, "document"), (40, 1)))


def test_cohere_ranks(server: Served, pairs: Served) -> None:
    import cohere

    for served in (server, pairs):
        client = cohere.ClientV2(api_key=KEY, base_url=served.url)
        found = client.rerank(model="m", query=QUERY, documents=TEXTS)
        assert [(one.index, one.relevance_score) for one in found.results] == order(served)
        assert found.meta.billed_units.search_units == 1
        assert found.meta.api_version.version == "2"
        best = client.rerank(model="m", query=QUERY, documents=TEXTS, top_n=1)
        assert [one.index for one in best.results] == [order(served)[0][0]]


def test_voyage_embeds_and_ranks(server: Served) -> None:
    import voyageai

    client = voyageai.Client(api_key=KEY, base_url=server.v1, max_retries=0)
    for role in ("query", "document", None):
        found = client.embed(TEXTS, model="m", input_type=role)
        close(found.embeddings, vectors(server, role))
        assert found.total_tokens > 0
    for kind in ("int8", "ubinary", "binary"):
        found = client.embed(TEXTS, model="m", input_type="document", output_dtype=kind)
        close(found.embeddings, vectors(server, "document", embed_dtype=kind))
    close(client.embed([LONG], model="m").embeddings, vectors(server, None, [LONG]))
    with pytest.raises(voyageai.error.APIError, match="maximum context length"):
        client.embed([LONG], model="m", truncation=False)
    ranked = client.rerank(QUERY, TEXTS, model="m")
    assert [(one.index, one.relevance_score) for one in ranked.results] == order(server)
    assert [one.document for one in ranked.results] == [TEXTS[n] for n, _ in order(server)]
    assert ranked.total_tokens > 0
    assert len(client.rerank(QUERY, TEXTS, model="m", top_k=2).results) == 2


def test_hugging_faces_client_asks_the_server_as_its_own(server: Served, pairs: Served) -> None:
    from huggingface_hub import AsyncInferenceClient, InferenceClient

    client = InferenceClient(model=server.url)
    close(client.feature_extraction(TEXTS[0])[0], vectors(server, None)[0])
    close(client.feature_extraction(TEXTS, prompt_name="query"), vectors(server, "query"))
    close(client.feature_extraction(LONG, truncate=True)[0], vectors(server, None, [LONG])[0])
    there = asyncio.run(AsyncInferenceClient(model=server.url).feature_extraction(TEXTS))
    close(there, vectors(server, None))
    similar = InferenceClient(model=server.url + "/similarity").sentence_similarity(QUERY, TEXTS)
    expected = post(server, "/v1/score", text_1=QUERY, text_2=TEXTS)["data"]
    close(similar, [one["score"] for one in expected])
    label: Any = InferenceClient(model=pairs.url).text_classification(TEXTS[0])
    assert 0 < label.score < 1


def test_langchain_embeds_and_ranks(server: Served) -> None:
    from langchain_cohere import CohereEmbeddings, CohereRerank
    from langchain_core.documents import Document
    from langchain_openai import OpenAIEmbeddings
    from langchain_voyageai import VoyageAIRerank

    of_openai = OpenAIEmbeddings(
        model="m", base_url=server.v1, api_key=KEY, check_embedding_ctx_length=False
    )
    close(of_openai.embed_documents(TEXTS), vectors(server, None))
    of_cohere = CohereEmbeddings(model="m", cohere_api_key=KEY, base_url=server.url)
    close(of_cohere.embed_documents(TEXTS), vectors(server, "document"))
    close(of_cohere.embed_query(TEXTS[0]), vectors(server, "query")[0])
    documents = [Document(text) for text in TEXTS]
    wanted = [n for n, _ in order(server)]
    ranks: list[Any] = [
        CohereRerank(model="m", cohere_api_key=KEY, base_url=server.url, top_n=3),
        VoyageAIRerank(model="m", api_key=KEY, base_url=server.v1, top_k=3),
    ]
    for rank in ranks:
        found = rank.compress_documents(documents, QUERY)
        assert [TEXTS.index(one.page_content) for one in found] == wanted


def test_llamaindex_embeds_and_ranks(server: Served) -> None:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    embed = TextEmbeddingsInference(
        model_name="m", base_url=server.url, query_instruction="", text_instruction=""
    )
    # What it puts before texts is a space.
    spaced = vectors(server, None, [text.strip() for text in TEXTS])
    close(embed.get_text_embedding_batch([*TEXTS]), spaced)
    close(embed.get_query_embedding(TEXTS[0]), spaced[0])
    rank = TextEmbeddingInference(base_url=server.url, model_name="m", top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    found = rank.postprocess_nodes(nodes, query_str=QUERY)
    scores = [(TEXTS.index(one.node.get_content()), one.score) for one in found]
    assert scores == order(server)[:2]


def test_haystack_embeds_and_ranks(server: Served) -> None:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.cohere import (
        CohereDocumentEmbedder,
        CohereTextEmbedder,
    )
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPIDocumentEmbedder,
        HuggingFaceAPITextEmbedder,
    )
    from haystack_integrations.components.rankers.cohere import CohereRanker
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    key = Secret.from_token(KEY)
    documents = [Document(content=text) for text in TEXTS]
    tei: dict[str, Any] = {
        "api_type": "text_embeddings_inference", "api_params": {"url": server.url}, "token": key,
    }  # fmt: skip
    one = HuggingFaceAPITextEmbedder(**tei)
    one.warm_up()
    close(one.run(TEXTS[0])["embedding"], vectors(server, None, normalize=False)[0])
    many = HuggingFaceAPIDocumentEmbedder(**tei, progress_bar=False)
    many.warm_up()
    found = many.run(documents)["documents"]
    close([document.embedding for document in found], vectors(server, None, normalize=False))
    cohere: dict[str, Any] = {"model": "m", "api_key": key, "api_base_url": server.url}
    query = CohereTextEmbedder(**cohere, input_type="search_query")
    close(query.run(TEXTS[0])["embedding"], vectors(server, "query")[0])
    kept = CohereDocumentEmbedder(**cohere, progress_bar=False).run(documents)["documents"]
    close([document.embedding for document in kept], vectors(server, "document"))
    rankers: list[Any] = [
        CohereRanker(**cohere, top_k=3),
        HuggingFaceTEIRanker(url=server.url, top_k=3, token=key),
    ]
    for ranker in rankers:
        ranked = ranker.run(query=QUERY, documents=documents)["documents"]
        assert [(TEXTS.index(one.content), one.score) for one in ranked] == order(server)
