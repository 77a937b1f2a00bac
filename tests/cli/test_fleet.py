"""`inlay nats`, `inlay worker` and `inlay frontend` as processes of their own."""

import base64
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from inlay.cli.status import table
from inlay.tensors import write
from tests.models import tiny
from tests.parts import Part, running, workers_of
from tests.preloaded import started
from tests.serving import Served, free_port, serving
from tests.transport.nats_server import NatsServer
from tests.worker.test_adapters import write_prompt

pytestmark = pytest.mark.slow
END_SECONDS = 90
READY_SECONDS = 180
RAW = {"content-type": "application/octet-stream"}


def refused(*words: object) -> tuple[int, str]:
    """Status and last line of standard error of a command that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    store = tmp_path_factory.mktemp("nats")
    with running("nats", "--port", port, "--store-dir", store, until="NATS at nats://") as part:
        yield f"nats://127.0.0.1:{port}"
        part.send(signal.SIGINT)
        assert part.wait() == 0


@contextmanager
def worker(nats: str, *words: object) -> Iterator[Part]:
    with running(
        "worker", tiny("llama"), "--engine", "echo", "--nats", nats, *words, until=" serves "
    ) as part:
        yield part


def ask(server: Served, **fields: object) -> dict[str, Any]:
    """An answer, once there is a worker."""
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True, **fields}
    request = urllib.request.Request(
        server.v1 + "/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=END_SECONDS) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(float(error.headers["Retry-After"]) / 4)


def test_a_fleet_answers_through_any_frontend_and_ends_as_told(nats: str) -> None:
    names = ("--nats", nats, "--namespace", "answers")
    with (
        worker(nats, "--namespace", "answers", "--served-model-name", "m") as first,
        serving(*names, command="frontend") as one,
        serving(*names, command="frontend") as other,
    ):
        answers = [ask(server)["usage"] for server in (one, other)]
        assert answers[0] == answers[1]
        assert answers[0]["completion_tokens"] == 4
        children = workers_of(first.process.pid)
        assert children
        first.send(signal.SIGTERM)
        assert first.wait() == 0
        _, alive = psutil.wait_procs(children, END_SECONDS)
        assert not alive
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(END_SECONDS) == 0


def test_a_worker_that_nobody_can_reach_dials_the_frontends_that_listen(nats: str) -> None:
    names = ("--nats", nats, "--namespace", "dials")
    here = ("--transport-host", "127.0.0.1")
    port = free_port()
    with (
        worker(nats, "--namespace", "dials", "--served-model-name", "m", "--transport-dial"),
        serving(*names, *here, command="frontend") as one,
        serving(*names, *here, command="frontend") as other,
        running("frontend", *names, "--port", port, until="HTTP at"),
    ):
        for server in (one, other):
            assert ask(server)["usage"]["completion_tokens"] == 4
        refused = httpx.get(f"http://127.0.0.1:{port}/health")
        assert refused.status_code == 503
        assert "--transport-host" in refused.text


def test_each_rank_of_a_worker_is_one_of_the_fleet(nats: str) -> None:
    names = ("--nats", nats, "--namespace", "ranks")
    admin = free_port()
    with (
        worker(
            nats, "--namespace", "ranks", "--served-model-name", "m", "--data-parallel-size", 2
        ) as part,
        serving(*names, "--admin-port", admin, command="frontend") as server,
    ):
        until = time.monotonic() + READY_SECONDS
        while len(engines := shown(server)) < 2:
            assert time.monotonic() < until, part.said
            time.sleep(0.1)
        assert ask(server)["usage"]["completion_tokens"] == 4
        said = "".join(part.said)
        assert all(f"rank {number} of 2" in said for number in range(2))
        # What follows the name says how often it has begun anew.
        assert all(engine.rpartition(".")[0] in said for engine in engines)
        # Ordered to drain, one rank takes the process with it, as SIGTERM does.
        order = f"http://127.0.0.1:{admin}/drain"
        answer = httpx.post(order, params={"worker": min(engines)}, timeout=END_SECONDS)
        assert answer.json() == {"status": "draining", "worker": min(engines)}
        assert part.wait() == 0


def shown(server: Served) -> set[str]:
    """The workers that a frontend has counters of."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=END_SECONDS) as response:
        text = response.read().decode()
    return set(re.findall(r'^vllm:num_requests_running\{engine="([^"]+)"', text, re.MULTILINE))


def test_a_reference_is_served_by_every_frontend_also_when_the_one_that_took_it_is_dead(
    nats: str,
) -> None:
    names = ("--nats", nats, "--namespace", "references")
    rows = np.random.default_rng(7).standard_normal((24, 48)).astype(np.float32)
    file = write(rows, "safetensors")
    with (
        worker(
            nats, "--namespace", "references", "--served-model-name", "m", "--enable-prompt-embeds"
        ),
        serving(*names, command="frontend") as one,
        serving(*names, command="frontend") as other,
    ):
        by_value = ask(one, prompt=None, prompt_embeds=base64.b64encode(file).decode())["choices"]
        told = httpx.post(
            f"{one.v1}/prompt_embeds", content=file, headers=RAW, timeout=END_SECONDS
        ).json()
        reference = {"prompt": None, "prompt_embeds": {"ref": told["id"]}}
        assert ask(other, **reference)["choices"] == by_value
        one.process.kill()
        one.process.wait(END_SECONDS)
        again = httpx.post(
            f"{other.v1}/prompt_embeds", content=file, headers=RAW, timeout=END_SECONDS
        ).json()
        assert again["id"] == told["id"]
        with serving(*names, command="frontend") as third:
            assert ask(third, **reference)["choices"] == by_value
            at = f"{third.v1}/prompt_embeds/{told['id']}"
            assert httpx.post(f"{at}/pin", json={}, timeout=END_SECONDS).json()["pinned"]
            assert httpx.get(at.replace(third.v1, other.v1), timeout=END_SECONDS).json()["pinned"]
            assert httpx.delete(at, timeout=END_SECONDS).status_code == 200
            answer = httpx.post(
                f"{other.v1}/completions", json={"model": "m", **reference}, timeout=END_SECONDS
            )
            assert answer.status_code == 404
            assert "not found" in answer.json()["error"]["message"]


def test_a_worker_says_whether_embeddings_are_taken_and_a_frontend_may_still_refuse_them(
    nats: str,
) -> None:
    names = ("--nats", nats, "--namespace", "embeds")
    rows = np.random.default_rng(7).standard_normal((24, 48)).astype(np.float32)
    sent = {"prompt_embeds": base64.b64encode(write(rows, "safetensors")).decode(), "max_tokens": 4}

    def answer(server: Served, model: str) -> tuple[int, str]:
        body = {"model": model, **sent}
        said = httpx.post(f"{server.v1}/completions", json=body, timeout=END_SECONDS)
        return said.status_code, said.text

    with (
        worker(nats, "--namespace", "embeds", "--served-model-name", "off"),
        serving(*names, command="frontend") as server,
    ):
        status, said = answer(server, "off")
        assert status == 400
        assert "You must set --enable-prompt-embeds on the workers" in said
        upload = httpx.post(
            f"{server.v1}/prompt_embeds", content=b"x", headers=RAW, timeout=END_SECONDS
        )
        assert upload.status_code == 400
        with (
            worker(
                nats, "--namespace", "embeds", "--served-model-name", "on", "--enable-prompt-embeds"
            ),
            serving(*names, "--no-enable-prompt-embeds", command="frontend") as strict,
        ):
            until = time.monotonic() + READY_SECONDS
            while (found := answer(server, "on"))[0] != 200:
                assert time.monotonic() < until, found
                time.sleep(0.1)
            status, said = answer(server, "off")
            assert status == 400
            assert (
                "takes no prompt_embeds: You must set --enable-prompt-embeds on its workers" in said
            )
            entries = httpx.get(f"{server.v1}/models", timeout=END_SECONDS).json()["data"]
            takes = {entry["id"]: "prompt_embeds" in entry["capabilities"] for entry in entries}
            assert takes == {"off": False, "on": True}
            status, said = answer(strict, "on")
            assert status == 400
            assert "You must set --enable-prompt-embeds on the server" in said


def test_an_engine_that_dies_is_started_again_and_the_worker_stays(nats: str) -> None:
    names = ("--nats", nats, "--namespace", "restarts")
    with (
        worker(nats, "--namespace", "restarts", "--served-model-name", "m") as part,
        serving(*names, command="frontend") as server,
    ):
        (engine,) = workers_of(part.process.pid)
        engine.kill()
        assert ask(server)["usage"]["completion_tokens"] == 4
        (again,) = workers_of(part.process.pid)
        assert again.pid != engine.pid


def test_a_secret_that_is_not_the_namespaces_is_refused_with_both_fingerprints(
    nats: str, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("one", "other")]
    for number, file in enumerate(files):
        file.write_text(bytes([number] * 32).hex())
        file.chmod(0o600)
    names = ("--namespace", "secret")
    with worker(nats, *names, "--secret-file", files[0]):
        for command in (("worker", tiny("llama")), ("frontend", "--port", 0)):
            given = (*command, "--nats", nats, *names, "--secret-file", files[1])
            status, line = refused(*given)
            assert status == 1
            assert "the namespace secret has the secret" in line
            status, line = refused(*given[:-2])
            assert status == 1
            assert "--secret-file" in line


def test_a_port_that_is_taken_is_said_before_a_server_is_started(nats: str) -> None:
    port = nats.rpartition(":")[2]
    status, line = refused("nats", "--port", port)
    said = f"cannot listen on 127.0.0.1:{port}: Address already in use (--port takes another)"
    assert (status, line) == (1, f"inlay nats: {said}")


def server_of(part: Part) -> psutil.Process:
    """The process of the NATS server itself."""
    (server,) = psutil.Process(part.process.pid).children()
    assert "nats-server" in server.name()
    return server


def test_a_server_that_other_machines_reach_lets_in_who_has_its_key_and_says_so_in_three_lines(
    tmp_path: Path,
) -> None:
    port = free_port()
    words = ("nats", "--host", "0.0.0.0", "--port", port, "--store-dir", tmp_path)
    url = f"nats://127.0.0.1:{port}"
    seed = tmp_path / "members.nk"
    with running(*words, until="Ctrl-C") as part:
        first, second, _ = part.said
        assert first.startswith("NATS at nats://")
        assert f"--nats-nkey-seed {seed}" in second
        assert seed.stat().st_mode & 0o777 == 0o600
        status, line = refused("frontend", "--port", 0, "--nats", url)
        assert status == 1
        assert "does not let us in" in line
        assert "Give it --nats-nkey-seed" in line
        key = seed.read_bytes()
        assert listed("--nats", url, "--nats-nkey-seed", seed) == "no worker in namespace default"
    # Started again it has the same key, and none where it is told so.
    with running(*words, until="Ctrl-C"):
        assert seed.read_bytes() == key
        assert listed("--nats", url, "--nats-nkey-seed", seed) == "no worker in namespace default"
    with running(*words, "--no-credentials", until="Ctrl-C") as part:
        assert "everyone who reaches it may connect" in part.said[1]
        assert listed("--nats", url) == "no worker in namespace default"


def listed(*words: object) -> str:
    """The last line that `inlay status` prints."""
    command = [sys.executable, "-m", "inlay.cli", "status", *map(str, words)]
    shown = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=END_SECONDS
    ).stdout
    return shown.splitlines()[-1]


def test_a_server_whose_command_is_killed_is_gone_with_it_and_leaves_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, store = tmp_path / "tmp", tmp_path / "store"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    words = ("nats", "--port", free_port(), "--store-dir", store)
    with running(*words, until="Ctrl-C") as part:
        server = server_of(part)
        part.process.kill()
        _, alive = psutil.wait_procs([server], END_SECONDS)
        assert not alive
    assert list(temporary.iterdir()) == []
    with running(*words, until="Ctrl-C") as part:
        part.send(signal.SIGINT)
        assert part.wait() == 0
    assert not (store / "nats.conf").exists()


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("in the way")
    status, line = refused("nats", "--port", free_port(), "--store-dir", tmp_path)
    assert status == 1
    assert "not a directory" in line


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_frontend_says_that_nats_does_not_answer_and_serves_on(
    tmp_path: Path, harm: signal.Signals
) -> None:
    with (
        NatsServer(tmp_path) as server,
        worker(server.url) as part,
        serving("--nats", server.url, command="frontend") as frontend,
    ):
        assert server._process is not None
        server._process.send_signal(harm)
        until = time.monotonic() + READY_SECONDS
        while (
            answer := httpx.get(frontend.url + "/ready", timeout=END_SECONDS)
        ).status_code == 200:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert "NATS has not answered for" in answer.json()["error"]["message"]
        health = httpx.get(frontend.url + "/health", timeout=END_SECONDS)
        assert health.status_code == 503
        assert "NATS" in health.json()["missing"]
        # Requests do not pass NATS.
        body = {"prompt": "x", "max_tokens": 1}
        completion = httpx.post(frontend.url + "/v1/completions", json=body, timeout=END_SECONDS)
        assert completion.status_code == 200
        part.process.kill()
        # A request that was on the worker as it died is answered with its death.
        while (
            "NATS has not answered for"
            not in httpx.post(frontend.url + "/v1/completions", json=body, timeout=END_SECONDS).text
        ):
            assert time.monotonic() < until


def test_words_after_two_dashes_go_to_the_server(tmp_path: Path) -> None:
    port = free_port()
    words = ("nats", "--port", port, "--store-dir", tmp_path, "--", "--user", "u", "--pass", "p")
    with running(*words, until="NATS at"):
        url = f"nats://127.0.0.1:{port}"
        status, line = refused("frontend", "--port", 0, "--nats", url)
        assert status == 1
        assert "does not let us in" in line
        known = url.replace("//", "//u:p@")
        given = ("frontend", "--port", free_port(), "--nats", known)
        with started(), running(*given, until="HTTP at") as part:
            assert "u:p" not in " ".join(psutil.Process(part.process.pid).cmdline())


def test_a_worker_that_loads_its_model_is_shown_as_loading_and_not_as_missing(nats: str) -> None:
    words = ("--nats", nats, "--namespace", "loading")
    command = [sys.executable, "-m", "inlay.cli", "status", *words, "--watch", "--interval", "0.1"]
    looks = subprocess.Popen([*command, "--output-json"], stdout=subprocess.PIPE, text=True)
    assert looks.stdout is not None
    try:
        json.loads(looks.stdout.readline())
        with running("worker", tiny("llama"), *words, until="loading"):
            states: list[str] = []
            until = time.monotonic() + READY_SECONDS
            while states[-1:] != ["ready"]:
                assert time.monotonic() < until
                seen = json.loads(looks.stdout.readline())
                assert seen["missing"] == {}
                now = [worker["state"] for worker in seen["workers"]]
                states += [state for state in now if state != "".join(states[-1:])]
                assert "loading" not in now or "  loading  " in table(seen)
            assert states == ["loading", "ready"]
    finally:
        looks.kill()
        looks.wait()
        looks.stdout.close()


def test_an_adapter_loaded_at_run_time_is_there_after_a_rolling_update(
    nats: str, tmp_path: Path
) -> None:
    names = ("--nats", nats, "--namespace", "adapters")
    options = ("--namespace", "adapters", "--served-model-name", "m")
    config = json.loads((tiny("llama") / "config.json").read_text())
    path = write_prompt(tmp_path / "a", hidden=config["hidden_size"])
    order = {"lora_name": "a", "lora_path": str(path)}
    chief = {"authorization": "Bearer chief"}
    with (
        worker(nats, *options) as old,
        serving(*names, "--admin-api-key", "chief", command="frontend") as server,
    ):
        answer = httpx.post(server.v1 + "/load_lora_adapter", json=order, headers=chief)
        assert answer.status_code == 200, answer.text
        with worker(nats, *options) as new:
            old.send(signal.SIGTERM)
            assert old.wait() == 0
            assert any("loaded adapter 'a' from" in line for line in new.said)


def test_the_status_of_a_fleet_names_its_workers(nats: str) -> None:
    def status(*words: str) -> str:
        command = [
            sys.executable,
            "-m",
            "inlay.cli",
            "status",
            "--nats",
            nats,
            "--namespace",
            "status",
            *words,
        ]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=END_SECONDS
        ).stdout

    assert "no worker in namespace status" in status()
    assert refused("status", "--nats", "nats://127.0.0.1:1")[1].startswith(
        "inlay status: cannot reach NATS at"
    )
    with worker(nats, "--namespace", "status", "--served-model-name", "m") as part:
        heading, *lines = status().splitlines()
        (line,) = [line for line in lines if line.startswith("worker-")]
        said = dict(zip(heading.split()[1:], line.split()[1:], strict=False))
        assert (said["MODEL"], said["SHARE"], said["STATE"]) == ("m", "100%", "ready")
        seen = json.loads(status("--output-json"))
        assert [(one["model"], one["state"], one["engine"]) for one in seen["workers"]] == [
            ("m", "ready", "echo 1")
        ]
        assert seen["missing"] == {}
        assert part.process.poll() is None
