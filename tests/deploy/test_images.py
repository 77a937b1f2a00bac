"""The images, built here, run without rights."""

import json

import pytest

import inlay
from tests.deploy.containers import confined, image, podman
from tests.deploy.tools import run

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("target", ["frontend", "worker"])
def test_an_image_runs_as_nobody_in_particular_and_says_so(target: str) -> None:
    name = image(target)
    (found,) = json.loads(run(*podman(), "image", "inspect", name))
    assert found["Config"]["User"] == "10001:10001"
    assert found["Config"]["Entrypoint"] == ["tini", "--", "inlay"]
    assert found["Labels"]["org.opencontainers.image.version"] == inlay.__version__
    assert confined(name, "--version", network="none") == f"inlay {inlay.__version__}\n"


def test_frontends_carry_no_torch_and_no_compiler() -> None:
    script = "import importlib.util as u, shutil; print(u.find_spec('torch'), shutil.which('g++'))"
    words = (*podman(), "run", "--rm", "--network", "none", "--entrypoint", "python3")
    limits = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
    assert run(*words, *limits, image("frontend"), "-c", script) == "None None\n"


def test_a_worker_answers_with_kernels_that_were_built_before() -> None:
    said = confined(image("worker"), "demo", "--no-keep-serving", "--port", 0)
    assert "cloth" in said
    script = (
        "import shutil; from inlay.engine.torch.native.build import load; "
        "print(shutil.which('g++'), all(load(n) for n in ('kernels', 'products', 'encoder')))"
    )
    words = (*podman(), "run", "--rm", "--network", "none", "--entrypoint", "python3")
    limits = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
    assert run(*words, *limits, image("worker"), "-c", script) == "None True\n"
