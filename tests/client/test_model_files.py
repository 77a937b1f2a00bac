"""A name on the hub stands for the files in the hub's cache."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.gguf_models import gguf_of
from tests.models import tiny

_EMBED = "import sys; from inlay.client import PromptEmbedder; print(PromptEmbedder.from_pretrained(sys.argv[1]).embed('a').num_tokens)"


def embed(name: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _EMBED, name],
        env={**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_model_in_the_hubs_cache_is_used_without_a_network(tmp_path: Path) -> None:
    revision = "0" * 40
    repository = tmp_path / "models--owner--model"
    shutil.copytree(tiny("llama"), repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    done = embed("owner/model", tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_a_gguf_file_in_the_hubs_cache_is_named_by_its_end(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    gguf_of(tiny("llama2"), snapshot / "model-q8_0.gguf", "Q8_0")
    gguf_of(tiny("llama2"), snapshot / "model-f16.gguf", "F16")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    done = embed("owner/model:Q8_0", tmp_path)
    assert done.returncode == 0, done.stderr
    refused = embed("owner/model:Q4_K_M", tmp_path)
    assert "has 0 GGUF files whose names end in Q4_K_M; expected one" in refused.stderr


def test_an_index_left_over_beside_the_whole_file_asks_the_hub_for_nothing(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--model" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny("llama"), snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    weight_map = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    done = embed("owner/model", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_model_the_hub_does_not_give_is_refused_by_name(tmp_path: Path) -> None:
    done = embed("owner/other", tmp_path)
    assert done.returncode != 0
    assert (
        "inlay.base.errors.InvalidRequestError: model 'owner/other': not a directory here"
        in done.stderr
    )
