"""`inlay doctor` finds what is there and what is not."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from inlay import demo
from tests.certificates import certificate
from tests.commands import run
from tests.engine.torch.vision_reference import directory_of
from tests.serving import free_port
from tests.transport.conftest import nats_server
from tests.transport.nats_server import NatsServer

pytestmark = pytest.mark.extensions("tools")

__all__ = ["nats_server"]


def ask(*words: object, status: int = 0) -> dict[str, dict[str, str]]:
    """Findings by name; where there are several of a name, the last."""
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", "doctor", "--output-json", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=230,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return {one["what"]: one for one in json.loads(done.stdout)}


def test_a_machine_that_serves_has_no_failure(nats_server: NatsServer, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "server")
    with socket.create_server(("127.0.0.1", 0)) as peer:
        found = ask(
            *("--nats", nats_server.url, "--reach", f"127.0.0.1:{peer.getsockname()[1]}"),
            *("--free-ports", free_port(), "--ssl-certfile", chain, "--ssl-keyfile", key),
        )
    assert {one["state"] for one in found.values()} <= {"ok", "note"}
    assert "inlay " in found["versions"]["said"]
    assert nats_server.url in found["NATS"]["said"]
    # Its certificate ends tomorrow.
    assert found["certificate"]["state"] == "note"


def test_what_is_out_of_reach_is_named_and_is_the_exit_status(tmp_path: Path) -> None:
    chain, _ = certificate(tmp_path, "server")
    _, other = certificate(tmp_path, "other")
    gone = free_port()
    with socket.create_server(("0.0.0.0", 0)) as taken:
        found = ask(
            *("--nats", f"nats://127.0.0.1:{gone}", "--nats-wait", 0),
            *("--reach", f"127.0.0.1:{gone}", "--free-ports", taken.getsockname()[1]),
            *("--ssl-certfile", chain, "--ssl-keyfile", other),
            status=1,
        )
    for name in ("NATS", "reach", "port", "certificate"):
        assert found[name]["state"] == "fails", name
    assert str(gone) in found["NATS"]["said"]


@pytest.mark.parametrize("peer", ["nowhere", "host:", ":80x", "host:http"])
def test_a_peer_without_a_port_is_refused(peer: str) -> None:
    assert "HOST:PORT" in ask("--reach", peer, status=1)["reach"]["said"]


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys\nfor name in ('torch', 'transformers', 'vllm'): sys.modules[name] = None\n"
        "from inlay.cli import main\nsys.exit(main(['doctor']))"
    )
    run(sys.executable, "-c", script)


def test_a_models_numbers_are_compared_with_its_own_code() -> None:
    found = ask(demo.model_dir(), "--dtype", "bfloat16")
    assert "passed against transformers" in found["model"]["said"]
    assert {one["state"] for one in map(found.get, ("model", "distance", "layers")) if one} == {
        "ok"
    }
    assert "0 left as they were" in found["modules"]["said"]


def test_a_tower_is_compared_with_float32() -> None:
    found = ask(directory_of("llava"), "--dtype", "bfloat16")
    assert "from float32  image" in found["part"]["said"]
    assert "passed against transformers" in found["model"]["said"]


@pytest.mark.thorough
def test_the_loss_of_rounding_is_measured_on_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over a lazy dog. " * 200)
    given = ("--device", "cpu", "--quantization", "int8", "--quality")
    said = ask(str(demo.model_dir()), *given, text)["quality"]["said"]
    assert said.startswith("int8, weights int8: perplexity ")
    assert "nats a token" in said
    text.write_text("too short")
    found = ask(str(demo.model_dir()), *given, text, status=1)
    assert found["quality"]["said"] == f"{text} has fewer than 256 tokens, the fewest"


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    assert "config.json" in ask(tmp_path, status=1)["model"]["said"]
