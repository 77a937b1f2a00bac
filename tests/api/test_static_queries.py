"""Queries of a sparse model whose files have a weight for each id: no worker is asked."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from inlay.api.generation.truncation import Truncation
from inlay.api.openai.embeddings.inputs import TextInputs
from inlay.base.errors import EngineError, InvalidRequestError
from inlay.embedding.config import EmbeddingConfig
from inlay.engine.embed.encoder import Encoder
from inlay.engine.settings import EngineSettings
from inlay.messages.pooling import RoleCard
from inlay.render import Renderer
from inlay.render.tokenizer import load_tokenizer
from inlay.store import StoreSettings
from tests import output_models as models
from tests.live import SECRET, Fleet, fleet

TEXTS = ["the harbour counts the lanterns", "cold wind", "ships [SEP] sail"]


@pytest.fixture(scope="module", params=[False, True])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Fleet, str]]:
    with fleet(models.routed(idf=request.param), task="embed", dtype="float32") as found:
        yield found, found.serve(store=StoreSettings().open(SECRET))


def post(url: str, path: str = "/v1/embeddings", **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=180)


def items(url: str, **body: Any) -> list[dict[str, Any]]:
    response = post(url, **body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["data"]
    return found


def by_hand(text: str, most: int | None = None) -> dict[int, float]:
    """Weights of the ids of a text, without special tokens around it."""
    directory = models.routed() / "query_0_Static"
    weights = load_file(directory / "model.safetensors")["weight"]
    tokenizer = load_tokenizer(directory).tokenizer
    ids = {*tokenizer.encode(text, add_special_tokens=False).ids}
    found = {id_: float(weights[id_]) for id_ in ids if weights[id_]}
    return dict(sorted(found.items(), key=lambda item: -item[1])[:most])


def shown(item: dict[str, Any]) -> dict[int, float]:
    sparse = item["sparse"]
    assert sparse["indices"] == sorted(sparse["indices"])
    return dict(zip(sparse["indices"], sparse["values"], strict=True))


def test_a_query_has_the_weights_of_its_ids_and_asks_no_worker(
    running: tuple[Fleet, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, url = running
    post(url, input=["cold"]).raise_for_status()
    monkeypatch.setattr(own.router, "send", None)
    for item, text in zip(items(url, input=TEXTS, role="query"), TEXTS, strict=True):
        assert shown(item) == pytest.approx(by_hand(text))
        tokens = load_tokenizer(models.routed() / "query_0_Static").tokenizer
        assert item["input_tokens"] == len(tokens.encode(text, add_special_tokens=False).ids)
        assert not item["truncated"]
    (few,) = items(url, input=TEXTS[0], role="query", max_active=2)
    assert shown(few) == pytest.approx(by_hand(TEXTS[0], 2))
    (long,) = items(url, input="cold wind " * 400, role="query")
    assert long["truncated"]
    assert shown(long) == pytest.approx(by_hand("cold wind"))
    assert post(url, input=["ships"]).status_code == 500


def test_documents_ask_the_model_and_are_scored_with_queries(running: tuple[Fleet, str]) -> None:
    _, url = running
    documents = [shown(item) for item in items(url, input=TEXTS, role="document")]
    assert [shown(item) for item in items(url, input=TEXTS)] == documents
    query = by_hand(TEXTS[0])
    wanted = [
        sum(weight * other.get(id_, 0) for id_, weight in query.items()) for other in documents
    ]
    refs = [{"ref": item["ref"]} for item in items(url, input=TEXTS, store=True)]
    asked = items(url, input=TEXTS[0], role="query", store=True)[0]["ref"]
    for one, many in ((TEXTS[0], TEXTS), (TEXTS[0], refs), ({"ref": asked}, TEXTS)):
        answer = post(url, "/v1/score", text_1=one, text_2=many).json()
        scores = [item["score"] for item in answer["data"]]
        np.testing.assert_allclose(scores, wanted, rtol=1e-5)


def test_a_query_that_is_no_text_is_refused_by_name(running: tuple[Fleet, str]) -> None:
    _, url = running
    form = {"content": [{"type": "text", "text": "cold"}]}
    answer = post(url, "/v1/rerank", query=form, documents=TEXTS)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "query"
    assert "reads texts alone in the role query" in answer.json()["error"]["message"]


def test_token_ids_have_no_role(running: tuple[Fleet, str]) -> None:
    _, url = running
    answer = post(url, input=[[5, 6]], role="query")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "role"


def test_a_frontend_without_the_weights_says_that_it_is_its_own_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = RoleCard(static=str(tmp_path / "query_0_Static"))
    renderer = Renderer.load(models.routed() / "document_0_MLM")
    with pytest.raises(EngineError, match="cannot read the model's weights of queries"):
        TextInputs(TEXTS, renderer, Truncation(64), form=form).pieces(0, 1)
    assert f"put them in {form.static}" in caplog.text


def copied(tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(models.routed(), tmp_path / "model"))


def encoder(path: Path) -> Encoder:
    return Encoder.load(EngineSettings.of(model=str(path), task="embed", self_check="off"))


def test_weights_of_ids_are_part_of_the_identity(tmp_path: Path) -> None:
    path = copied(tmp_path)
    before = encoder(path).weights_id
    file = path / "query_0_Static" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    other = copied(tmp_path / "other")
    (other / "query_0_Static" / "model.safetensors").write_bytes(data)
    assert encoder(other).weights_id != before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"structure": {"query": ["query_0_Static"]}}, "served is one with the routes query"),
        ({"structure": {"query": ["../x"], "document": []}}, "outside of its directory"),
        (
            {
                "structure": {
                    "query": ["document_0_MLM", "document_1_Splade"],
                    "document": ["document_0_MLM", "document_1_Splade"],
                }
            },
            "query: Transformer, SpladePooling",
        ),
    ],
)
def test_other_routers_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = copied(tmp_path)
    file = path / "router_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InvalidRequestError, match=said):
        EmbeddingConfig.read(path)


def test_another_tokenizer_or_vocabulary_is_refused(tmp_path: Path) -> None:
    path = copied(tmp_path / "tokens")
    file = path / "query_0_Static" / "tokenizer.json"
    said = json.loads(file.read_text())
    said["normalizer"] = None
    file.write_text(json.dumps(said))
    with pytest.raises(InvalidRequestError, match="another tokenizer"):
        encoder(path)
    path = copied(tmp_path / "weights")
    (path / "query_0_Static" / "model.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match="has no weights"):
        encoder(path)
