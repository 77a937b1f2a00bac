"""`inlay serve GRAPH.yaml`: a pipeline whose stages are processes of their own."""

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import yaml
from PIL import Image

from inlay_stages.params import Diffusion
from tests.cli.test_models_in_a_row import documented
from tests.engine.test_diffusers import Run, alone, model, near, text
from tests.engine.test_diffusers import serving as running
from tests.engine.test_diffusers_lora import loaded, lora, merged, trained, with_parts
from tests.equality.test_image_prompts import files, inline, upload
from tests.parts import workers_of
from tests.serving import PYTHON, Served, free_port, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

ADMIN_PORT = free_port()
GRAPH = documented("graph.yaml")
DEPLOY = documented("deploy.yaml")
SHOWN_STEPS = 80
FIELDS = {"num_inference_steps": 3, "guidance_scale": 3.0, "seed": 7, "negative_prompt": "blurred"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pipeline")
    (found / "my-pipeline").symlink_to(model("sd"))
    (found / "graph.yaml").write_text(yaml.safe_dump(GRAPH, sort_keys=False))
    # But for the GPU of the page.
    stages = {**DEPLOY["stages"], "denoiser": {"device": "cpu"}}
    (found / "deploy.yaml").write_text(yaml.safe_dump({"stages": stages}))
    return found


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(
        folder / "graph.yaml", "--deploy", folder / "deploy.yaml", "--dtype", "float32",
        "--enable-prompt-embeds", "--enable-sleep-mode", "--enable-lora",
        "--admin-port", ADMIN_PORT,
    ) as found:  # fmt: skip
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    # Stages that are not ready yet are 503s.
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=60) as made:
        yield made


def paint(client: openai.OpenAI, **more: object) -> list[np.ndarray]:
    extra = {"model": "painter"} | FIELDS | more
    found = client.images.generate(prompt="a red fox", extra_body=extra)
    files = [base64.b64decode(one.b64_json or "") for one in found.data or []]
    return [np.asarray(Image.open(io.BytesIO(file))) for file in files]


def painted(url: str, prompt: Mapping[str, object], **more: object) -> dict[str, Any]:
    """The answer to a prompt of whatever kind, without the negative one of `FIELDS`."""
    rest = {name: value for name, value in FIELDS.items() if name != "negative_prompt"}
    body = {"model": "painter", **rest, **prompt, **more}
    answer = httpx.post(f"{url}/images/generations", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@cache
def previews() -> list[bytes]:
    """Files of three previews and the image, by one process."""

    async def make() -> list[bytes]:
        asked = Diffusion(
            width=32, height=32, steps=SHOWN_STEPS, guidance=3.0, seed=7, negative="blurred",
            preview_every=SHOWN_STEPS // 4,
        )  # fmt: skip
        async with running("sd") as engine:
            made = await Run(engine, asked, text("a red fox")).done()
        return [bytes(one.data.view) for one in made]

    return asyncio.run(make())


def shown_on_the_way(served: Served, then: Callable[[], object] = lambda: None) -> list[bytes]:
    """Previews of a stream, `then` called after the first of them, and its image."""
    body = {
        "model": "painter",
        "prompt": "a red fox",
        "stream": True,
        "partial_images": 3,
        **FIELDS,
    }
    body["num_inference_steps"] = SHOWN_STEPS
    found: list[bytes] = []
    ended = ""
    with httpx.stream("POST", f"{served.v1}/images/generations", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert not ended
            assert "b64_json" in event, event
            if event["type"] == "image_generation.completed":
                ended = event["type"]
                assert event["usage"]["stages"].keys() == GRAPH["stages"].keys()
                assert event["usage"]["output_tokens"] == 256
            else:
                assert event["type"] == "image_generation.partial_image"
                assert event["partial_image_index"] == len(found)
                if not found:
                    then()
            found.append(base64.b64decode(event["b64_json"]))
    assert ended
    return found


def pixels(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)))


def in_order(found: Sequence[bytes], among: Sequence[bytes]) -> bool:
    """True if all are among others, to the byte, in their order."""
    rest = iter(among)
    return all(one in rest for one in found)


def test_partial_images_are_to_the_byte_those_of_one_process(
    served: Served, client: openai.OpenAI
) -> None:
    paint(client)  # all stages are ready
    expected = previews()
    assert len(set(expected)) == 4
    for _ in range(20):
        found = shown_on_the_way(served)
        assert found[-1] == expected[-1]
        assert in_order(found, expected)
        # A decoder that is busy passes over those that are not the newest.
        if len(found) == 4:
            break
    assert found == expected
    # Nothing else of the answer is another.
    whole = painted(
        served.v1, {"prompt": "a red fox", "negative_prompt": "blurred"},
        num_inference_steps=SHOWN_STEPS,
    )  # fmt: skip
    assert base64.b64decode(whole["data"][0]["b64_json"]) == expected[-1]


def test_stages_in_a_row_make_what_one_process_makes(client: openai.OpenAI) -> None:
    asked = Diffusion(
        width=32, height=32, steps=3, guidance=3.0, seed=7, count=2, negative="blurred"
    )
    assert near(paint(client, n=2), alone("sd", "a red fox", asked))


def test_usage_counts_the_prompt_once_and_has_the_share_of_each_stage(
    client: openai.OpenAI,
) -> None:
    found = client.images.generate(model="painter", prompt="a red fox", extra_body=FIELDS)
    usage = found.model_dump()["usage"]
    read, made = usage["input_tokens"], usage["output_tokens"]
    assert read == usage["input_tokens_details"]["text_tokens"] > 0
    assert made == 256
    assert usage["total_tokens"] == read + made
    shares = usage["stages"]
    assert list(shares) == ["reader", "denoiser", "decoder"]
    assert shares["reader"] == {"input_tokens": read, "output_tokens": 0}
    # Rows of the prompt and of the negative one, padded to one length.
    assert shares["denoiser"]["input_tokens"] > read
    assert [share["output_tokens"] for share in shares.values()] == [0, made, made]


def test_rows_of_a_prompt_go_straight_to_the_denoiser(
    served: Served, client: openai.OpenAI
) -> None:
    paint(client)  # all stages are ready
    text = painted(served.v1, {"prompt": "a red fox", "negative_prompt": "blurred"})
    given = inline(files("sd", "blurred"))
    found = painted(served.v1, given)
    assert found["data"] == text["data"]
    assert list(found["usage"]["stages"]) == ["denoiser", "decoder"]
    assert found["usage"]["input_tokens"] == text["usage"]["stages"]["denoiser"]["input_tokens"]
    stored = {name: upload(served.url, data) for name, data in files("sd", "blurred").items()}
    assert painted(served.v1, stored)["data"] == text["data"]
    # What is text yet is read by the encoder, and rows pass it as they are.
    negative = given.pop("negative_prompt_embeds")
    for rest in (
        given | {"negative_prompt": "blurred"},
        {"prompt": "a red fox", "negative_prompt_embeds": negative},
    ):
        found = painted(served.v1, rest)
        assert found["data"] == text["data"]
        assert list(found["usage"]["stages"]) == ["reader", "denoiser", "decoder"]
    # Without guidance there is no negative prompt to read.
    plain = painted(served.v1, {"prompt": "a red fox"}, guidance_scale=1.0)
    found = painted(served.v1, given, guidance_scale=1.0)
    assert found["data"] == plain["data"] != text["data"]
    assert list(found["usage"]["stages"]) == ["denoiser", "decoder"]


def test_clients_see_the_pipeline_and_not_its_stages(served: Served, client: openai.OpenAI) -> None:
    assert [found.id for found in client.models.list()] == ["painter"]
    answer = httpx.post(f"{served.v1}/images/generations", json={"model": "x", "prompt": "y"})
    assert answer.status_code == 404
    assert "served: `painter`" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stage", ["painter/reader", "painter/denoiser", "painter"])
def test_a_stage_sleeps_alone_and_wakes_with_the_same_image(
    served: Served, client: openai.OpenAI, stage: str
) -> None:
    before = paint(client)
    with httpx.Client(base_url=f"http://127.0.0.1:{ADMIN_PORT}", timeout=60) as admin:
        assert admin.post("/sleep", params={"model": stage, "level": "2"}).is_success
        body = {"model": "painter", "prompt": "a red fox", **FIELDS}
        try:
            answer = httpx.post(f"{served.v1}/images/generations", json=body, timeout=60)
            assert answer.status_code == 503, answer.text
            assert f"The model `{stage}` is asleep" in answer.json()["error"]["message"]
        finally:
            assert admin.post("/wake_up", params={"model": stage}).is_success
    assert near(paint(client), before)


def test_an_adapter_of_the_denoiser_is_named_as_a_model(
    served: Served, client: openai.OpenAI
) -> None:
    before = paint(client)
    asked = Diffusion(width=32, height=32, steps=3, guidance=3.0, seed=7, negative="blurred")
    order = {"lora_name": "tuned", "lora_path": str(lora("sd", 1))}
    with httpx.Client(base_url=f"http://127.0.0.1:{ADMIN_PORT}", timeout=60) as admin:
        refused = admin.post("/v1/load_lora_adapter", json=order | {"base_model_name": "painter"})
        assert refused.status_code == 400
        assert "adapters are of the denoiser" in refused.json()["error"]["message"]
        order |= {"base_model_name": "painter/denoiser"}
        assert admin.post("/v1/load_lora_adapter", json=order).is_success
        try:
            assert {found.id for found in client.models.list()} == {"painter", "tuned"}
            assert near(
                paint(client, model="tuned"), alone("sd", "a red fox", asked, merged("sd", 1))
            )
            assert near(paint(client), before)
        finally:
            assert admin.post("/v1/unload_lora_adapter", json={"lora_name": "tuned"}).is_success
    with pytest.raises(openai.NotFoundError):
        paint(client, model="tuned")


def test_a_file_of_text_encoder_and_denoiser_is_loaded_at_both_by_one_name(
    served: Served, client: openai.OpenAI
) -> None:
    before = paint(client)
    asked = Diffusion(width=32, height=32, steps=3, guidance=3.0, seed=7, negative="blurred")
    file = trained("sd", 1)
    pipeline = loaded("sd", file)
    # Each stage takes its own part of the file.
    half = with_parts("sd", {"text_encoder": pipeline.text_encoder})
    order = {"lora_name": "tuned", "lora_path": str(file)}
    with httpx.Client(base_url=f"http://127.0.0.1:{ADMIN_PORT}", timeout=60) as admin:
        for stage, wanted in (("painter/reader", half), ("painter/denoiser", pipeline)):
            answer = admin.post("/v1/load_lora_adapter", json=order | {"base_model_name": stage})
            assert answer.is_success, answer.text
            assert near(paint(client, model="tuned"), alone("sd", "a red fox", asked, wanted))
            assert near(paint(client), before)
        assert [found.id for found in client.models.list()].count("tuned") == 1
        assert admin.post("/v1/unload_lora_adapter", json={"lora_name": "tuned"}).is_success
        assert admin.get("/v1/loras").json()["data"] == []
    with pytest.raises(openai.NotFoundError):
        paint(client, model="tuned")


def test_a_stage_that_is_killed_is_a_503_until_it_is_back(
    served: Served, client: openai.OpenAI
) -> None:
    before = paint(client)
    workers = workers_of(served.process.pid)
    assert len(workers) == 4
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
    assert near(paint(client), before)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"edges": []}, "nothing feeds it; allowed: exactly one of"),
        ({"outputs": {"image": "denoiser.latents"}}, "outputs.image: denoiser.latents is Latents"),
    ],
)
def test_a_wrong_graph_is_one_line_before_anything_starts(
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(yaml.safe_dump(GRAPH | changed))
    ran = subprocess.run(
        [PYTHON, "-m", "inlay.cli", "serve", path],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode != 0
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "starting the engine" not in ran.stderr
