"""However a model lies in its directory, engine, table, table id and client have the same weights."""

import json
import shutil
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from inlay.client import PromptEmbedder
from inlay.engine.embed.encoder import Encoder
from inlay.engine.model_files import row_facts
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.weights.checkpoint import load
from inlay.engine.weights import weights_id
from inlay.messages.prompt import Prompt, Tokens
from tests.embedding_models import tiny_embedding
from tests.models import make, tiny

INDEX = "model.safetensors.index.json"
MESSAGES = [{"role": "user", "content": "Hello"}]


def add_marks(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.suffix in (".json", ".jinja", ".txt"):
            file.write_bytes(BOM_UTF8 + file.read_bytes())


def add_strays(directory: Path) -> None:
    """Other weights, of the same names and shapes."""
    other = {
        name: tensor + 1 for name, tensor in load_file(directory / "model.safetensors").items()
    }
    for name in ("model.fp16", "consolidated", "adapter_model"):
        save_file(other, directory / f"{name}.safetensors", {"format": "pt"})
    (directory / "original").mkdir()
    save_file(other, directory / "original" / "model.safetensors", {"format": "pt"})


def add_stale_index(directory: Path) -> None:
    other = {
        name: tensor + 1 for name, tensor in load_file(directory / "model.safetensors").items()
    }
    part = "model-00001-of-00001.safetensors"
    save_file(other, directory / part, {"format": "pt"})
    written = {"metadata": {}, "weight_map": dict.fromkeys(other, part)}
    (directory / INDEX).write_text(json.dumps(written))


def without_index(directory: Path) -> None:
    split(directory)
    (directory / INDEX).unlink()


def index_without_metadata(directory: Path) -> None:
    split(directory)
    index = json.loads((directory / INDEX).read_text())
    (directory / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}))


def split(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    sharded = make("llama", directory / "sharded", shard_size="60KB")
    for file in sharded.glob("model*"):
        file.rename(directory / file.name)
    shutil.rmtree(sharded)


def rename(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "weights.safetensors")


LAYOUTS = (add_marks, add_strays, add_stale_index, without_index, index_without_metadata, rename)


@pytest.mark.parametrize("change", LAYOUTS, ids=lambda change: change.__name__)
def test_all_readers_have_the_weights_of_the_plain_directory(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    directory = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    change(directory)
    settings = EngineSettings.of(model=str(directory), device="cpu", dtype="float32")
    found, wanted = (
        load(LlamaForCausalLM, each, dtype=torch.float32, attn_implementation="eager").state_dict()
        for each in (directory, tiny("llama"))
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    model = CausalModel.load(settings)
    assert model.weights_id == weights_id(directory) == weights_id(tiny("llama"))
    facts = row_facts(settings.limits, directory, "float32", None)
    client, usual = (PromptEmbedder.from_pretrained(each) for each in (directory, tiny("llama")))
    assert client.table.id == facts.table_id == usual.table.id == model.embedding_table_id
    assert client.table.abs_max() == facts.abs_max == usual.table.abs_max()
    embedded, expected = client.embed_messages(MESSAGES), usual.embed_messages(MESSAGES)
    assert embedded.rows.tobytes() == expected.rows.tobytes()


def test_an_embedding_model_with_byte_order_marks_and_strays_makes_the_same_vectors(
    tmp_path: Path,
) -> None:
    usual = tiny_embedding("bge")
    directory = Path(shutil.copytree(usual, tmp_path / "model"))
    add_strays(directory)
    add_marks(directory)
    prompts = [Prompt.of(Tokens((5, 6, 7)))]
    vectors = [
        Encoder.load(EngineSettings.of(model=str(each), device="cpu", task="embed")).vectors(
            prompts
        )
        for each in (directory, usual)
    ]
    assert torch.equal(*vectors)
