"""The embedding table is found, named and read as the model reads it, without torch and without loading it."""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, GemmaConfig

from inlay.base.errors import InvalidRequestError
from inlay.tensors.checkpoint import check_tensors, stored_tensors
from inlay.tensors.table import EmbeddingTable, spread
from tests.commands import run
from tests.models import VOCAB_SIZE, make, tiny


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_the_models_own_embeddings(family: str, dtype: str) -> None:
    table = EmbeddingTable.open(tiny(family, dtype))
    model = AutoModelForCausalLM.from_pretrained(tiny(family, dtype), dtype=getattr(torch, dtype))
    ids = [0, 5, VOCAB_SIZE - 1, 5]
    expected = model.get_input_embeddings()(torch.tensor(ids)).detach()
    rows = table.rows(ids)
    assert table.dtype == dtype
    assert table.shape == (VOCAB_SIZE, model.config.hidden_size)
    assert table.scale == 1.0
    assert rows.tobytes() == expected.view(torch.uint8).numpy().tobytes()
    assert table.abs_max() == model.get_input_embeddings().weight.abs().max().item()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_model_that_scales_them_come_after_the_scale(tmp_path: Path, dtype: str) -> None:
    config = GemmaConfig(
        vocab_size=90,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
    )
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    table = EmbeddingTable.open(tmp_path)
    expected = model.get_input_embeddings()(torch.arange(90)).detach()
    assert table.scale == pytest.approx(24**0.5, rel=1e-2)
    assert table.rows(range(90)).tobytes() == expected.view(torch.uint8).numpy().tobytes()
    assert table.abs_max() == pytest.approx(expected.abs().max().item(), rel=1e-2)


def test_rows_in_another_dtype_are_what_the_model_in_that_dtype_has() -> None:
    table = EmbeddingTable.open(tiny("llama", "bfloat16"))
    assert table.rows([3], "float32").dtype == np.float32
    assert (table.rows([3], "float32") == table.rows([3]).astype(np.float32)).all()
    with pytest.raises(
        InvalidRequestError, match="float64, float32, float16, bfloat16; got 'int8'"
    ):
        table.rows([3], "int8")


def test_the_id_names_content_and_not_files(tmp_path: Path) -> None:
    whole = EmbeddingTable.open(tiny("llama")).id
    assert len(whole) == 32
    assert int(whole, 16)
    assert EmbeddingTable.open(make("llama", tmp_path / "s", shard_size="60KB")).id == whole
    assert EmbeddingTable.open(tiny("llama", "bfloat16")).id != whole
    assert EmbeddingTable.open(tiny("qwen3")).id != whole


@pytest.mark.parametrize("ids", [[-1], [VOCAB_SIZE], [0, 10**9]])
def test_ids_outside_the_vocabulary_are_an_error(ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, 384\)"):
        EmbeddingTable.open(tiny("llama")).rows(ids)


def test_no_ids_are_no_rows() -> None:
    assert EmbeddingTable.open(tiny("llama")).rows([]).shape == (0, 48)


def test_chunks_cover_the_table_once_and_in_order(tmp_path: Path) -> None:
    data = np.arange(5_000_000, dtype=np.float32).reshape(-1, 20)
    directory = write(tmp_path, {"model.embed_tokens.weight": data}, {"hidden_size": 20})
    table = EmbeddingTable.open(directory)
    chunks = [(start, rows.copy()) for start, rows in table.chunks()]
    assert len(chunks) > 1
    assert (np.concatenate([rows for _, rows in chunks]) == data).all()
    assert all((rows == data[start : start + len(rows)]).all() for start, rows in chunks)
    assert table.abs_max() == data.max()


def write(directory: Path, tensors: dict[str, np.ndarray], config: dict[str, object]) -> Path:
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_language_models_table_is_told_from_others(tmp_path: Path) -> None:
    right = np.ones((7, 4), ml_dtypes.bfloat16)
    write(
        tmp_path,
        {
            "model.language_model.embed_tokens.weight": right,
            "model.audio_tower.embed_tokens.weight": np.zeros((9, 4), ml_dtypes.bfloat16),
            "model.language_model.embed_tokens_per_layer.weight": np.zeros(
                (7, 8), ml_dtypes.bfloat16
            ),
        },
        {"text_config": {"hidden_size": 4}},
    )
    assert EmbeddingTable.open(tmp_path).shape == (7, 4)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"other.weight": np.ones((7, 4), np.float32)}, "0 tensors that may be"),
        ({"model.embed_tokens.weight": np.ones((7, 4), np.int32)}, "is a I32 tensor"),
        (
            {"a.embed_tokens.weight": np.ones((7, 4)), "b.embed_tokens.weight": np.ones((7, 4))},
            "2 tensors that may be",
        ),
    ],
)
def test_a_directory_without_one_clear_table_is_refused(
    tmp_path: Path,
    tensors: dict[str, np.ndarray],
    message: str,
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        EmbeddingTable.open(write(tmp_path, tensors, {"hidden_size": 4}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is cut short: it has 0 bytes$"),
        (
            (1 << 60).to_bytes(8, "little") + b"{}",
            "not a safetensors file: its first 8 bytes say a header of",
        ),
        ((99).to_bytes(8, "little") + b"{}", "is cut short: it has 10 bytes, its header alone 99"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
            "a pointer of Git LFS .* `git lfs pull`",
        ),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ((3).to_bytes(8, "little") + b'{"a', "not a safetensors file"),
        (
            (59).to_bytes(8, "little")
            + b'{"a":{"dtype":"F32","shape":[99],"data_offsets":[0,396]}}  ',
            "is cut short: it has 67 of 463 bytes",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(InvalidRequestError, match=message):
        list(stored_tensors(tmp_path))


def test_a_directory_without_weights_says_what_it_has_instead(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        InvalidRequestError,
        match=r"no \*\.safetensors file, .* it has pytorch_model\.bin: inlay convert /",
    ):
        check_tensors(tmp_path)


def test_files_that_an_index_names_and_that_are_missing_are_named(tmp_path: Path) -> None:
    index = {"weight_map": {str(number): f"{number}.safetensors" for number in range(5)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "0.safetensors").touch()
    with pytest.raises(
        InvalidRequestError,
        match=r"lacks 4 of the 5 weight files .*: 1\.safetensors, 2\.safetensors, 3\.safetensors, \.\.\.$",
    ):
        check_tensors(tmp_path)


def test_the_table_is_found_where_only_its_own_file_is_there(tmp_path: Path) -> None:
    write(tmp_path, {"model.embed_tokens.weight": np.ones((7, 4), np.float32)}, {"hidden_size": 4})
    index = {
        "model.embed_tokens.weight": "model.safetensors",
        "model.norm.weight": "other.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert EmbeddingTable.open(tmp_path).shape == (7, 4)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../b.safetensors"}}'
    )
    with pytest.raises(InvalidRequestError, match="outside its directory"):
        list(stored_tensors(tmp_path))


def test_spread_takes_the_ends_and_no_index_twice() -> None:
    assert spread(3, 8) == [0, 1, 2]
    assert spread(1000, 4) == [0, 333, 666, 999]
    assert spread(0, 4) == []


def test_a_large_directory_costs_little_memory(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "model.embed_tokens.weight": {
                "dtype": "BF16",
                "shape": [32768, 4096],
                "data_offsets": [0, 1 << 28],
            }
        }
    ).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 28))
    (tmp_path / "config.json").write_text('{"hidden_size": 4096}')
    script = (
        "import resource, sys\n"
        "from inlay.tensors.table import EmbeddingTable\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "table = EmbeddingTable.open(sys.argv[1])\n"
        "table.id, table.rows(range(0, 32768, 500)), table.abs_max()\n"
        "assert 'torch' not in sys.modules\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    assert int(run(sys.executable, "-c", script, tmp_path)) < 100
