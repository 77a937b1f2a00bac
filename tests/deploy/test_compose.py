"""The Compose file, run by podman-compose: requests, a killed worker, a stop within the grace."""

import json
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

import inlay
from inlay.client import PromptEmbedder
from tests.commands import run
from tests.deploy.containers import environment, image, logs, podman
from tests.deploy.tools import ROOT
from tests.serving import free_port

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.timeout(1500)]

COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
MODEL = Path(inlay.__file__).parent / "demo" / "model"
RUN = ("access", "nats", "frontend", "worker-a", "worker-b")
QUESTION: Any = [{"role": "user", "content": "What tool does Gola use?"}]


@dataclass(frozen=True)
class Up:
    """The containers of the Compose file.

    Attributes:
        url: of the frontend.
        key: of a client.
        compose: words that run podman-compose on them.
    """

    url: str
    key: str
    compose: tuple[str, ...]

    @property
    def client(self) -> OpenAI:
        """A client that never asks twice."""
        return OpenAI(base_url=self.url + "/v1", api_key=self.key, max_retries=0, timeout=300)

    def container(self, service: str) -> str:
        """Its container's name."""
        return f"inlay-test_{service}_1"

    def values(self, name: str) -> list[float]:
        """The values of a metric's series whose line begins so."""
        lines = httpx.get(self.url + "/metrics", timeout=30).text.splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith(name)]

    def metric(self, name: str) -> float:
        """Their sum."""
        return sum(self.values(name))


def adapted(directory: Path, frontend: int, nats: int) -> Path:
    """The same file for this machine: built images, the host's network, its limits."""
    # Through JSON: what anchors share becomes each service's own.
    found = json.loads(json.dumps(yaml.safe_load(COMPOSE.read_text())))
    images = {"access": "frontend", "nats": "frontend", "frontend": "frontend"}
    services = {name: found["services"][name] for name in RUN}
    for name, service in services.items():
        for key in ("networks", "ports", "build", "healthcheck"):
            service.pop(key, None)
        service["image"] = image(images.get(name, "worker"))
        service["network_mode"] = "host"
        service["ulimits"] = {"nofile": 4096, "nproc": 4096}
        service["volumes"] = [
            volume.replace("${MODELS:-./models}", str(directory)).replace(
                "./", f"{COMPOSE.parent}/"
            )
            for volume in service.get("volumes", [])
        ]
        for condition in service.get("depends_on", {}).values():
            # Health is asked for by systemd's timers, which are not everywhere.
            if condition["condition"] == "service_healthy":
                condition["condition"] = "service_started"
        given = service.setdefault("environment", {})
        if "INLAY_NATS" in given:
            given["INLAY_NATS"] = f"nats://127.0.0.1:{nats}"
        for key in ("INLAY_MODEL", "INLAY_SERVED_MODEL_NAME"):
            if key in given:
                given[key] = given[key].partition(":-")[2].rstrip("}")
        if "INLAY_TRANSPORT_PORT" in given:
            # Two workers of one network cannot have one port. In float32 a text that goes on
            # elsewhere is the same to the token.
            given |= {"INLAY_TRANSPORT_PORT": "0", "INLAY_TRANSPORT_HOST": "127.0.0.1"}
            given["INLAY_DTYPE"] = "float32"
        if name in ("nats", "frontend"):
            given["INLAY_PORT"] = str(nats if name == "nats" else frontend)
    file = directory / "compose.yaml"
    volumes: dict[str, Any] = {name: {} for name in ("access", "nats", "cache", "cache-frontend")}
    file.write_text(yaml.safe_dump({"services": services, "volumes": volumes}))
    return file


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory, port = tmp_path_factory.mktemp("compose"), free_port()
    wrapper = directory / "podman"
    wrapper.write_text("#!/bin/sh\nexec " + " ".join(podman()) + ' "$@"\n')
    wrapper.chmod(0o755)
    file = adapted(directory, port, free_port())
    compose = (
        *("env", f"PYTHONPATH={environment()['PYTHONPATH']}", sys.executable),
        *("-m", "podman_compose", "--podman-path", str(wrapper), "--in-pod", "false"),
        *("--project-name", "inlay-test", "--file", str(file)),
    )
    try:
        run(*compose, "up", "--detach", within=300)
        url = f"http://127.0.0.1:{port}"
        _wait(url)
        text = run(*podman(), "exec", "inlay-test_frontend_1", "cat", "/access/keys.yaml")
        yield Up(url, yaml.safe_load(text)[0]["key"], compose)
    finally:
        subprocess.run(
            [*compose, "down", "--volumes"], capture_output=True, check=False, timeout=300
        )


def _wait(url: str) -> None:
    deadline = time.monotonic() + 240
    while not _two_workers(url):
        assert time.monotonic() < deadline, _logs()
        time.sleep(0.5)


def _two_workers(url: str) -> bool:
    try:
        lines = httpx.get(url + "/metrics", timeout=10).text.splitlines()
    except httpx.TransportError:
        return False
    return sum(line.startswith("inlay:worker_well{") for line in lines) == 2


def _logs() -> str:
    return "\n".join(logs(f"inlay-test_{name}_1") for name in RUN)


def test_text_and_embeddings_get_the_same_answer(up: Up) -> None:
    chat: Any = up.client.chat.completions.create(
        model="demo", temperature=0, max_tokens=32, messages=QUESTION
    )
    rows = PromptEmbedder.from_pretrained(str(MODEL)).embed_messages(QUESTION)
    completion = up.client.completions.create(
        model="demo", temperature=0, max_tokens=32, **rows.completion_args()
    )
    assert completion.choices[0].text == chat.choices[0].message.content != ""


def test_without_a_key_nothing_is_answered(up: Up) -> None:
    assert httpx.get(up.url + "/v1/models", timeout=30).status_code == 401


def test_every_container_is_without_rights(up: Up) -> None:
    names = [up.container(name) for name in RUN if name != "access"]
    for found in json.loads(run(*podman(), "container", "inspect", *names)):
        assert found["Config"]["User"] == "10001:10001"
        assert found["HostConfig"]["ReadonlyRootfs"] is True
        assert found["EffectiveCaps"] in (None, [])


def test_a_killed_worker_s_streams_go_on_with_the_same_text(up: Up) -> None:
    letters = "abcdefgh"
    with ThreadPoolExecutor(len(letters)) as pool:
        texts = dict(zip(letters, pool.map(lambda one: _text(up, one), letters), strict=True))
        before = up.metric('inlay:router_decisions_total{attempt="further"')
        running = {letter: pool.submit(_text, up, letter) for letter in letters}
        # Some at each worker, so that some are at the one that is killed.
        deadline = time.monotonic() + 60
        while min(up.values("vllm:num_requests_running{")) < 1:
            assert time.monotonic() < deadline
        run(*podman(), "kill", "--signal", "KILL", up.container("worker-a"))
        assert {letter: one.result() for letter, one in running.items()} == texts
    assert up.metric('inlay:router_decisions_total{attempt="further"') > before


def test_a_backup_brings_stored_prompts_back_where_nats_has_lost_its_volume(up: Up) -> None:
    """With the secret of the namespace, which NATS alone has."""
    rows = PromptEmbedder.from_pretrained(str(MODEL)).embed_messages(QUESTION)
    data = rows.completion_args()["extra_body"]["prompt_embeds"]

    def text(given: object) -> str:
        made = up.client.completions.create(
            model="demo", prompt="", temperature=0, max_tokens=16,
            extra_body={"prompt_embeds": given},
        )  # fmt: skip
        return made.choices[0].text

    def asked(method: str, path: str, **how: Any) -> httpx.Response:
        own = {"authorization": f"Bearer {up.key}", "content-type": "application/octet-stream"}
        return httpx.request(method, up.url + path, headers=own, timeout=120, **how)

    before = text(data)
    kept = asked("POST", "/v1/prompt_embeds", content=b64decode(data)).raise_for_status().json()
    script = (ROOT / "deploy" / "stored_prompts.py").read_text()
    words = [*podman(), "exec", "-i", up.container("frontend"), "python3", "-c", script]
    saved = subprocess.run([*words, "backup"], capture_output=True, check=True, timeout=120).stdout
    run(*up.compose, "down", within=300)
    run(*podman(), "volume", "rm", "inlay-test_nats")
    run(*up.compose, "up", "--detach", within=300)
    _wait(up.url)
    path = f"/v1/prompt_embeds/{kept['id']}"
    assert asked("GET", path).status_code == 404
    words.append("restore")
    done = subprocess.run(words, input=saved, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert b"start all frontends and workers again" in done.stderr
    run(*up.compose, "stop", "frontend", "worker-a", "worker-b", within=300)
    run(*up.compose, "start", "frontend", "worker-a", "worker-b", within=300)
    _wait(up.url)
    assert asked("GET", path).status_code == 200
    assert text({"ref": kept["id"]}) == before


def test_all_end_by_themselves_within_their_grace(up: Up) -> None:
    run(*up.compose, "stop", within=300)
    names = [up.container(name) for name in ("nats", "frontend", "worker-b")]
    for found in json.loads(run(*podman(), "container", "inspect", *names)):
        assert found["State"]["Status"] in ("exited", "stopped")
        # 137 is what has to be killed.
        assert found["State"]["ExitCode"] in (0, 143), found["Name"]


def _text(up: Up, letter: str) -> str:
    stream = up.client.completions.create(
        model="demo",
        prompt=f"{letter}. Once the harbour town counted its lanterns.",
        max_tokens=1500,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(piece.choices[0].text for piece in stream if piece.choices)
