"""Every kind of pod that the chart makes, run as a container from the rendered YAML."""

import base64
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from inlay import demo
from inlay.cli.demo_draw import fields
from inlay.client import PromptEmbedder
from tests.certificates import certificate
from tests.deploy.chart import Object, render
from tests.deploy.containers import image
from tests.deploy.kubelet import Kubelet, running
from tests.deploy.tools import ROOT, helms

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.timeout(1500)]

MODEL = demo.pipeline_dir().parent / "model"
QUESTION = [{"role": "user", "content": "What tool does Gola use?"}]
NATS = "StatefulSet inlay-nats"
FRONTEND = "Deployment inlay-frontend"
WORKERS = tuple(f"Deployment inlay-worker-{name}" for name in ("one", "two", "writer", "painter"))
TEST = "Pod inlay-test"
POD_ADDRESS = {"fieldRef": {"fieldPath": "status.podIP"}}
IN_A_POD = "kubectl exec deploy/inlay-frontend -- "
COMMANDS = sorted(
    {
        line.strip().removeprefix(IN_A_POD)
        for page in (ROOT / "docs" / "deploy").glob("*.md")
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(IN_A_POD)
    }
)
"""What the pages have people type within a frontend's pod."""


@pytest.fixture(scope="module")
def kubelet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    found = helms()
    if not found:
        pytest.skip("no Helm is there: make test-deploy fetches it")
    if os.geteuid() != 0:
        pytest.skip("volumes have owners that only root can give")
    directory = tmp_path_factory.mktemp("pods")
    (front, _, tag), (worker, _, _) = (image(t).rpartition(":") for t in ("frontend", "worker"))
    volume = {"hostPath": {"path": str(MODEL.parent)}}

    def pool(name: str, path: str, **config: object) -> dict[str, Any]:
        return {
            "name": name,
            "image": {"repository": worker, "tag": tag},
            "model": {"path": path, "gigabytes": 0.1, "volume": volume},
            "config": config,
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        }

    # In float32 a text that goes on elsewhere is the same to the token.
    model = {
        "enable-prompt-embeds": True,
        "served-model-name": ["demo"],
        "dtype": "float32",
    }
    values = {
        "image": {"repository": front, "tag": tag},
        "frontend": {
            "preStopSeconds": 1,
            "tls": {"secretName": "pair"},
            "promptStoreKey": {"existingSecret": "store"},
        },
        "monitoring": {"adminKey": {"existingSecret": "admin"}},
        "workers": [
            pool("one", "model", **model),
            pool("two", "model", **model),
            pool("writer", "pipeline/graph.yaml", stage="writer"),
            pool("painter", "pipeline/graph.yaml", stage="painter"),
        ],
    }
    file = directory / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    pair = certificate(directory, "pair", hosts=["inlay-frontend"])
    own = (
        secret("pair", {"tls.crt": pair[0].read_bytes(), "tls.key": pair[1].read_bytes()}),
        secret("store", {"prompt-store-key": os.urandom(32).hex().encode()}),
    )
    objects = render(next(iter(found.values())), file) + own
    with running(objects, directory / "volumes") as kubelet:
        # The pods share a network: an address is all that tells an old one from a new one.
        host = {"name": "INLAY_HOST", "valueFrom": POD_ADDRESS}
        kubelet.pods[FRONTEND].container["env"].append(host)
        # All at once, as a cluster would: members wait for NATS.
        for owner in (FRONTEND, *WORKERS, NATS):
            kubelet.start(owner)
        for owner in (NATS, FRONTEND, *WORKERS):
            kubelet.wait(owner, "startupProbe")
        yield kubelet


def secret(name: str, data: dict[str, bytes]) -> Object:
    """A Secret that the values name."""
    texts = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {"kind": "Secret", "metadata": {"name": name}, "data": texts}


def ask(kubelet: Kubelet, path: str, body: object) -> Any:
    """What a request is answered with, asked for from NATS' pod by the name of the Service."""
    key = kubelet.secret("inlay-secrets")["client-key"].decode()
    authority = kubelet.secret("pair")["tls.crt"].decode()
    script = (
        "import ssl, sys, urllib.request as u; url, key, authority, body = sys.argv[1:]; "
        "head = {'authorization': 'Bearer ' + key, 'content-type': 'application/json'}; "
        "trust = ssl.create_default_context(cadata=authority); "
        "asked = u.Request(url, body.encode(), head); "
        "print(u.urlopen(asked, timeout=240, context=trust).read().decode())"
    )
    url = f"https://inlay-frontend:8000{path}"
    done = kubelet.execute(NATS, "python3", "-c", script, url, key, authority, json.dumps(body))
    assert done.returncode == 0, done.stderr + kubelet.log(FRONTEND)
    (choice,) = json.loads(done.stdout)["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_all_pods_are_made_by_these_values(kubelet: Kubelet) -> None:
    assert set(kubelet.pods) == {NATS, FRONTEND, *WORKERS, TEST}


@pytest.mark.parametrize("owner", [NATS, FRONTEND, *WORKERS])
def test_a_pod_is_ready_by_its_own_probes(kubelet: Kubelet, owner: str) -> None:
    for probe in ("readinessProbe", "livenessProbe"):
        if probe in kubelet.pods[owner].container:
            kubelet.wait(owner, probe)


def test_text_and_embeddings_get_the_same_answer(kubelet: Kubelet) -> None:
    base = {"model": "demo", "temperature": 0, "max_tokens": 32}
    text = ask(kubelet, "/v1/chat/completions", {**base, "messages": QUESTION})
    rows = PromptEmbedder.from_pretrained(str(MODEL)).embed_messages(QUESTION)
    given = {**rows.completion_args()}
    more = given.pop("extra_body")
    assert ask(kubelet, "/v1/completions", {**base, **given, **more}) == text != ""


def test_the_stages_of_a_pipeline_answer_together(kubelet: Kubelet) -> None:
    example = demo.drawn_examples().examples[0]
    messages = [{"role": "user", "content": example.question}]
    body = {"model": "inlay-demo", "temperature": 0, "messages": messages, **fields()}
    text, image = ask(kubelet, "/v1/chat/completions", body)
    assert text["text"] == example.answer
    assert image["image_url"]["url"].startswith("data:image/png;base64,")


def test_the_pod_of_helm_test_succeeds(kubelet: Kubelet) -> None:
    kubelet.start(TEST)
    state = kubelet.ended(TEST)
    assert state["ExitCode"] == 0, kubelet.log(TEST)


def test_workers_are_replaced_one_after_the_other_and_no_request_is_lost(
    kubelet: Kubelet,
) -> None:
    body = {"model": "demo", "prompt": "Once the harbour town", "temperature": 0}
    body |= {"max_tokens": 1500, "ignore_eos": True}
    expected = ask(kubelet, "/v1/completions", body)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, kubelet, "/v1/completions", body) for _ in range(4)]
        for owner in WORKERS[:2]:
            kubelet.stop(owner)
            assert kubelet.state(owner)["ExitCode"] == 0, kubelet.log(owner)
            kubelet.start(owner)
            kubelet.wait(owner, "startupProbe")
        assert {one.result() for one in asked} == {expected}


def test_a_frontend_is_replaced_and_no_request_is_lost(kubelet: Kubelet) -> None:
    body = {"model": "demo", "prompt": "Once the harbour town", "temperature": 0}
    body |= {"max_tokens": 1500, "ignore_eos": True}
    expected = ask(kubelet, "/v1/completions", body)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, kubelet, "/v1/completions", body) for _ in range(4)]
        replaced = pool.submit(kubelet.replace, FRONTEND)
        while not replaced.done():
            asked.append(pool.submit(ask, kubelet, "/v1/completions", body))
            # One at a time: they come while both are there, and while one leaves.
            asked[-1].result()
        replaced.result()
        assert {one.result() for one in asked} == {expected}


def test_stored_prompts_are_backed_up_from_within_a_frontend(kubelet: Kubelet) -> None:
    text = (ROOT / "deploy" / "stored_prompts.py").read_text()
    counted = kubelet.execute(FRONTEND, "sh", "-c", 'python3 -c "$0" backup | wc --bytes', text)
    assert "OBJ_inlay_default_prompts: 0 messages" in counted.stderr
    assert int(counted.stdout) > 1000


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_pages_run_within_a_frontend(kubelet: Kubelet, command: str) -> None:
    done = kubelet.execute(FRONTEND, *command.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"inlay doctor": "ok     NATS", "inlay status": "demo"}[command] in done.stdout


@pytest.mark.parametrize("owner", [*WORKERS, FRONTEND, NATS])
def test_a_pod_ends_by_itself_within_its_grace(kubelet: Kubelet, owner: str) -> None:
    kubelet.stop(owner)
    # 137 is what had to be killed.
    assert kubelet.state(owner)["ExitCode"] == 0, kubelet.log(owner)
