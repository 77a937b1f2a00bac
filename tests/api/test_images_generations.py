"""`/v1/images/generations` over HTTP, with the real `openai` client."""

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from PIL import Image

from inlay_stages.params import Diffusion
from tests.engine.test_diffusers import alone, model, near
from tests.live import Fleet, fleet
from tests.payloads import post

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.extensions("stages"),
]


@pytest.fixture(scope="module")
def painter() -> Iterator[Fleet]:
    with fleet(
        model("sd"), engine="diffusers", dtype="float32", max_inference_steps=200
    ) as running:
        yield running


@pytest.fixture(scope="module")
def url(painter: Fleet) -> str:
    return painter.serve()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as made:
        yield made


FIELDS = {"num_inference_steps": 3, "guidance_scale": 3.0, "seed": 7}


def pixels(encoded: str | None) -> npt.NDArray[np.uint8]:
    assert encoded is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))


def expected(**more: Any) -> list[npt.NDArray[np.uint8]]:
    return alone(
        "sd",
        "a red fox",
        Diffusion(**({"width": 32, "height": 32, "steps": 3, "guidance": 3.0, "seed": 7} | more)),
    )


def test_images_are_those_of_diffusers(client: openai.OpenAI) -> None:
    found = client.images.generate(
        model="tiny", prompt="a red fox", n=2, size="32x32", extra_body=FIELDS
    )
    assert near([pixels(one.b64_json) for one in found.data or []], expected(count=2))
    assert (found.size, found.output_format) == ("32x32", "png")
    assert found.usage is not None
    assert found.usage.input_tokens == found.usage.input_tokens_details.text_tokens > 0
    # 16 x 16 latents of each image.
    assert found.usage.output_tokens == 512
    other = client.images.generate(
        model="tiny", prompt="a red fox", extra_body=FIELDS | {"negative_prompt": "blurred"}
    )
    assert not near([pixels(one.b64_json) for one in other.data or []], expected())


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_files_are_of_the_format_asked_for(client: openai.OpenAI, kind: Any) -> None:
    found = client.images.generate(prompt="x", output_format=kind, extra_body=FIELDS)
    (one,) = found.data or []
    image = Image.open(io.BytesIO(base64.b64decode(one.b64_json or "")))
    assert (image.format, image.size) == (kind.upper(), (32, 32))


def test_a_stream_has_partial_images_and_then_the_image(client: openai.OpenAI) -> None:
    events = list(
        client.images.generate(
            prompt="a red fox",
            stream=True,
            partial_images=2,
            extra_body=FIELDS | {"num_inference_steps": 6},
        )
    )
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]  # type: ignore[union-attr]
    last = events[-1]
    assert last.type == "image_generation.completed"
    assert near([pixels(last.b64_json)], expected(steps=6))
    assert last.usage.total_tokens == last.usage.input_tokens + 256


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": ""}, "prompt", "must be provided and not be empty"),
        ({"prompt": None}, "prompt", "must be provided and not be empty"),
        ({"prompt": "x" * 100}, "prompt", "100 characters|tokens; this model reads at most 24"),
        ({"n": 11}, "n", "<= 10"),
        ({"n": 2, "stream": True}, "n", "a stream has one image"),
        ({"partial_images": 1}, "partial_images", "needs stream"),
        ({"size": "big"}, "size", "WIDTHxHEIGHT"),
        ({"size": "33x32"}, "size", "multiples of 8"),
        ({"size": "8192x8192"}, "size", "at most"),
        ({"size": "1024x1024", "num_inference_steps": 1}, "size", "--max-generated-image-size"),
        (
            {"size": "64x64", "num_inference_steps": 51},
            "num_inference_steps",
            "costs 204 steps of the model's own size, 32x32; at most 200 are allowed",
        ),
        ({"num_inference_steps": 0}, "num_inference_steps", "allowed: 1 to 200"),
        ({"num_inference_steps": 10**9}, "num_inference_steps", "allowed: 1 to 200"),
        ({"guidance_scale": 1e9}, "guidance_scale", "guidance_scale"),
        ({"response_format": "url"}, "response_format", "b64_json"),
        ({"quality": "high"}, "quality", "num_inference_steps sets the work"),
        ({"seed": -2}, "seed", ">= -1"),
        ({"priority": 3}, "priority", "first come, first"),
    ],
)
def test_a_wrong_field_is_named(
    painter: Fleet, url: str, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = httpx.post(
        f"{url}/v1/images/generations", json={"prompt": "x"} | FIELDS | fields, timeout=60
    )
    assert answer.status_code == 400, answer.text
    found = answer.json()["error"]
    assert found["param"] == param
    assert any(part in found["message"] for part in said.split("|")), found
    assert painter.running() == 0


def test_other_routes_say_where_to_ask(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 400
    assert (
        "makes images, and does not generate text: use POST /v1/images/generations"
        in (answer.json()["error"]["message"])
    )
    (entry, _) = httpx.get(f"{url}/v1/models").json()["data"]
    assert entry["capabilities"] == ["image_generation"]


def test_a_client_that_leaves_frees_the_engine(painter: Fleet, url: str) -> None:
    body = {"prompt": "x", "stream": True, "partial_images": 3, "num_inference_steps": 200}
    with httpx.stream(
        "POST", f"{url}/v1/images/generations", content=json.dumps(body),
        headers={"content-type": "application/json"}, timeout=60,
    ) as answer:  # fmt: skip
        assert next(answer.iter_lines()).startswith("event: image_generation.partial_image")
    assert painter.idle_within(60)


def test_clients_that_choose_the_same_ids_each_get_their_image(url: str) -> None:
    def ask(seed: int) -> npt.NDArray[np.uint8]:
        body = {"prompt": "a red fox", "request_id": "one", **FIELDS, "seed": seed}
        body |= {"num_inference_steps": 60}
        answer = httpx.post(
            f"{url}/v1/images/generations", json=body, headers={"x-request-id": "1"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return pixels(answer.json()["data"][0]["b64_json"])

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(ask, (7, 8)))
    assert not near(found[:1], found[1:])


def test_a_seed_of_minus_one_is_none(url: str) -> None:
    body = {"prompt": "a red fox", **FIELDS, "seed": -1}
    found = [
        pixels(post(url, "/v1/images/generations", body).json()["data"][0]["b64_json"])
        for _ in range(2)
    ]
    assert not near(found[:1], found[1:])
