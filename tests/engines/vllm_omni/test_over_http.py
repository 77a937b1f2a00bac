"""`inlay serve --engine vllm-omni`, in its own environment, asked by the `openai` client."""

import base64
import io
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import torch
import yaml
from PIL import Image

from tests.engine.test_diffusers import PROMPT, Pixels, alone, model, near, params, whole
from tests.engines.vllm_omni.serving import START_SECONDS
from tests.serving import Served, serving

ROOT = Path(__file__).parents[3]
ENGINE = {
    "engine": "vllm-omni",
    "engine_python": sys.executable,
    "dtype": "float32",
    "max_num_seqs": 2,
    "engine_arguments": ["--step-execution"],
}
FIELDS = {"num_inference_steps": 3, "guidance_scale": 3.0, "seed": 7}


def serve(path: Path, *words: object) -> Any:
    # The platform for CPUs is found below the root.
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    return serving(
        path, *words, "--enforce-eager", "--num-threads", 1, environment=environment,
        within=START_SECONDS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    words = ["--engine", "vllm-omni", "--engine-python", sys.executable, "--dtype", "float32"]
    with serve(
        model("flux"), *words, "--served-model-name", "m", "--enable-prompt-embeds"
    ) as found:
        yield found


def painted(served: Served, name: str, size: str = "32x32", **more: Any) -> list[Pixels]:
    # What is not ready yet is a 503.
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=180, timeout=120) as client:
        found = client.images.generate(
            model=name,
            prompt=PROMPT,
            size=size,
            extra_body=FIELDS | more,
        )
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(one.b64_json or ""))))
        for one in found.data or []
    ]


def expected(family: str = "flux", **more: Any) -> list[Pixels]:
    return alone(family, PROMPT, params(**more))


def processes(served: Served) -> list[psutil.Process]:
    """Processes of the worker, which vLLM-Omni gives a name of its own."""
    return psutil.Process(served.process.pid).children(recursive=True)


def test_images_are_those_of_the_pipeline(server: Served) -> None:
    assert near(painted(server, "m"), expected())
    assert near(painted(server, "m", size="48x32", seed=8), expected(width=48, seed=8))
    two = painted(server, "m", n=2)
    assert len(two) == 2
    assert near(two, expected(count=2))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"size": "33x32"}, "size"),
        ({"num_inference_steps": 201}, "num_inference_steps"),
        ({"n": 11}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 2000}, "prompt"),
        ({"stream": True, "partial_images": 1}, "partial_images"),
        ({"pooled_prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"negative_prompt": "x"}, "negative_prompt"),
    ],
)
def test_a_wrong_field_is_named(server: Served, fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "prompt": "x"} | FIELDS | fields
    answer = httpx.post(f"{server.v1}/images/generations", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def running(served: Served) -> float:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_r"))


def until_idle(served: Served) -> None:
    deadline = time.monotonic() + 60
    while running(served):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def leave(served: Served, name: str) -> None:
    """Ask for an image that takes long, and go."""
    body = {"model": name, "prompt": "x", "size": "256x256"} | FIELDS | {"num_inference_steps": 200}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.v1}/images/generations", json=body, timeout=1.0)


def test_a_client_that_leaves_ends_its_request(server: Served) -> None:
    leave(server, "m")
    assert near(painted(server, "m"), expected())
    until_idle(server)


def inline(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor.clone(), file)
    return base64.b64encode(file.getvalue()).decode()


def test_rows_are_taken_as_everywhere(server: Served) -> None:
    with torch.inference_mode():
        rows, pooled, _ = whole("flux").encode_prompt(PROMPT, device="cpu")
    given = {"prompt_embeds": inline(rows), "pooled_prompt_embeds": inline(pooled)}
    body = {"model": "m", "size": "32x32"} | FIELDS | given
    answer = httpx.post(f"{server.v1}/images/generations", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    file = base64.b64decode(answer.json()["data"][0]["b64_json"])
    assert near([np.asarray(Image.open(io.BytesIO(file)))], expected())


def test_a_process_that_is_killed_is_started_again(server: Served) -> None:
    found = processes(server)
    assert found
    for process in found:
        process.kill()
    psutil.wait_procs(found, timeout=20)
    assert not any(process.is_running() for process in found)
    assert near(painted(server, "m"), expected())
    assert {process.pid for process in processes(server)}.isdisjoint(p.pid for p in found)


def test_a_stage_of_a_graph_runs_on_it(tmp_path: Path) -> None:
    (tmp_path / "pipeline").symlink_to(model("qwen"))
    graph = {
        "name": "drawer",
        "stages": {"painter": {"kind": "image", "model": "./pipeline"}},
        "edges": [],
        "inputs": {"prompt": "painter.prompt"},
        "outputs": {"image": "painter.image"},
    }
    (tmp_path / "graph.yaml").write_text(yaml.safe_dump(graph))
    (tmp_path / "deploy.yaml").write_text(yaml.safe_dump({"stages": {"painter": ENGINE}}))
    words = ("--deploy", tmp_path / "deploy.yaml", "--enable-prompt-embeds")
    with serve(tmp_path / "graph.yaml", *words) as served:
        found = painted(served, "drawer", negative_prompt="blurred")
        assert near(found, expected("qwen", negative="blurred"))
        # Between steps vLLM-Omni reads texts alone.
        with torch.inference_mode():
            rows = inline(whole("qwen").encode_prompt(PROMPT)[0][0])
        body = {"model": "drawer", "prompt_embeds": rows} | FIELDS
        answer = httpx.post(f"{served.v1}/images/generations", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "prompt_embeds"
        assert "it takes text alone" in answer.json()["error"]["message"]
        # Steps are shared, and a request ends between two of them.
        leave(served, "drawer")
        until_idle(served)
        with ThreadPoolExecutor() as pool:
            both = [*pool.map(lambda seed: painted(served, "drawer", seed=seed), (1, 2, 3))]
        for seed, one in zip((1, 2, 3), both, strict=True):
            assert near(one, expected("qwen", seed=seed))
