"""An image of a prompt sent as text is that of the same prompt sent as a text encoder's rows."""

import base64
import io
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import httpx
import openai
import pytest
import torch

import inlay.client
from tests.engine.test_diffusers import model, whole
from tests.live import Fleet, fleet

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
PROMPT, NEGATIVE = "a red fox", "blurred"
FIELDS = {"size": "32x32", "num_inference_steps": 3, "guidance_scale": 3.0, "seed": 7, "n": 2}
SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=["sd", pytest.param("flux", marks=SLOW), pytest.param("qwen", marks=SLOW)],
)
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def painter(family: str) -> Iterator[Fleet]:
    with fleet(model(family), engine="diffusers", dtype="float32", num_threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def url(painter: Fleet) -> str:
    return painter.serve(enable_prompt_embeds=True)


def encoded(family: str, text: str) -> dict[str, torch.Tensor]:
    """What diffusers' own pipeline makes of a text."""
    pipeline = whole(family)
    with torch.inference_mode():
        if family == "sd":
            return {"prompt_embeds": pipeline.encode_prompt(text, "cpu", 1, False)[0].clone()}
        if family == "flux":
            embeds, pooled, _ = pipeline.encode_prompt(text, device="cpu")
            return {"prompt_embeds": embeds.clone(), "pooled_prompt_embeds": pooled.clone()}
        return {"prompt_embeds": pipeline.encode_prompt(text, device="cpu")[0].clone()}


def saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def files(family: str, negative: str | None = None) -> dict[str, bytes]:
    found = {name: saved(tensor) for name, tensor in encoded(family, PROMPT).items()}
    if negative is not None:
        found["negative_prompt_embeds"] = saved(encoded(family, negative)["prompt_embeds"])
    return found


def inline(given: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(data).decode() for name, data in given.items()}


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/images/generations", json=FIELDS | fields, timeout=120)


def images(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [one["b64_json"] for one in answer.json()["data"]]


def upload(url: str, data: bytes) -> dict[str, str]:
    answer = httpx.post(
        f"{url}/v1/prompt_embeds", content=data,
        headers={"content-type": "application/octet-stream"}, timeout=60,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return {"ref": answer.json()["id"]}


def test_rows_make_the_images_of_their_text_however_they_are_sent(url: str, family: str) -> None:
    expected = images(post(url, prompt=PROMPT))
    assert images(post(url, prompt="something else")) != expected
    given = files(family)
    assert images(post(url, **inline(given))) == expected
    assert images(post(url, prompt="what is not read", **inline(given))) == expected
    assert (
        images(post(url, **{name: upload(url, data) for name, data in given.items()})) == expected
    )
    body = FIELDS | {name: {"part": name} for name in given}
    form: Any = [("request", (None, json.dumps(body)))]
    form += [(name, (name, data)) for name, data in given.items()]
    parts = httpx.post(f"{url}/v1/images/generations", files=form, timeout=120)
    assert images(parts) == expected
    # Rows of a prompt are counted as its tokens are, with those of padding.
    rows = encoded(family, PROMPT)["prompt_embeds"].shape[1]
    assert parts.json()["usage"]["input_tokens"] == rows


def test_a_negative_prompt_may_be_text_or_rows_beside_either(url: str, family: str) -> None:
    if family == "flux":
        found = post(
            url, prompt=PROMPT, negative_prompt_embeds=inline(files("sd"))["prompt_embeds"]
        )
        assert found.status_code == 400
        assert found.json()["error"]["param"] == "negative_prompt_embeds"
        assert "takes no negative_prompt_embeds" in found.json()["error"]["message"]
        return
    expected = images(post(url, prompt=PROMPT, negative_prompt=NEGATIVE))
    assert images(post(url, prompt=PROMPT)) != expected
    if family == "qwen":
        # Both ways, positive and negative prompts have lengths of their own.
        assert len({len(data) for data in files(family, NEGATIVE).values()}) == 2
    given = inline(files(family, NEGATIVE))
    assert images(post(url, **given)) == expected
    negative = given.pop("negative_prompt_embeds")
    assert images(post(url, negative_prompt=NEGATIVE, **given)) == expected
    assert images(post(url, prompt=PROMPT, negative_prompt_embeds=negative)) == expected
    one = post(url, prompt=PROMPT, negative_prompt="not read", negative_prompt_embeds=negative)
    assert images(one) == expected


def test_the_list_of_models_tells_the_shapes(url: str, family: str) -> None:
    (entry, _) = httpx.get(f"{url}/v1/models").json()["data"]
    assert entry["capabilities"] == ["image_generation", "prompt_embeds"]
    shapes = {name: tensor.shape[1:] for name, tensor in encoded(family, PROMPT).items()}
    told = entry["image"]["embeds"]
    assert {name: shape[-1] for name, shape in told.items()} == {
        name: shape[-1] for name, shape in shapes.items()
    }
    positions = shapes["prompt_embeds"][0]
    assert entry["image"]["positions"] == (positions if family == "sd" else None)


def test_a_stream_may_be_of_rows(url: str, family: str) -> None:
    lines: dict[str, list[str]] = {}
    for name, prompt in (("text", {"prompt": PROMPT}), ("rows", inline(files(family)))):
        answer = post(url, **prompt, stream=True, n=1, partial_images=1)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:5] == "data:"]
        lines[name] = [event["b64_json"] for event in events]
    assert lines["rows"] == lines["text"]
    assert len(lines["rows"]) == 2


BAD: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "neither": ({}, "prompt", "At least one of 'prompt' or 'prompt_embeds' must be provided"),
    "not base64": ({"prompt_embeds": "?" * 200}, "prompt_embeds", "must be valid base64"),
    "short": ({"prompt_embeds": "AAAA"}, "prompt_embeds", "at least 100 bytes"),
    "width": ({"prompt_embeds": torch.ones(24, 31)}, "prompt_embeds", "size of tensor must match"),
    "batch": ({"prompt_embeds": torch.ones(2, 24, 32)}, "prompt_embeds", "a batch of 2"),
    "long": ({"prompt_embeds": torch.ones(25, 32)}, "prompt_embeds", "25 positions"),
    "uneven": ({"prompt_embeds": torch.ones(4, 32)}, "prompt_embeds", "has 4 positions"),
    "integers": (
        {"prompt_embeds": torch.ones(24, 32, dtype=torch.int64)},
        "prompt_embeds",
        "must be a torch.Tensor",
    ),
    "infinite": (
        {"prompt_embeds": torch.full((24, 32), float("inf"))}, "prompt_embeds", "must be finite"
    ),
    "large": ({"prompt_embeds": torch.full((24, 32), 1e6)}, "prompt_embeds", "magnitude"),
    "pooled": (
        {"prompt": "x", "pooled_prompt_embeds": torch.ones(1, 32)},
        "pooled_prompt_embeds",
        "takes no pooled_prompt_embeds; it takes prompt_embeds",
    ),
    "negative width": (
        {"prompt": "x", "negative_prompt_embeds": torch.ones(24, 31)},
        "negative_prompt_embeds",
        "size of tensor must match",
    ),
    "unknown": ({"prompt_embeds": {"ref": "pe-none"}}, "prompt_embeds", "not found"),
    "no part": ({"prompt_embeds": {"part": "a"}}, "prompt_embeds", "the body is not multipart"),
    "two": ({"prompt_embeds": {"part": "a", "ref": "b"}}, "prompt_embeds", "exactly one of"),
    "list": ({"prompt_embeds": ["A" * 200]}, "prompt_embeds", "expected `str"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("family", ["sd"], indirect=True)
def test_rows_that_the_model_does_not_take_are_refused_by_name(
    painter: Fleet, url: str, name: str
) -> None:
    fields, param, said = BAD[name]
    sent = {
        name: base64.b64encode(saved(value)).decode() if torch.is_tensor(value) else value
        for name, value in fields.items()
    }
    answer = post(url, **sent)
    assert answer.status_code == (404 if name == "unknown" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert said in error["message"], error
    assert painter.running() == 0


@SLOW
@pytest.mark.parametrize("family", ["flux"], indirect=True)
def test_tensors_that_belong_together_come_together(url: str) -> None:
    given = inline(files("flux"))
    for name in given:
        rest = {other: data for other, data in given.items() if other != name}
        answer = post(url, **rest)
        assert answer.json()["error"]["param"] == name
        assert f"{name} is missing" in answer.json()["error"]["message"]
    pooled = base64.b64encode(saved(torch.ones(2, 32))).decode()
    answer = post(url, **given | {"pooled_prompt_embeds": pooled})
    assert answer.json()["error"]["param"] == "pooled_prompt_embeds"
    assert "has 2 positions; this model reads 1" in answer.json()["error"]["message"]


@pytest.mark.parametrize("family", ["sd"], indirect=True)
def test_the_example_of_the_page_draws_what_its_text_draws(url: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"^    pipeline = StableDiffusionPipeline.*\n(?:    .*\n)+", page, re.M)
    for shown, here in (("./my-pipeline", str(model("sd"))), ("painter", "tiny"), ("512", "32")):
        assert shown in code
        code = code.replace(shown, here)
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        names: dict[str, Any] = {
            "StableDiffusionPipeline": diffusers.StableDiffusionPipeline,
            "torch": torch,
        }
        names |= {"inlay": inlay, "client": client}
        exec(textwrap.dedent(code).replace("client.images", "found = client.images"), names)
        expected = client.images.generate(
            prompt=PROMPT,
            size="32x32",
            extra_body={"seed": 7, "guidance_scale": 4.0, "negative_prompt": NEGATIVE},
        )
    assert names["found"].data == expected.data


@pytest.mark.parametrize("family", ["sd"], indirect=True)
def test_a_server_without_embeddings_says_how_to_turn_them_on(painter: Fleet) -> None:
    answer = post(painter.serve(), **inline(files("sd")))
    assert answer.status_code == 400
    assert "You must set --enable-prompt-embeds" in answer.json()["error"]["message"]
