"""The images, built here, run without rights."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

import inlay
from inlay.base.build import build_id
from tests.commands import run
from tests.deploy.containers import CONFINED, LIMITS, confined, image, logs, podman
from tests.deploy.tools import ROOT

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("target", ["frontend", "worker"])
def test_an_image_runs_as_nobody_in_particular_and_says_so(target: str) -> None:
    name = image(target)
    (found,) = json.loads(run(*podman(), "image", "inspect", name))
    assert found["Config"]["User"] == "10001:10001"
    assert found["Config"]["Entrypoint"] == ["tini", "--", "inlay"]
    assert found["Labels"]["org.opencontainers.image.version"] == inlay.__version__
    assert (
        confined(name, "--version", network="none")
        == f"inlay {inlay.__version__} (build {build_id()})\n"
    )


@pytest.mark.parametrize("port", [8000, 7400, 4222])
def test_a_container_is_healthy_by_an_open_port_of_any_server(port: int) -> None:
    (found,) = json.loads(run(*podman(), "image", "inspect", image("frontend")))
    kind, *check = found["Healthcheck"]["Test"]
    assert kind == "CMD"
    listener = f"import socket; s = socket.create_server(('127.0.0.1', {port})); "
    ask = f"import subprocess as p; ask = lambda: p.run({check!r}).returncode; "
    script = ask + "closed = ask(); " + listener + "print(closed, ask())"
    words = (*podman(), "run", "--rm", "--network", "none", "--entrypoint", "python3")
    assert run(*words, *LIMITS, image("frontend"), "-c", script) == "1 0\n"


def test_frontends_carry_no_torch_and_no_compiler() -> None:
    script = "import importlib.util as u, shutil; print(u.find_spec('torch'), shutil.which('g++'))"
    words = (*podman(), "run", "--rm", "--network", "none", "--entrypoint", "python3")
    assert run(*words, *LIMITS, image("frontend"), "-c", script) == "None None\n"


def test_a_worker_answers_with_kernels_that_were_built_before() -> None:
    said = confined(image("worker"), "demo", "--no-keep-serving", "--port", 0)
    assert "cloth" in said
    script = (
        "import shutil; from inlay.engine.torch.native.build import load; "
        "print(shutil.which('g++'), all(load(n) for n in ('kernels', 'products', 'encoder')))"
    )
    words = (*podman(), "run", "--rm", "--network", "none", "--entrypoint", "python3")
    assert run(*words, *LIMITS, image("worker"), "-c", script) == "None True\n"


def test_the_image_for_gpus_refuses_a_torch_without_cuda() -> None:
    """An index of packages that has CPU wheels alone has them here as well."""
    if torch.version.cuda is None:
        with pytest.raises(AssertionError, match="has no CUDA"):
            image("cuda")
    else:
        said = confined(image("cuda"), "--version", network="none")
        assert said == f"inlay {inlay.__version__} (build {build_id()})\n"


def test_the_image_with_vllm_serves_text_and_embeddings_alike(tmp_path: Path) -> None:
    """On a base made here, with vLLM for CPUs lent from where `make test-engines` put it."""
    found = sorted(ROOT.glob(".venv-vllm-*/lib/python3.11/site-packages"))
    if not found:
        pytest.skip("there is no vLLM for the base's Python: make test-engines installs it")
    lent = tmp_path / "vllm.pth"
    lent.write_text("/opt/vllm\n")
    mounts = {lent: "/usr/lib/python3/dist-packages/vllm.pth", found[-1]: "/opt/vllm"}
    numa = Path("/usr/lib/x86_64-linux-gnu/libnuma.so.1")
    if numa.exists():
        # vLLM's own image has it.
        mounts[numa] = str(numa)
    volumes = [f"--volume={path.resolve()}:{place}:ro" for path, place in mounts.items()]
    name = "inlay-test-vllm"
    remove = (*podman(), "rm", "--force", "--ignore", "--time", "0", name)
    run(*remove)
    run(
        *(*podman(), "run", "--detach", "--name", name, *LIMITS, *CONFINED, "--network", "none"),
        *(
            "--tmpfs",
            "/tmp",
            "--shm-size",
            "512m",
            "--env",
            "HOME=/tmp",
            *volumes,
            image("vllm"),
            "serve",
        ),
        *("/opt/inlay/demo", "--served-model-name", "m", "--enable-prompt-embeds"),
        *("--dtype", "float32", "--enforce-eager", "--block-size", 32, "--num-threads", 1),
        *("--max-model-len", 512, "--kv-cache-memory-bytes", 8 << 20),
    )
    try:
        done = subprocess.run(
            [*podman(), "exec", "--interactive", name, "python3", "-"],
            input=_ASK,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr + logs(name)
        texts = json.loads(done.stdout)
        assert texts[0] == texts[1] != ""
    finally:
        run(*remove)


_ASK = """
import json, time, urllib.error, urllib.request as u
from inlay.client import PromptEmbedder

def asked(path, **body):
    head = {"content-type": "application/json"}
    request = u.Request("http://127.0.0.1:8000" + path, json.dumps(body).encode(), head)
    return json.load(u.urlopen(request, timeout=300))["choices"][0]["text"]

while True:
    try:
        u.urlopen("http://127.0.0.1:8000/ready", timeout=30)
        break
    except urllib.error.URLError:
        time.sleep(0.5)
words = "What tool does Gola use?"
given = PromptEmbedder.from_pretrained("/opt/inlay/demo").completion_args(words)
more = given.pop("extra_body")
base = {"model": "m", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
print(json.dumps([asked("/v1/completions", **base, prompt=words),
                  asked("/v1/completions", **base, **given, **more)]))
"""
