"""The Compose file as podman-compose reads it: every profile, and every word inlay is given."""

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from inlay.cli.commands import commands, known_variables
from inlay.cli.reading import parse, read
from tests.deploy.containers import environment
from tests.deploy.tools import ROOT

pytestmark = pytest.mark.deploy

COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
PROFILES = {
    "watch": {"prometheus", "grafana"},
    "trace": {"jaeger"},
    "gpu": {"worker-gpu"},
    "vllm": {"worker-vllm"},
    "encode": {"worker-encode"},
    "draw": {"worker-writer", "worker-painter"},
}
ALWAYS = {"access", "nats", "frontend", "worker-a", "worker-b"}


def services(*profiles: str) -> dict[str, Any]:
    """The services with these profiles on, their variables replaced."""
    words = [f"--profile={name}" for name in profiles]
    done = subprocess.run(
        [sys.executable, "-m", "podman_compose", "--file", str(COMPOSE), *words, "config"],
        env={name: text for name, text in environment().items() if not name.startswith("INLAY_")},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = yaml.safe_load(done.stdout)["services"]
    wanted = {None, *profiles}
    return {
        name: service
        for name, service in found.items()
        if wanted & set(service.get("profiles", [None]))
    }


@pytest.fixture(scope="module")
def all_services() -> dict[str, Any]:
    return services(*PROFILES)


def test_every_profile_adds_what_the_documentation_says(all_services: dict[str, Any]) -> None:
    named = {name: set(found.get("profiles", [])) for name, found in all_services.items()}
    for profile, added in PROFILES.items():
        assert {name for name, of in named.items() if profile in of} == added
        assert f"| `--profile {profile}` |" in (ROOT / "docs" / "deploy" / "README.md").read_text()
    assert {name for name, of in named.items() if not of} == ALWAYS


def test_inlay_takes_every_word_and_variable(all_services: dict[str, Any]) -> None:
    for name, service in all_services.items():
        given = service.get("environment", {})
        if "entrypoint" in service or not service["image"].startswith("inlay"):
            assert not any(key.startswith("INLAY_") for key in given), name
            continue
        word, *words = service["command"]
        command = next(one for one in commands() if one.name == word)
        environ = {key: str(value) for key, value in given.items() if value is not None}
        read(command, parse(command, words), environ, known_variables())


def test_every_service_is_without_rights(all_services: dict[str, Any]) -> None:
    for name, service in all_services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        # What is open is open to this machine alone.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_what_is_built_and_mounted_is_there(all_services: dict[str, Any]) -> None:
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    for service in all_services.values():
        if "build" in service:
            assert service["build"]["target"] in stages
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith(".") and source != "./models":
                assert (COMPOSE.parent / source).exists(), volume


def test_workers_with_a_gpu_have_an_image_that_can_use_it(all_services: dict[str, Any]) -> None:
    targets = {}
    for name in ("worker-gpu", "worker-vllm"):
        (device,) = all_services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        targets[name] = all_services[name]["build"]["target"]
    assert targets == {"worker-gpu": "cuda", "worker-vllm": "vllm"}
