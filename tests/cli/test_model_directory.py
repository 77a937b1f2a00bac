"""A model directory that cannot be served is refused at the start, in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inlay.base.errors import InvalidRequestError
from inlay.cli.model_directory import check_model
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.checks import cuda_lack
from inlay.worker.lora_modules import check_adapters
from tests import adapters
from tests.commands import run
from tests.models import tiny

END_SECONDS = 120
NOWHERE = "nats://127.0.0.1:1"


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "no-tokenizer"
    return Path(
        shutil.copytree(tiny("llama"), directory, ignore=shutil.ignore_patterns("tokenizer*"))
    )


@pytest.mark.parametrize(
    "words", [("serve", "--port", "0"), ("worker", "--nats", NOWHERE)], ids=lambda words: words[0]
)
def test_a_model_without_a_tokenizer_is_refused_at_the_start(
    without: Path, words: tuple[str, ...]
) -> None:
    command, *rest = words
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", command, str(without), "--engine", "echo", *rest],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(f"inlay {command}: {without} has no tokenizer.json")


def refused(model: Path, command: str, *words: str) -> str:
    """The one line that a command says which never started a process for its model."""
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", command, str(model), *words],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    return line.removeprefix(f"inlay {command}: ")


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--port", "0"),
        ("serve", "--port", "0", "--task", "embed"),
        ("worker", "--nats", NOWHERE),
        ("serve", "--port", "0", "--engine", "vllm", "--engine-python", "/no/python"),
    ],
    ids=["serve", "embed", "worker", "vllm"],
)
def test_weights_that_are_cut_short_are_refused_before_anything_is_started(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    directory = Path(shutil.copytree(tiny("qwen3"), tmp_path / "damaged"))
    weights = directory / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1000)
    assert (
        refused(directory, *words)
        == f"{weights} is cut short: it has {size - 1000} of {size} bytes"
    )


def test_a_directory_without_weights_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    directory = shutil.copytree(
        tiny("qwen3"), tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")
    )
    said = f"{directory} has no weights: no *.safetensors file, and no other format is read"
    assert refused(Path(directory), "serve", "--port", "0") == said


def check(model: Path, **settings: object) -> str:
    """The error for a model before anything is loaded."""
    with pytest.raises(InvalidRequestError) as refused:
        check_model(EngineSettings.of(**{"model": str(model), "device": "cpu", **settings}))
    return refused.value.message


def config_with(directory: Path, **changes: object) -> Path:
    """A copy of a tiny model with another config.json."""
    copied = Path(shutil.copytree(tiny("llama"), directory))
    config = json.loads((copied / "config.json").read_text()) | changes
    (copied / "config.json").write_text(json.dumps(config))
    return copied


def test_a_model_that_will_do_passes_and_torch_is_not_imported_for_it() -> None:
    code = (
        "import sys; from inlay.cli.model_directory import check_model; "
        "from inlay.engine.settings import EngineSettings; "
        f"check_model(EngineSettings.of(model={str(tiny('llama'))!r})); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert run(sys.executable, "-c", code).strip() == "[]"


def test_a_type_of_model_that_is_not_served_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    said = check(config_with(tmp_path / "m", model_type="mamba"))
    assert "does not serve models of type 'mamba'" in said
    assert "it serves deepseek_v2" in said


def test_a_longer_context_than_the_models_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    directory = config_with(tmp_path / "m", max_position_embeddings=64)
    said = check(directory, max_model_len=65)
    assert said == "max_model_len is 65; the model's maximum context length is 64"
    check_model(EngineSettings.of(model=str(directory), device="cpu", max_model_len=64))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "half"}, "float16 does not run on a CPU"),
        (
            {"generation_config": "/no"},
            "--generation-config /no: there is no /no/generation_config",
        ),
    ],
)
def test_what_cannot_be_had_on_a_cpu_is_refused_before_anything_is_loaded(
    settings: dict[str, object], said: str
) -> None:
    assert said in check(tiny("llama"), **settings)


def test_a_share_of_a_gpu_without_effect_on_a_cpu_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_model(
        EngineSettings.of(model=str(tiny("llama")), device="cpu", gpu_memory_utilization=0.9)
    )
    assert "--gpu-memory-utilization has no effect: " in caplog.text


def test_a_gpu_that_is_not_there_is_said_before_anything_is_loaded() -> None:
    if cuda_lack() is None:
        pytest.skip("there is one here")
    assert check(tiny("llama"), device="cuda").startswith("--device cuda: this ")
    # Of another environment's torch nothing is known here.
    check_model(
        EngineSettings.of(model=str(tiny("llama")), device="cuda", engine_python=Path("/no/python"))
    )


def test_an_adapter_in_the_place_of_a_model_is_answered_with_the_command(tmp_path: Path) -> None:
    directory = adapters.make_lora(tmp_path / "sql", tiny("llama"))
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "owner/base"})
    )
    said = check(directory)
    assert f"inlay serve owner/base --enable-lora --lora-modules sql={directory}" in said


def test_a_file_of_weights_in_the_place_of_a_directory_is_named() -> None:
    assert "is a file; MODEL is the directory" in check(tiny("llama") / "model.safetensors")


def test_adapters_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    lora = adapters.make_lora(tmp_path / "lora", tiny("llama"), rank=8)
    other = adapters.make_lora(tmp_path / "other", tiny("mistral"))

    def wrong(path: Path, **settings: object) -> str:
        given = {"model": str(tiny("llama")), "lora_modules": [f"sql={path}"], **settings}
        with pytest.raises(InvalidRequestError) as refused:
            check_adapters(EngineSettings.of(**given))
        return refused.value.message

    assert f"adapter 'sql' ({lora}): LoRA adapters are off; --enable-lora" in wrong(lora)
    assert "it has rank 8; allowed: at most 4 (--max-lora-rank)" in wrong(
        lora, enable_lora=True, max_lora_rank=4
    )
    assert "made for another model" in wrong(other, enable_lora=True)
    assert "sql" in wrong(tmp_path / "nowhere", enable_lora=True)
    assert "adapters may not come from" in wrong(
        lora, enable_lora=True, allowed_lora_sources=[f"file://{other}"]
    )
    check_adapters(
        EngineSettings.of(model=str(tiny("llama")), lora_modules=[f"sql={lora}"], enable_lora=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("task", ["generate", "embed"])
def test_weights_of_nan_are_never_announced_as_ready(tmp_path: Path, task: str) -> None:
    directory = Path(shutil.copytree(tiny("qwen3"), tmp_path / "nan"))
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", "serve", str(directory), "--port", "0", "--task", task],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    assert "not finite" in done.stderr.splitlines()[-1]
    assert "serving" not in done.stderr


@pytest.mark.extensions("stages")
@pytest.mark.parametrize("engine", ["diffusers", "vllm-omni"])
def test_engines_of_images_take_pipelines_alone(tmp_path: Path, engine: str) -> None:
    settings = EngineSettings.of(model=str(tmp_path), engine=engine)
    with pytest.raises(InvalidRequestError, match=r"has no model_index.json: it is no pipeline"):
        check_model(settings)
    (tmp_path / "model_index.json").write_text("{}")
    check_model(settings)
