"""Vectors of parts of a text that saw all of it, and of texts longer than the model reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace

from inlay.api.generation.truncation import Truncation
from inlay.api.openai.embeddings.inputs import TextInputs
from inlay.api.openai.embeddings.long_texts import LongTexts
from inlay.messages.card import EmbeddingCard
from inlay.messages.pooling import RoleCard
from inlay.render import Renderer
from tests import embedding_reference as reference
from tests import output_models as models
from tests.embedding_models import WORDS, tiny_embedding
from tests.live import fleet

TEXTS = ["the harbour counts its lanterns", "cold wind", "ships sail south"]
LONG = " ".join(WORDS[n % len(WORDS)] for n in range(150))


@pytest.fixture(scope="module")
def bert() -> Iterator[str]:
    with fleet(tiny_embedding("bert"), task="embed", dtype="float32") as running:
        yield running.serve(embedding_cache_bytes=1_000_000)


@pytest.fixture(scope="module")
def bge() -> Iterator[str]:
    with fleet(tiny_embedding("bge"), task="embed", dtype="float32") as running:
        yield running.serve(max_embedding_inputs=8)


@pytest.fixture(scope="module")
def splade() -> Iterator[str]:
    with fleet(models.splade(), task="embed", dtype="float32") as running:
        yield running.serve()


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(url + "/v1/embeddings", json=body, timeout=180)


def items(url: str, **body: Any) -> list[dict[str, Any]]:
    response = post(url, **body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["data"]
    return found


def states(directory: Path, text: str) -> Any:
    ids = reference.tokenizer_of(directory)(text)["input_ids"]
    with torch.no_grad():
        return reference.model_of(directory)(input_ids=torch.tensor([ids])).last_hidden_state[0]


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


def test_each_chunk_is_the_mean_of_its_positions(bert: str) -> None:
    text = " ".join(TEXTS)
    rows = states(tiny_embedding("bert"), text).numpy()
    for size in (1, 4, 100):
        (item,) = items(bert, input=[text], late_chunking_params={"chunk_size": size})
        told = item["late_chunking"]
        assert told["strategy"] == "fixed"
        assert told["input_tokens"] == item["input_tokens"] == len(rows)
        ranges = [chunk["token_range"] for chunk in told["chunks"]]
        # Special tokens are in the first and the last.
        assert [stop - start for start, stop in ranges[1:-1]] == [size] * len(ranges[1:-1])
        assert ranges[0][0] == 0
        assert ranges[-1][1] == len(rows)
        for found, (start, stop) in zip(item["embedding"], ranges, strict=True):
            np.testing.assert_allclose(found, unit(rows[start:stop].mean(0)), atol=1e-5)
        words = [text[slice(*chunk["char_range"])] for chunk in told["chunks"]]
        assert " ".join(words) == text
    (whole,) = items(bert, input=[text])
    np.testing.assert_allclose(item["embedding"], [whole["embedding"]], atol=1e-6)


def test_texts_one_after_another_have_a_vector_each(bert: str) -> None:
    rows = states(tiny_embedding("bert"), " ".join(TEXTS)).numpy()
    found = items(bert, input=TEXTS, late_chunking=True)
    assert [each["index"] for each in found] == [0, 1, 2]
    stop = 0
    for each in found:
        start, end = each["token_range"]
        assert start == stop
        stop = end
        assert each["input_tokens"] == end - start
        np.testing.assert_allclose(each["embedding"], unit(rows[start:end].mean(0)), atol=1e-5)
    assert stop == len(rows)
    alone = items(bert, input=TEXTS)
    assert not np.allclose(found[1]["embedding"], alone[1]["embedding"], atol=1e-3)
    (one,) = items(bert, input=TEXTS[:1], late_chunking=True)
    np.testing.assert_allclose(one["embedding"], alone[0]["embedding"], atol=1e-6)


@pytest.mark.slow
def test_layers_behind_the_mean_are_those_of_each_chunk() -> None:
    directory = tiny_embedding("gemma")
    with fleet(directory, task="embed", dtype="float32") as running:
        url = running.serve()
        text = " ".join(TEXTS)
        (item,) = items(url, input=[text], late_chunking_params={"chunk_size": 100})
        (whole,) = items(url, input=[text])
        np.testing.assert_allclose(item["embedding"][0], whole["embedding"], atol=1e-6)
        (item,) = items(url, input=[text], late_chunking_params={"chunk_size": 3})
        assert np.shape(item["embedding"]) == (len(item["late_chunking"]["chunks"]), 40)
        (split,) = items(url, input=[LONG], split_long_inputs=True)
        assert split["approximate"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"late_chunking": True, "late_chunking_params": {"chunk_size": 2}}, "late_chunking"),
        ({"late_chunking": True, "outputs": ["dense"]}, "outputs"),
        ({"late_chunking": True, "store": True}, "store"),
        ({"late_chunking": True, "encoding_format": "safetensors"}, "encoding_format"),
        ({"late_chunking_params": {"chunk_size": 0}}, "late_chunking_params.chunk_size"),
        ({"late_chunking": True, "input": [[5, 6]]}, "input"),
        (
            {"late_chunking": True, "input": [LONG, "cold"], "truncate_prompt_tokens": 9},
            "input[1]",
        ),
        ({"split_long_inputs": True, "input": [[5, 6]]}, "split_long_inputs"),
        ({"split_long_inputs": True, "auto_truncate": True}, "split_long_inputs"),
        ({"split_long_inputs": True, "store": True}, "split_long_inputs"),
    ],
)
def test_what_does_not_go_together_is_refused(bert: str, body: Any, param: str) -> None:
    response = post(bert, **{"input": TEXTS, **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_vectors_of_parts_in_json_are_bounded(bert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.api.openai.embeddings.route.MOST_NUMBERS", 100)
    body: Any = {"input": TEXTS, "late_chunking_params": {"chunk_size": 1}}
    response = post(bert, **body)
    assert response.status_code == 400
    assert "vectors of parts are over 100 numbers" in response.json()["error"]["message"]
    assert len(items(bert, **body, encoding_format="base64")) == len(TEXTS)
    assert len(items(bert, input=TEXTS, late_chunking=True)) == len(TEXTS)


def test_a_model_that_takes_one_position_has_no_chunks(bge: str) -> None:
    response = post(bge, input=TEXTS, late_chunking=True)
    assert response.status_code == 400
    assert "mean of all positions; the model" in response.json()["error"]["message"]


def parts_of(item: dict[str, Any], text: str) -> list[str]:
    parts = [text[start:stop] for start, stop in item["pieces"]]
    assert "".join(parts) == text
    assert len(parts) > 2
    return parts


def test_the_vector_of_a_long_text_is_the_mean_of_all_positions(bert: str) -> None:
    assert post(bert, input=[LONG]).status_code == 400
    short, item = items(bert, input=[TEXTS[0], LONG], split_long_inputs=True)
    assert "pieces" not in short
    np.testing.assert_allclose(
        short["embedding"], items(bert, input=TEXTS[:1])[0]["embedding"], atol=1e-6
    )
    rows = [states(tiny_embedding("bert"), part).numpy() for part in parts_of(item, LONG)]
    assert max(map(len, rows)) <= 64
    assert not item["approximate"]
    assert not item["truncated"]
    assert item["input_tokens"] == sum(map(len, rows))
    np.testing.assert_allclose(item["embedding"], unit(np.concatenate(rows).mean(0)), atol=1e-5)


def test_vectors_of_tokens_of_a_long_text_have_its_characters(bert: str) -> None:
    body: Any = {"outputs": ["dense", "tokens"], "split_long_inputs": True}
    (item,) = items(bert, input=[LONG], **body)
    tokens = item["tokens"]
    rows = [states(tiny_embedding("bert"), part).numpy() for part in parts_of(item, LONG)]
    np.testing.assert_allclose(tokens["data"], np.concatenate(rows), atol=1e-4)
    words = [LONG[slice(*each)] for each in tokens["ranges"] if each is not None]
    assert " ".join(words) == LONG


def test_of_each_piece_the_same_positions_have_no_vector() -> None:
    with fleet(models.bge_m3(), task="embed", dtype="float32") as running:
        url, body = running.serve(), {"outputs": ["tokens"]}
        (item,) = items(url, input=[LONG], split_long_inputs=True, **body)
        parts = items(url, input=parts_of(item, LONG), **body)
    tokens = item["tokens"]
    assert tokens["token_ids"] == [id_ for part in parts for id_ in part["tokens"]["token_ids"]]
    rows = [row for part in parts for row in part["tokens"]["data"]]
    np.testing.assert_allclose(tokens["data"], rows, atol=1e-5)
    assert item["input_tokens"] == sum(part["input_tokens"] for part in parts)
    words = [LONG[slice(*each)] for each in tokens["ranges"] if each is not None]
    assert " ".join(words) == LONG


@pytest.mark.parametrize("cut", [Truncation(20), Truncation(64, 20)])
def test_no_piece_is_cut_though_it_has_more_tokens_in_lower_case(
    cut: Truncation, tmp_path: Path
) -> None:
    text = " ".join(["XY"] * 50)
    vocabulary = {"[UNK]": 0, "query": 1, "x": 2, "##y": 3}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    renderer = Renderer.load(tmp_path)
    given = TextInputs(
        [text], renderer, cut, ("query ",), lower_case=True, form=RoleCard(at_most=20)
    )
    found = LongTexts(EmbeddingCard(size=48), 0, 50).inputs(given)
    pieces = found.pieces(0, len(found))
    assert not any(piece.truncated for piece in pieces)
    whole = renderer.texts.encode([text.lower()], add_special_tokens=False)[0]
    assert len(whole) == 100
    assert sum(len(piece.prompt) for piece in pieces) == len(whole) + len(pieces)


def test_a_vector_of_one_position_is_said_to_be_approximate(bge: str) -> None:
    (item,) = items(bge, input=[LONG], split_long_inputs=True)
    assert item["approximate"]
    parts = items(bge, input=parts_of(item, LONG), normalize=False)
    mean = np.average(
        [part["embedding"] for part in parts],
        axis=0,
        weights=[part["input_tokens"] for part in parts],
    )
    np.testing.assert_allclose(item["embedding"], unit(mean), atol=1e-5)
    response = post(bge, input=[" ".join([LONG] * 8)], split_long_inputs=True)
    assert response.status_code == 400
    assert "over 8 pieces" in response.json()["error"]["message"]


@pytest.mark.thorough
def test_sparse_weights_of_a_long_text_are_the_largest_of_its_pieces(splade: str) -> None:
    (item,) = items(splade, input=[LONG], split_long_inputs=True)
    wanted: dict[int, float] = {}
    for part in items(splade, input=parts_of(item, LONG)):
        for id_, weight in zip(part["sparse"]["indices"], part["sparse"]["values"], strict=True):
            wanted[id_] = max(weight, wanted.get(id_, 0))
    found = dict(zip(item["sparse"]["indices"], item["sparse"]["values"], strict=True))
    assert found == pytest.approx(wanted, abs=1e-5)
    (few,) = items(splade, input=[LONG], split_long_inputs=True, max_active=3)
    largest = sorted(wanted, key=lambda id_: -wanted[id_])[:3]
    assert few["sparse"]["indices"] == sorted(largest)
