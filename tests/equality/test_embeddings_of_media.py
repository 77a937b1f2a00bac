"""Vectors of chats with images and audio over HTTP: the pooled states of transformers.

Every request goes through the real `openai` client, or httpx, to an engine in float32.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from transformers import AutoTokenizer

from tests.embedding_models import tiny_embedding
from tests.embedding_reference import cosine
from tests.engine.torch.vision_reference import Item, Parts, Picture, Sound, states_of
from tests.equality.test_images_over_http import (
    TEMPLATES,
    data_url,
    directory,
    embeds,
    image,
    image_embeds,
    text,
)
from tests.equality.test_sound_and_video_over_http import directory as audio_directory
from tests.equality.test_sound_and_video_over_http import encoded
from tests.live import fleet
from tests.vision_models import IMAGE

ONE, TWO = Picture(3, 50, 60), Picture(4, 33, 70)
Vector = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=list(TEMPLATES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def url(family: str) -> Iterator[str]:
    options: dict[str, Any] = {"limit_mm_per_prompt": '{"image": 2}', "enable_mm_embeds": True}
    with fleet(directory(family), task="embed", **options) as running:
        yield running.serve(enable_prompt_embeds=True)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def embedded(client: openai.OpenAI, messages: list[Any], **more: Any) -> list[Vector]:
    """The vectors of chats, as vLLM's clients ask for them."""
    answer = client.embeddings.create(
        model="tiny", input="", encoding_format="float", extra_body={"messages": messages, **more}
    )
    return [np.array(item.embedding, np.float32) for item in answer.data]


@cache
def _template(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


def expected(case: str, path: Path, *content: str | Item, generation: bool = False) -> Vector:
    """The last state of transformers for one user's message of texts and items, of length 1."""
    kind = "audio" if any(isinstance(each, Sound) for each in content) else "image"
    parts = [text(each) if isinstance(each, str) else {"type": kind} for each in content]
    ids = _template(path).apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=generation, return_dict=False
    )
    items = iter([each for each in content if not isinstance(each, str)])
    split: list[list[int] | Item] = [[]]
    for id_ in ids:
        if id_ == IMAGE:
            split += [next(items), []]
        else:
            split[-1].append(id_)  # type: ignore[union-attr]
    whole: Parts = [part for part in split if part != []]
    state: Vector = states_of(case, whole)[-1].numpy()
    return state / np.float32(np.linalg.norm(state))


def same(found: Vector, wanted: Vector) -> bool:
    return bool(np.abs(found - wanted).max() < 1e-4)


def test_images_and_texts_in_one_request_have_the_vectors_of_transformers(
    client: openai.OpenAI, family: str
) -> None:
    contents: list[list[str | Picture]] = [
        ["what is on ", ONE, " and ", TWO, "?"],
        [TWO],
        ["hello world"],
        [ONE, "hello world"],
    ]
    chats = [
        user(*(text(each) if isinstance(each, str) else image(each) for each in content))
        for content in contents
    ]
    path = directory(family)
    together = embedded(client, chats)
    for chat, content, vector in zip(chats, contents, together, strict=True):
        wanted = expected(family, path, *content)
        assert same(vector, wanted)
        (alone,) = embedded(client, chat)
        assert same(alone, wanted)
    assert cosine(together[1], together[3]) < 0.99


def test_an_image_is_its_clients_rows_and_mixes_with_prompt_embeds(
    client: openai.OpenAI, family: str
) -> None:
    words = "how many lanterns"
    wanted = expected(family, directory(family), ONE, words, TWO, "so")
    for middle in (text(words), embeds(family, words)):
        for first in (image(ONE), image_embeds(family, ONE)):
            (found,) = embedded(client, user(first, middle, image(TWO), text("so")))
            assert same(found, wanted)


def test_fields_of_vllms_chat_request_mean_the_same_here(url: str, family: str) -> None:
    path = directory(family)
    body = {"model": "tiny", "messages": user(image(ONE), text("hello")), "request_id": "mine"}

    def post(route: str = "/v1/embeddings", **more: Any) -> dict[str, Any]:
        response = httpx.post(url + route, json={**body, **more}, timeout=180)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    begun = post(add_generation_prompt=True, add_special_tokens=False)
    assert begun["id"] == "embd-mine"
    assert same(
        np.array(begun["data"][0]["embedding"], np.float32),
        expected(family, path, ONE, "hello", generation=True),
    )
    whole, open_ = post(), post(continue_final_message=True)
    ends = len(_template(path)("<|im_end|>\n", add_special_tokens=False).input_ids)
    assert whole["usage"]["prompt_tokens"] == open_["usage"]["prompt_tokens"] + ends
    pooled = post("/pooling")["data"][0]["data"]
    assert same(np.array(pooled, np.float32), expected(family, path, ONE, "hello"))
    input_ = {"model": "tiny", "input": body["messages"]}
    again = httpx.post(url + "/v1/embeddings", json=input_, timeout=180).json()
    assert again["data"][0]["embedding"] == whole["data"][0]["embedding"]


def test_images_texts_and_references_rank_together_as_their_vectors_do(
    client: openai.OpenAI, url: str, family: str
) -> None:
    content = [image(ONE), text("so")]
    query = [image(TWO), text("what is on it")]
    asked, shown = embedded(client, [user(*query), user(*content)])
    answer = client.embeddings.create(
        model="tiny", input="", extra_body={"messages": user(*content), "store": True}
    )
    extra = answer.data[0].model_extra
    assert extra is not None
    rows = embeds(family, "hello world")["data"]
    plain = [
        client.embeddings.create(model="tiny", encoding_format="float", **body).data[0].embedding
        for body in (
            {"input": "hello world"},
            {"input": "", "extra_body": {"prompt_embeds": rows}},
        )
    ]
    wanted = [cosine(asked, np.array(each, np.float32)) for each in (shown, *plain, shown)]
    documents = [
        {"content": content}, "hello world", {"prompt_embeds": rows}, {"ref": extra["ref"]}
    ]  # fmt: skip
    body = {"text_1": {"content": query}, "text_2": documents}
    found = httpx.post(url + "/v1/score", json=body, timeout=180).json()["data"]
    assert [each["score"] for each in found] == pytest.approx(wanted, abs=1e-4)
    wrong = [*documents, {"content": [*content, image(ONE), image(TWO)]}]
    body = {"query": {"content": query}, "documents": wrong}
    error = httpx.post(url + "/v1/rerank", json=body, timeout=180).json()["error"]
    assert error["param"].startswith("documents[4].content")
    assert "at most 2 image(s)" in error["message"]


def refused(client: openai.OpenAI, messages: list[Any], param: str, phrase: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        embedded(client, messages)
    assert (caught.value.param, phrase in caught.value.message) == (param, True), caught.value


def test_bad_images_are_refused_by_their_place_and_the_next_request_is_right(
    client: openai.OpenAI, family: str
) -> None:
    place = "messages[0].content[1]"
    cut = {"type": "image_url", "image_url": {"url": data_url(TWO.data[:-900])}}
    refused(client, user(text("a"), cut), place, "truncated")
    # Sized by its header, damaged inside: found by the worker.
    wrong = bytearray(TWO.data)
    wrong[len(wrong) // 2] ^= 0xFF
    broken = {"type": "image_url", "image_url": {"url": data_url(bytes(wrong))}}
    refused(client, user(text("a"), broken), place, "cannot be decoded")
    refused(client, [user(text("a")), user(cut)], "messages[1][0].content[0]", "truncated")
    many = user(text("a"), image(ONE), image(TWO), image(ONE))
    refused(client, many, place, "at most 2 image(s) may be given")
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    refused(client, user(text("a"), sound), place, "takes no audio")
    refused(client, user({"type": ["image_url"]}), "messages[0].content[0].type", "must be one of")
    # The limit is one of a prompt, not of a request.
    chats = [user(image(ONE), image(TWO)), user(image(TWO), image(ONE))]
    found = embedded(client, chats)
    assert same(found[0], expected(family, directory(family), ONE, TWO))
    assert same(found[1], expected(family, directory(family), TWO, ONE))


def test_a_model_of_texts_alone_refuses_images() -> None:
    with fleet(tiny_embedding("qwen3"), task="embed") as running:
        base = running.serve(enable_prompt_embeds=True) + "/v1"
        with openai.OpenAI(base_url=base, api_key="unused", max_retries=0) as client:
            refused(client, user(image(ONE)), "messages[0].content[0]", "takes no images")


def test_audio_has_the_vector_of_transformers_too() -> None:
    sound = Sound(5, 16_000)
    path = audio_directory("qwen2_audio")
    part = {"type": "input_audio", "input_audio": {"data": encoded(sound.data), "format": "wav"}}
    with (
        fleet(path, task="embed") as running,
        openai.OpenAI(base_url=running.serve() + "/v1", api_key="unused") as client,
    ):
        (found,) = embedded(client, user(text("what is "), part))
    assert same(found, expected("qwen2_audio", path, "what is ", sound))
