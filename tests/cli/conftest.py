"""Servers that commands ask: the fleet of `tests.live`, and one whose answers have no end."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import fleet, llama, url
from tests.models import tiny

__all__ = ["llama", "url"]


@pytest.fixture(scope="session")
def echo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that repeats the prompt, until it is told to stop."""
    model = tmp_path_factory.mktemp("echo") / "model"
    shutil.copytree(tiny("llama"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with fleet(model, engine="echo", max_model_len=5_000_000) as running:
        yield running.serve(enable_prompt_embeds=True)


@pytest.fixture(scope="session")
def endless_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose answers take half a minute, unless they are stopped."""
    model = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(tiny("llama"), model)
    config = json.loads((model / "config.json").read_text())
    more = {"eos_token_id": None, "max_position_embeddings": 32768}
    (model / "config.json").write_text(json.dumps(config | more))
    # It names a token that ends answers, which may be drawn.
    (model / "generation_config.json").unlink()
    with fleet(model) as running:
        yield running.serve()


@pytest.fixture(autouse=True)
def no_servers_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
