"""`inlay serve FILE.gguf`: served as a directory is, or refused in one line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inlay.base.errors import InvalidRequestError
from inlay.cli.model_directory import check_model
from inlay.client import PromptEmbedder
from inlay.engine.settings import EngineSettings
from tests.gguf_models import gguf_of
from tests.models import tiny
from tests.serving import Served, serving


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_of(tiny("llama2"), tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf", "Q8_0")


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Served]:
    with serving(file.parent, "--enable-prompt-embeds", "--device", "cpu") as server:
        yield server


def test_text_ids_and_rows_of_a_file_have_one_answer(server: Served, file: Path) -> None:
    (entry,) = httpx.get(f"{server.v1}/models").json()["data"]
    assert entry["weights_form"].startswith("GGUF (Q8_0, F32), ")
    assert entry["self_check"]["result"] == "passed"
    embedder = PromptEmbedder.from_pretrained(file)
    text = "the harbour town counts its lanterns"
    rows = embedder.embed(text)
    assert entry["embedding_table_id"] == rows.table_id
    prompts: list[dict[str, Any]] = [
        {"prompt": text},
        {"prompt": list(embedder.renderer.encode(text))},
        {"prompt_embeds": rows.source()["data"]},
    ]
    asked = {"model": entry["id"], "max_tokens": 8, "temperature": 0, "logprobs": 4}
    answers = [
        httpx.post(f"{server.v1}/completions", json=prompt | asked, timeout=60).json()["choices"]
        for prompt in prompts
    ]
    assert answers[0] == answers[1] == answers[2]


def refused(model: Path, **settings: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        check_model(EngineSettings.of(model=str(model), **settings))
    return caught.value.message


def test_other_engines_and_tasks_are_refused_by_name(file: Path) -> None:
    check_model(EngineSettings.of(model=str(file)))
    assert "the vllm engine does not serve GGUF files; --engine torch does" in refused(
        file, engine="vllm"
    )
    assert "served with --task generate, not embed" in refused(file, task="embed")


def test_a_file_that_is_cut_short_says_how_many_bytes_are_missing(
    file: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-1000])
    assert "; 1000 are missing" in refused(cut)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "model.onnx"
    other.write_bytes(b"onnx")
    assert "MODEL is the directory it is in" in refused(other)
    assert "or a GGUF file" in refused(other)


def test_the_model_is_called_after_its_file(file: Path) -> None:
    assert EngineSettings.of(model=str(file)).model.names == ["tiny-Q8_0"]
