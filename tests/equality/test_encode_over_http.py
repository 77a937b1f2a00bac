"""`/v1/encode` over HTTP: its answers are images to a server that generates."""

import base64
import io
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.engine.torch.encode_reference import damaged, features
from tests.engine.torch.vision_reference import Picture
from tests.equality.test_images_over_http import (
    FLAGS,
    chat,
    data_url,
    directory,
    expected,
    ids_of,
    image,
    text,
)
from tests.models import tiny
from tests.serving import Served, serving
from tests.vision_models import vision

CACHE_BYTES = 500_000
ONE, TWO = Picture(3, 50, 60), Picture(4, 33, 70)


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def encoder(family: str) -> Iterator[Served]:
    flags = ("--task", "encode", "--served-model-name", "tower", "--max-media-bytes", 20_000,
             "--encoder-cache-bytes", CACHE_BYTES)  # fmt: skip
    with serving(directory(family), *flags) as served:
        yield served


@pytest.fixture(scope="module")
def generator(family: str) -> Iterator[Served]:
    with serving(directory(family), *FLAGS) as served:
        yield served


def encode(server: Served, value: object, **more: object) -> httpx.Response:
    return httpx.post(
        server.url + "/v1/encode", json={"input": value, **more}, timeout=180, trust_env=False
    )


def tensor(element: dict[str, Any]) -> torch.Tensor:
    """The rows of an element as vLLM reads them."""
    file = io.BytesIO(base64.b64decode(element["image_embeds"]))
    found: torch.Tensor = torch.load(file, weights_only=True)  # noqa: TID251  # our own file
    return found


def counters(server: Served) -> dict[str, float]:
    with urllib.request.urlopen(server.url + "/metrics") as response:
        lines = response.read().decode().splitlines()
    return {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("inlay:image_cache")
    }


@pytest.mark.thorough
def test_the_answer_has_the_rows_of_transformers_from_either_server(
    family: str, encoder: Served, generator: Served
) -> None:
    given = [image(ONE), data_url(TWO.data)]
    answer = encode(encoder, given, model="tower")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["object"], found["model"]) == ("list", "tower")
    for index, (element, picture) in enumerate(zip(found["data"], (ONE, TWO), strict=True)):
        truth = features(family, picture).rows
        assert (element["object"], element["index"]) == ("image_embeds", index)
        assert element["num_tokens"] == len(truth)
        torch.testing.assert_close(tensor(element), truth, atol=2e-5, rtol=1e-4)
        assert (element["image_grid_thw"] is None) == (family == "llava")
    count = sum(element["num_tokens"] for element in found["data"])
    assert found["usage"] == {"prompt_tokens": count, "total_tokens": count}
    # Alone: what is computed together decides the rounding.
    alone = encode(encoder, data_url(Picture(6, 50, 60).data)).json()["data"]
    assert encode(generator, data_url(Picture(6, 50, 60).data)).json()["data"] == alone


def test_an_element_is_the_image_to_the_server_that_generates(
    family: str, encoder: Served, generator: Served
) -> None:
    elements = encode(encoder, [image(ONE), image(TWO)]).json()["data"]
    one, two = ({"type": "image_embeds", "image_embeds": element} for element in elements)
    words = "the harbour town"
    with openai.OpenAI(base_url=generator.v1, api_key="unused", max_retries=0) as client:
        there = ids_of(chat(client, one, text(words), two))
        back = ids_of(chat(client, two, text(words), image(ONE)))
    assert there == expected(family, ONE, words, TWO)
    assert back == expected(family, TWO, words, ONE)


def test_numbers_are_the_same_rows(encoder: Served) -> None:
    (packed,) = encode(encoder, image(ONE)).json()["data"]
    (plain,) = encode(encoder, image(ONE), encoding_format="float").json()["data"]
    assert torch.equal(torch.tensor(plain["image_embeds"]), tensor(packed))


def test_many_images_come_back_in_order_and_a_second_time_from_the_cache(
    family: str, encoder: Served
) -> None:
    pictures = [Picture(100 + seed, 40, 56) for seed in range(40)]
    urls = [data_url(picture.data) for picture in pictures]
    before = counters(encoder)
    first = encode(encoder, urls).json()["data"]
    between = counters(encoder)
    for index in (0, 17, 39):
        torch.testing.assert_close(
            tensor(first[index]), features(family, pictures[index]).rows, atol=2e-5, rtol=1e-4
        )
    assert encode(encoder, urls).json()["data"] == first
    after = counters(encoder)
    misses, hits = "inlay:image_cache_misses_total", "inlay:image_cache_hits_total"
    assert between[misses] - before[misses] == 40
    assert after[misses] == between[misses]
    assert after[hits] - between[hits] == 40


def test_rows_are_kept_up_to_a_bound_in_bytes(family: str, encoder: Served) -> None:
    pictures = [Picture(200 + seed, 40, 56) for seed in range(160)]
    urls = [data_url(picture.data) for picture in pictures]
    one = features(family, pictures[0]).rows
    assert one.nbytes * 40 < CACHE_BYTES < one.nbytes * len(urls)
    first = [
        element
        for start in range(0, len(urls), 40)
        for element in encode(encoder, urls[start : start + 40]).json()["data"]
    ]
    full = counters(encoder)
    assert CACHE_BYTES - 2 * one.nbytes < full["inlay:image_cache_bytes"] <= CACHE_BYTES
    assert full["inlay:image_cache_evictions_total"] >= len(urls) - CACHE_BYTES // one.nbytes
    # The last one used stays, the first one has gone and is encoded again.
    assert encode(encoder, urls[-1]).json()["data"][0]["image_embeds"] == first[-1]["image_embeds"]
    kept = counters(encoder)
    misses = "inlay:image_cache_misses_total"
    assert kept[misses] == full[misses]
    (again,) = encode(encoder, urls[0]).json()["data"]
    torch.testing.assert_close(tensor(again), one, atol=2e-5, rtol=1e-4)
    found = counters(encoder)
    assert found[misses] == full[misses] + 1
    assert found["inlay:image_cache_bytes"] <= CACHE_BYTES


def test_a_damaged_file_is_named_and_harms_no_other_request(encoder: Served) -> None:
    good, bad = data_url(ONE.data), data_url(damaged(TWO.data))
    first = encode(encoder, good).json()["data"]
    answer = encode(encoder, [good, bad])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "input[1]"
    assert "input[1]: an image cannot be decoded" in error["message"]
    assert encode(encoder, good).json()["data"] == first


@pytest.mark.parametrize(
    ("value", "param", "message"),
    [
        ([], "input", "input must not be empty"),
        ("data:image/png;base64,AAAA", "input", "input: "),
        (["data:image/png,x"], "input[0]", "base64"),
        ([{"type": "text", "text": "x"}], "input[0].type", "image_url, input_image"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "input.type", "image_url, input_image"),
        ([{"type": "image_url"}], "input[0].image_url", "must be a string"),
        ("http://127.0.0.1:1/x.png", "input", "input: "),
        ("words", "input", "media are fetched from https and data: URLs, got 'words'"),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            "input",
            "takes no audio; kinds of media it takes: image",
        ),
        (data_url(Picture(5, 100, 100).data), "input", "allowed: 20000"),
    ],
)
def test_what_is_no_image_is_refused(
    encoder: Served, value: object, param: str, message: str
) -> None:
    answer = encode(encoder, value)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_routes_name_each_other(encoder: Served) -> None:
    answer = httpx.post(
        encoder.url + "/v1/completions", json={"prompt": "x"}, timeout=180, trust_env=False
    )
    assert answer.status_code == 400
    assert "encodes media, and does not generate text: use POST /v1/encode" in answer.text
    (model,) = httpx.get(encoder.url + "/v1/models", trust_env=False).json()["data"]
    assert model["capabilities"] == ["encode"]
    with serving(tiny("llama"), "--served-model-name", "words") as served:
        refused = encode(served, data_url(ONE.data))
        assert refused.status_code == 400
        assert "does not encode media: use POST /v1/completions" in refused.text


@pytest.mark.thorough
def test_inner_features_stand_behind_the_rows() -> None:
    with serving(vision("qwen3_vl"), "--task", "encode") as served:
        (element,) = encode(served, data_url(ONE.data)).json()["data"]
    truth = features("qwen3_vl", ONE)
    whole = torch.cat([truth.rows, *truth.levels], dim=1)
    torch.testing.assert_close(tensor(element), whole, atol=2e-5, rtol=1e-4)
