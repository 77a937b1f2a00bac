"""`inlay convert`: what transformers, sentence-transformers and PEFT read of it is what was there."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
)

from inlay.adapter.files import open_adapter
from inlay.base.errors import InvalidRequestError
from inlay.cli.model_directory import check_model
from inlay.client import SoftPrompt
from inlay.engine.settings import EngineSettings
from inlay.tensors.weight_files import weight_files
from tests import adapters
from tests.commands import run
from tests.embedding_models import tiny_embedding, tiny_scoring
from tests.gguf_models import gguf_of
from tests.models import make, tiny
from tests.tensors.gguf_files import gguf_bytes
from tests.vision_models import vision

pytestmark = pytest.mark.extensions("tools")

END_SECONDS = 300


def convert(*words: str | Path, status: int = 0) -> str:
    """What `inlay convert` says."""
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", "convert", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
    )
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def run_printed(said: str) -> None:
    """Run the command that ends a message, as a shell does."""
    command = said[said.index("inlay convert") :].partition(" && ")[0]
    found = shlex.quote(sys.executable)
    run("sh", "-c", command.replace("inlay", f"{found} -m inlay.cli", 1))


def refused(directory: Path) -> str:
    with pytest.raises(InvalidRequestError) as error:
        check_model(EngineSettings.of(model=str(directory), device="cpu"))
    return error.value.message


def unread(directory: Path) -> str:
    """What every other reader of weights says."""
    with pytest.raises(InvalidRequestError) as error:
        weight_files(directory)
    return error.value.message


def pickled(model: Path, directory: Path) -> Path:
    """A copy of a model with all its weights as `torch.save` writes them, in their folders."""
    copied = Path(shutil.copytree(model, directory))
    for file in [*copied.rglob("*.safetensors")]:
        tensors = load_file(file)
        name = (
            file.name.replace("model", "pytorch_model")
            if file.stem != "adapter_model"
            else file.name
        )
        torch.save(tensors, file.with_name(name).with_suffix(".bin"))
        file.unlink()
    for index in copied.rglob("*.index.json"):
        text = (
            index.read_text().replace('"model-', '"pytorch_model-').replace(".safetensors", ".bin")
        )
        index.with_name("pytorch_model.bin.index.json").write_text(text)
        index.unlink()
    return copied


def contents(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in weight_files(directory).paths():
        found |= load_file(file)
    return found


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in wanted.items()
    )


@pytest.mark.parametrize(("dtype", "said_by"), [("float32", refused), ("bfloat16", unread)])
def test_the_printed_command_makes_the_directory_one_that_is_served(
    tmp_path: Path, dtype: str, said_by: Callable[[Path], str]
) -> None:
    directory = pickled(tiny("llama", dtype), tmp_path / "a model")
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    said = said_by(directory)
    assert "pytorch_model.bin" in said
    run_printed(said)
    assert same(contents(directory), contents(tiny("llama", dtype)))
    check_model(EngineSettings.of(model=str(directory), device="cpu"))
    _, info = LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    after = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert after.keys() - before.keys() == {"model.safetensors"}
    assert all(after[name] == data for name, data in before.items())
    assert "in safetensors already" in convert(directory, status=1)


@pytest.mark.parametrize("kind", ["reranker", "embedder", "vision", "parts"])
def test_heads_towers_and_modules_are_kept_and_config_json_byte_for_byte(
    tmp_path: Path, kind: str
) -> None:
    source = {
        "reranker": lambda: tiny_scoring("bert"),
        "embedder": lambda: tiny_embedding("gemma"),
        "vision": lambda: vision("qwen2_vl"),
        "parts": lambda: make("llama", tmp_path / "parts", shard_size="60KB"),
    }[kind]()
    directory = pickled(source, tmp_path / "pickled")
    made = tmp_path / "made"
    convert(directory, "--output", made)
    files = {file.relative_to(source) for file in source.rglob("*") if file.is_file()}
    assert {file.relative_to(made) for file in made.rglob("*") if file.is_file()} == files
    for file in files:
        if file.name.endswith(".safetensors"):
            assert same(load_file(made / file), load_file(source / file))
        elif not file.name.endswith(".index.json"):
            assert (made / file).read_bytes() == (source / file).read_bytes()
    assert same(contents(made), contents(source))
    if kind == "reranker":
        _, info = AutoModelForSequenceClassification.from_pretrained(made, output_loading_info=True)
        assert not info["missing_keys"]
    if kind == "parts":
        assert not AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)[1][
            "missing_keys"
        ]
    assert made.stat().st_mode == directory.stat().st_mode


def test_adapters_are_converted_too(tmp_path: Path) -> None:
    lora = adapters.make_lora(tmp_path / "lora", tiny("llama"))
    wanted = load_file(lora / "adapter_model.safetensors")
    directory = pickled(lora, tmp_path / "pickled")
    with pytest.raises(InvalidRequestError, match="inlay convert DIRECTORY"):
        open_adapter(directory, max_bytes=1 << 30)
    convert(directory)
    assert same(load_file(directory / "adapter_model.safetensors"), wanted)
    open_adapter(directory, max_bytes=1 << 30)
    tuned = adapters.make_prompt_tuning(tmp_path / "tuned", tiny("llama"))
    rows = SoftPrompt.from_peft(tuned).rows
    soft = pickled(tuned, tmp_path / "soft")
    with pytest.raises(InvalidRequestError) as said:
        SoftPrompt.from_peft(soft)
    run_printed(said.value.message)
    assert (SoftPrompt.from_peft(soft).rows == rows).all()


def test_a_single_file_is_converted_beside_it_or_with_its_configuration(tmp_path: Path) -> None:
    directory = pickled(tiny("llama"), tmp_path / "model")
    (directory / "pytorch_model.bin").rename(directory / "last.ckpt")
    convert(directory / "last.ckpt")
    assert same(load_file(directory / "last.safetensors"), contents(tiny("llama")))
    (directory / "last.safetensors").unlink()
    said = json.loads(convert(directory / "last.ckpt", "--output", tmp_path / "made", "-o", "json"))
    made = contents(tmp_path / "made")
    assert said == {
        "output": str(tmp_path / "made"),
        "files": ["model.safetensors"],
        "tensors": len(made),
        "bytes": sum(tensor.nbytes for tensor in made.values()),
    }
    assert same(contents(tmp_path / "made"), contents(tiny("llama")))
    check_model(EngineSettings.of(model=str(tmp_path / "made"), device="cpu"))


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    directory = pickled(tiny("llama"), tmp_path / "model")
    (tmp_path / "there").mkdir()
    assert "is there already" in convert(directory, "--output", tmp_path / "there", status=1)
    assert "would be copied into it" in convert(directory, "--output", directory / "in", status=1)
    assert "is no directory" in convert(directory, "--output", tmp_path / "no" / "place", status=1)
    assert "--dtype is for GGUF" in convert(directory, "--dtype", "float32", status=2)
    with (directory / "pytorch_model.bin").open("r+b") as stream:
        stream.truncate(stream.seek(0, os.SEEK_END) - 1000)
    said = convert(directory, "--output", tmp_path / "made", status=1)
    assert "pytorch_model.bin cannot be converted: it is a zip archive that" in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "there"]
    assert "has no checkpoint" in convert(tmp_path / "there", status=1)
    assert "neither a file nor a directory" in convert(tmp_path / "nowhere", status=2)


@pytest.mark.thorough
def test_the_form_before_torch_1_6_is_refused_with_a_command_that_writes_it_anew(
    tmp_path: Path,
) -> None:
    directory = pickled(tiny("llama"), tmp_path / "a model")
    file = directory / "pytorch_model.bin"
    torch.save(contents(tiny("llama")), file, _use_new_zipfile_serialization=False)
    said = convert(directory, status=1)
    assert "has the form of torch before 1.6" in said
    assert "with torch 2.10 or newer (older ones run code in it: CVE-2025-32434, " in said
    command = said[said.index("python -c") :].replace("python", shlex.quote(sys.executable), 1)
    run("sh", "-c", command)
    convert(directory)
    assert same(contents(directory), contents(tiny("llama")))


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_converted_gguf_file_is_the_model_that_it_was_made_from(
    tmp_path: Path, family: str
) -> None:
    """Also the scaling of its positions, which is a tensor in GGUF."""
    file = tmp_path / "a model" / "small.F32.gguf"
    file.parent.mkdir()
    gguf_of(tiny(family), file)
    convert(file.parent, "--dtype", "float32")
    made = file.with_suffix("")
    assert same(contents(made), contents(tiny(family)))
    found, wanted = (AutoModelForCausalLM.from_pretrained(path) for path in (made, tiny(family)))
    ids = torch.arange(40)[None]
    assert torch.equal(found(ids).logits, wanted(ids).logits)
    assert AutoTokenizer.from_pretrained(made)("the harbour").input_ids == (
        AutoTokenizer.from_pretrained(tiny(family))("the harbour").input_ids
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cut short or damaged"),
        (b"PK\3\4" + bytes(90), "it begins with b'PK"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16 + bytes(90), "tensors; allowed"),
        (gguf_bytes({}, {}), "transformers cannot read"),
    ],
)
def test_what_is_no_gguf_is_refused_and_nothing_is_left(
    tmp_path: Path, data: bytes, said: str
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    assert said in convert(file, status=1)
    assert [*tmp_path.iterdir()] == [file]
