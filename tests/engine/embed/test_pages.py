"""Pages and queries of ColQwen2: the prompts of its processor, the vectors of transformers' model.

transformers 5.23 computes pages at positions of one axis and ends queries with a line break. Both
are later than the published weights: here it is given the positions of three axes that its own
`get_rope_index` finds, and queries without the break.
"""

import base64
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ColQwen2ForRetrieval

from inlay.base.errors import InvalidRequestError
from inlay.embedding.config import EmbeddingConfig
from inlay.engine.embed.encoder import Encoder
from inlay.engine.embed.vector_model import EmbedInput
from inlay.engine.settings import EngineSettings
from inlay.engine.task import task_of
from inlay.engine.torch.weights.families import family_of as of_generation
from inlay.messages.prompt import Prompt, Tokens
from inlay.render import Renderer
from inlay.store import StoreSettings
from inlay.tensors.checkpoint import config_of
from inlay.tensors.page_prompts import PagePrompts
from tests import output_models as models
from tests.engine.torch.vision_reference import Picture, pixels
from tests.live import SECRET, fleet
from tests.vision_models import IMAGE, vision

PAGES = (Picture(1, 40, 56), Picture(2, 33, 70), Picture(3, 48, 48))
QUERIES = ("how many ships sail south", "cold wind")
OTHERS = {
    "query": "Ask <|im_end|>",
    "page": "<|im_start|>x: <|image_pad|><|vision_end|> Say what it shows.<|im_end|>",
}
Array = npt.NDArray[Any]


@cache
def oracle(path: Path) -> Any:
    return ColQwen2ForRetrieval.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def page_vectors(path: Path, page: Picture, model: Any = None) -> tuple[list[int], Array]:
    """Ids and vectors of a page, by the oracle or another `model`."""
    model = model or oracle(path)
    inputs = models.processor_of(path).process_images([page.image])
    inputs |= pixels("qwen2_vl", [page])  # with torchvision's steps
    kinds = (inputs["input_ids"] == IMAGE).int()
    places, _ = model.vlm.get_rope_index(
        inputs["input_ids"], kinds, inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )  # fmt: skip
    values = inputs["pixel_values"][None].to(model.dtype)
    found = model(**{**inputs, "pixel_values": values, "position_ids": places}).embeddings[0]
    return inputs["input_ids"][0].tolist(), found.float().numpy()


@torch.no_grad()
def query_vectors(path: Path, query: str) -> tuple[list[int], Array]:
    """Ids and vectors of a query."""
    inputs = models.processor_of(path).process_queries([query])
    ids = inputs["input_ids"][:, :-1]
    found = oracle(path)(input_ids=ids, attention_mask=torch.ones_like(ids)).embeddings
    return ids[0].tolist(), found[0].numpy()


def image(page: Picture) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(page.data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def ask(url: str, path: str = "/v1/embeddings", **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=180)


def items(url: str, **body: Any) -> list[dict[str, Any]]:
    response = ask(url, **body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["data"]
    return found


def refusal(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


@pytest.fixture(scope="module", params=["own", "others"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    path = models.pages() if request.param == "own" else models.pages(**OTHERS)
    with fleet(path, task="auto", dtype="float32") as running:
        yield running.serve(store=StoreSettings().open(SECRET)), path


@pytest.mark.thorough
def test_pages_and_queries_have_the_vectors_of_transformers(served: tuple[str, Path]) -> None:
    url, path = served
    for page, item in zip(PAGES, items(url, input=[chat(image(p)) for p in PAGES]), strict=True):
        ids, expected = page_vectors(path, page)
        assert item["tokens"]["shape"] == [len(ids), models.SIZE]
        assert np.abs(np.array(item["embedding"]) - expected).max() < 1e-5
    for more in ({}, {"role": "query"}, {"role": "document"}, {"input_type": "search_query"}):
        for query, item in zip(QUERIES, items(url, input=[*QUERIES], **more), strict=True):
            ids, expected = query_vectors(path, query)
            assert item["tokens"]["token_ids"] == ids
            assert np.abs(np.array(item["embedding"]) - expected).max() < 1e-5
    # A query in a chat is the same.
    said = items(url, input=[chat({"type": "text", "text": QUERIES[0]}), chat(image(PAGES[0]))])
    assert np.abs(np.array(said[0]["embedding"]) - query_vectors(path, QUERIES[0])[1]).max() < 1e-5


def test_pages_and_references_to_them_are_ranked_by_max_sim(served: tuple[str, Path]) -> None:
    url, path = served
    query = query_vectors(path, QUERIES[0])[1]
    wanted = [float((query @ page_vectors(path, page)[1].T).max(1).sum()) for page in PAGES]
    kept = items(url, input=[chat(image(page)) for page in PAGES], outputs=["tokens"], store=True)
    refs = [{"ref": item["ref"]} for item in kept]
    for documents in ([{"content": [image(page)]} for page in PAGES], refs):
        response = ask(url, "/v1/rerank", query=QUERIES[0], documents=documents)
        assert response.status_code == 200, response.text
        found = {one["index"]: one["relevance_score"] for one in response.json()["results"]}
        assert [found[place] for place in range(len(PAGES))] == pytest.approx(wanted, abs=1e-4)


def test_a_long_query_is_cut_and_what_stands_behind_it_is_not(served: tuple[str, Path]) -> None:
    url, path = served
    ids, _ = query_vectors(path, QUERIES[0])
    (item,) = items(url, input=QUERIES[0], truncate_prompt_tokens=len(ids) - 3)
    assert item["truncated"] is True
    assert item["tokens"]["token_ids"] == [*ids[:-13], *ids[-10:]]
    shown = item["tokens"]["ranges"]
    assert shown[-10:] == [None] * 10
    assert shown[-11] is not None


def test_a_chat_is_one_page_or_a_query(served: tuple[str, Path]) -> None:
    url, _ = served
    page = image(PAGES[0])
    assert "a page is one image" in refusal(ask(url, input=[chat(page, page)]))
    system = [{"role": "system", "content": "x"}, *chat(page)]
    assert "one message of the user" in refusal(ask(url, input=[system]))
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    assert "video" in refusal(ask(url, input=[chat(video)]))
    assert "the model `" in refusal(ask(url, input="x", outputs=["dense"]))


def test_texts_beside_an_image_stand_where_the_model_describes_it() -> None:
    template = Renderer.load(models.pages()).templates.choose(tools=False)
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    said = template.render(
        [{"role": "user", "content": parts}], tools=None, add_generation_prompt=False, variables={}
    )
    assert said == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>"
        "<|endoftext|>"
    )


def test_the_check_at_start_compares_language_model_and_tower() -> None:
    with fleet(models.pages(), task="embed", self_check="full") as running:
        listed = httpx.get(running.serve() + "/v1/models", timeout=60).json()["data"]
    found = listed[0]["self_check"]
    assert found["result"] == "passed"
    assert {"random", "text"} <= set(found["distances"])
    assert "image" in " ".join(found["parts"])


def test_weights_by_their_first_names_are_the_same_model(tmp_path: Path) -> None:
    """As `vidore/colqwen2-v1.0-hf` was saved, around a model with a head."""
    path = models.pages()
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    weights = load_file(path / "model.safetensors")
    named = {name.replace("vlm.", "vlm.model.", 1): tensor for name, tensor in weights.items()}
    named["vlm.lm_head.weight"] = weights["vlm.language_model.embed_tokens.weight"].clone()
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    ids, expected = query_vectors(path, QUERIES[0])
    encoder = Encoder.load(EngineSettings.of(model=str(tmp_path), task="embed", dtype="float32"))
    (found,) = encoder.outputs([EmbedInput(Prompt.of(Tokens(ids)), len(ids))])
    rows = found["tokens"] / np.linalg.norm(found["tokens"], axis=1, keepdims=True)
    assert np.abs(rows - expected).max() < 1e-5


def changed(tmp_path: Path, source: Path, **values: Any) -> Path:
    said = json.loads((source / "config.json").read_text()) | values
    (tmp_path / "config.json").write_text(json.dumps(said))
    return tmp_path


def test_other_models_of_pages_are_refused_by_name(tmp_path: Path) -> None:
    inside = {"model_type": "qwen2_5_vl"}
    with pytest.raises(InvalidRequestError, match="around 'qwen2_5_vl' is not served"):
        config_of(changed(tmp_path, models.pages(), vlm_config=inside))
    own = changed(tmp_path, vision("qwen2_vl"), architectures=["ColQwen2"])
    assert task_of(own)[0] == "embed"
    with pytest.raises(InvalidRequestError, match="ColQwen2, of colpali-engine; served is"):
        EmbeddingConfig.read(own)


def test_a_model_of_pages_neither_generates_nor_scores() -> None:
    with pytest.raises(InvalidRequestError, match="'colqwen2'"):
        of_generation(config_of(models.pages()))
    settings = EngineSettings.of(model=str(models.pages()), task="score")
    with pytest.raises(InvalidRequestError, match="ColQwen2ForRetrieval; --task score serves"):
        Encoder.load(settings)


@pytest.mark.parametrize("page", ["no image", "<|image_pad|> and <|image_pad|>"])
def test_a_prompt_of_pages_has_one_image(tmp_path: Path, page: str) -> None:
    changed(tmp_path, models.pages())
    said = {"visual_prompt_prefix": page}
    (tmp_path / "processor_config.json").write_text(json.dumps(said))
    with pytest.raises(InvalidRequestError, match=r"<\|image_pad\|> once"):
        EmbeddingConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"pad_token": 5}, "pad_token is no text"),
        ({"pad_token": {"text": "x"}}, "pad_token is no text"),
        ([5], "tokenizer_config.json holds list, not an object"),
    ],
)
def test_a_padding_token_that_is_no_text_is_named(
    tmp_path: Path, said: object, reason: str
) -> None:
    changed(tmp_path, models.pages())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    with pytest.raises(InvalidRequestError, match=reason):
        PagePrompts.of(tmp_path)
