"""Images built from `deploy/docker` on a base made here, and containers run from them.

Nothing is pulled: the base is made from Debian's packages. Containers share the host's network, as
bridges need rights that a test has not everywhere.
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.commands import run
from tests.deploy.tools import ROOT, tool

BASE = "localhost/inlay-test-base:1"
_DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
_PACKAGES = "python3,python3-venv,ca-certificates,tini"
LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
"""Not above the host's own, which a test may not raise."""
CONFINED = ("--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges")


@cache
def podman() -> tuple[str, ...]:
    """The words that run podman here; skips where no container can run."""
    program = tool("podman")
    runc = shutil.which("runc")
    _base(program)
    # crun refuses machines that have both versions of cgroups.
    command = (program,) if runc is None else (program, "--runtime", runc)
    tried = (*command, "run", "--rm", *LIMITS, "--network", "host", *CONFINED, BASE, "true")
    done = subprocess.run(tried, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"containers cannot run here: {done.stderr.strip().splitlines()[-1:]}")
    return command


def _exists(program: str, name: str) -> bool:
    found = subprocess.run([program, "image", "exists", name], check=False, timeout=120)
    return found.returncode == 0


def _base(program: str) -> None:
    if _exists(program, BASE):
        return
    archive = ROOT / "build" / "deploy-tools" / "base.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    maker = tool("mmdebstrap")
    words = (maker, "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(archive))
    for command in (words, (program, "import", "--quiet", str(archive), BASE)):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode != 0:
            pytest.skip(f"no base image can be made: {done.stderr.strip().splitlines()[-1:]}")
    archive.unlink()


@cache
def image(target: str) -> str:
    """The image of a stage of the Dockerfile, built from this tree.

    With KEEP_IMAGES in the environment one that is there already is taken, for those who write
    tests.
    """
    command = podman()
    name = f"localhost/inlay-test-{target}:1"
    if "KEEP_IMAGES" in os.environ and _exists(command[0], name):
        return name
    try:
        run(
            *(tool("buildah"), "bud", "--quiet", "--isolation", "chroot", "--target", target),
            # Layers stay for the stages that others begin with; OCI's format has no health check.
            *("--format", "docker", "--layers", "--file", _DOCKERFILE),
            *("--build-arg", f"BASE={BASE}"),
            *("--build-arg", f"VLLM_BASE={BASE}", "--build-arg", "KERNELS=native"),
            *(*_pip(), "--tag", name, ROOT),
            within=900,
        )
    except AssertionError as error:
        if 'STEP "RUN apt-get' in str(error):
            pytest.skip("Debian's packages cannot be had")
        raise
    return name


def _pip() -> tuple[str, ...]:
    """This machine's configuration of pip, and what it names, for the build."""
    words = (sys.executable, "-m", "pip", "config", "list")
    lines = run(*words).splitlines()
    settings = dict(
        line.partition("=")[::2] for line in lines if line.startswith((":env:", "glob"))
    )
    values = {name.rpartition(".")[2]: value.strip("'") for name, value in settings.items()}
    file = ROOT / "build" / "deploy-tools" / "pip.conf"
    file.write_text("\n".join(("[global]", *(f"{key} = {values[key]}" for key in values), "")))
    # Wheels, certificates and constraints of one's own are there in the build too.
    places = {
        Path("/etc/ssl/certs"),
        *(Path(word) for word in values.get("find-links", "").split()),
        *(Path(word).parent for word in values.get("constraint", "").split()),
    }
    mounts = [f"--volume={place}:{place}:ro" for place in sorted(places) if place.is_dir()]
    return ("--secret", f"id=pip,src={file}", *mounts)


def confined(name: str, *words: object, network: str = "host") -> str:
    """The output of a container as operators run it: no rights, nothing to write to but /tmp."""
    more = ("--tmpfs", "/tmp", "--env", "HOME=/tmp", "--network", network)
    return run(*podman(), "run", "--rm", *LIMITS, *CONFINED, *more, name, *words, within=300)


def logs(name: str) -> str:
    """The end of what a container wrote."""
    words = (*podman(), "logs", "--tail", "40", name)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout + done.stderr


def environment() -> dict[str, str]:
    """For podman-compose: its own library, and nothing that changes what it runs."""
    folder = ROOT / "build" / "deploy-tools" / "compose"
    if not folder.exists():
        pytest.skip("podman-compose is not there: make test-deploy fetches it")
    return {**os.environ, "PYTHONPATH": str(folder)}
