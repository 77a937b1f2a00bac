"""Rows from the embedding table on disk are what the model itself would look up."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inlay.base.errors import InvalidRequestError
from inlay.client import PromptEmbedder, loads
from tests.client.models import gemma, sparse_model
from tests.commands import run
from tests.models import make, tiny

TEXT = "the harbour town counts its lanterns every night"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is the town?"},
]


def as_torch(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    if rows.dtype.name == "bfloat16":
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rows_are_the_models_own_embeddings_of_the_text(family: str, dtype: str) -> None:
    directory = tiny(family, dtype)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    ids = AutoTokenizer.from_pretrained(directory)(TEXT, return_tensors="pt").input_ids
    prompt = PromptEmbedder.from_pretrained(directory).embed(TEXT)
    assert prompt.num_tokens == ids.shape[1]
    assert torch.equal(as_torch(prompt.rows), model.get_input_embeddings()(ids)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("version", [2, 3])
def test_rows_are_after_the_scale_of_models_that_scale(
    version: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = gemma(version, tmp_path / "model", dtype)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    ids = AutoTokenizer.from_pretrained(directory)(TEXT, return_tensors="pt").input_ids
    embedder = PromptEmbedder.from_pretrained(directory)
    rows = as_torch(embedder.embed(TEXT).rows)[None]
    assert embedder.table.scale != 1
    assert torch.equal(rows, model.get_input_embeddings()(ids))
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=rows).logits, model(input_ids=ids).logits)


def test_rows_follow_the_served_dtype_where_the_scale_is_rounded_in_it(tmp_path: Path) -> None:
    directory = gemma(3, tmp_path / "model", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(directory)(TEXT, return_tensors="pt").input_ids
    rows = PromptEmbedder.from_pretrained(directory, dtype="float32").embed(TEXT).rows
    assert torch.equal(as_torch(rows)[None], model.get_input_embeddings()(ids))


def test_messages_become_the_rows_of_their_chat_template() -> None:
    directory = tiny("qwen3")
    ids = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    embedder = PromptEmbedder.from_pretrained(directory)
    np.testing.assert_array_equal(
        embedder.embed_messages(MESSAGES).rows, embedder.embed_tokens(ids).rows
    )


def test_a_table_in_another_of_several_files_is_found(tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "sharded", shard_size="60KB")
    assert (directory / "model.safetensors.index.json").is_file()
    whole = PromptEmbedder.from_pretrained(tiny("llama"))
    sharded = PromptEmbedder.from_pretrained(directory)
    np.testing.assert_array_equal(sharded.embed(TEXT).rows, whole.embed(TEXT).rows)
    assert sharded.table.id == whole.table.id


def test_what_is_written_is_stamped_and_reads_back() -> None:
    embedder = PromptEmbedder.from_pretrained(tiny("llama", "bfloat16"))
    prompt = embedder.embed(TEXT)
    for format in ("safetensors", "torch"):
        (back,) = loads(prompt.to_base64(format).encode())
        assert back.table_id == embedder.table.id
        np.testing.assert_array_equal(back.rows, prompt.rows)


def test_one_call_gives_what_the_openai_client_takes() -> None:
    embedder = PromptEmbedder.from_pretrained(tiny("llama"))
    arguments = embedder.completion_args(TEXT)
    (rows,) = loads(arguments["extra_body"]["prompt_embeds"].encode())
    assert arguments["prompt"] is None
    np.testing.assert_array_equal(rows.rows, embedder.embed(TEXT).rows)
    part = embedder.chat_part(TEXT, format="torch")
    assert part["type"] == "prompt_embeds"
    (inside,) = loads(part["data"].encode())
    np.testing.assert_array_equal(inside.rows, embedder.embed(TEXT, add_special_tokens=False).rows)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/nowhere/at/all", "is not a directory"),
        ("./nowhere", "is not a directory"),
        ("nowhere", "is not a directory"),
    ],
)
def test_a_model_that_is_not_there_is_refused(model: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        PromptEmbedder.from_pretrained(model)


def test_a_token_the_table_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="token ids must be in"):
        PromptEmbedder.from_pretrained(tiny("llama")).embed_tokens([10**6])


_MEASURE = """
import json, re, sys
from pathlib import Path
from inlay.client import PromptEmbedder, nearest

def peak():
    # Not getrusage: its peak outlives exec, so it is that of the process that started this one.
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak()
embedder = PromptEmbedder.from_pretrained(sys.argv[1])
prompt = embedder.embed("the harbour town counts its lanterns every night")
prompt.to_base64("torch")
made = peak() - before
if sys.argv[2] == "nearest":
    nearest(prompt.rows, embedder.table)
heavy = [name for name in ("torch", "transformers", "vllm") if name in sys.modules]
print(json.dumps({"made": made, "nearest": peak() - before, "rows": prompt.num_tokens, "heavy": heavy}))
"""


@cache
def _measured(directory: Path, what: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run(sys.executable, "-c", _MEASURE, directory, what))
    return result


def test_a_huge_model_costs_little_memory_and_no_torch(tmp_path: Path) -> None:
    directory = sparse_model(tmp_path, vocab=128256, hidden=8192)
    assert (directory / "model.safetensors").stat().st_size > 4_000_000_000
    measured = _measured(directory, "made")
    assert measured["rows"] > 0
    assert 0 < measured["made"] < 64 * 1024 * 1024
    assert measured["heavy"] == []


@pytest.mark.thorough
def test_looking_for_the_nearest_token_goes_through_the_table_in_little_memory(
    tmp_path: Path,
) -> None:
    directory = sparse_model(tmp_path, vocab=32768, hidden=8192)
    assert 0 < _measured(directory, "nearest")["nearest"] < 128 * 1024 * 1024
