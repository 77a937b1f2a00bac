"""Which files of a directory are the weights: as transformers has it, and alike for every reader."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers.modeling_utils import _get_resolved_checkpoint_files

from inlay.base.errors import InvalidRequestError
from inlay.embedding.plan import DenseConfig
from inlay.engine.embed.pooling import Dense
from inlay.engine.weights import weights_id
from inlay.tensors.checkpoint import check_tensors, stored_tensors
from inlay.tensors.table import EmbeddingTable
from inlay.tensors.tidy_directory import tidied
from inlay.tensors.weight_files import weight_files
from tests.examples import examples

INDEX = "model.safetensors.index.json"
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
STRAYS = (
    "model.fp16.safetensors",
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "optimizer.safetensors",
    "model.fp16-00001-of-00002.safetensors",
)
TABLE = "model.embed_tokens.weight"


def save(directory: Path, name: str, value: float, tensor: str = TABLE) -> None:
    save_file({tensor: np.full((9, 4), value, np.float32)}, directory / name)


def index(directory: Path, files: dict[str, str], **more: object) -> None:
    written = {"metadata": {"total_size": 1}, "weight_map": files} | more
    (directory / INDEX).write_text(json.dumps(written))


def config(directory: Path, **more: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"hidden_size": 4} | more))
    return directory


def parts(directory: Path, value: float) -> None:
    save(directory, PARTS[0], value, "lm_head.weight")
    save(directory, PARTS[1], value)


def transformers_has(directory: Path, named: str | None = None) -> list[str] | None:
    """Names of the files that transformers reads; None where it refuses."""
    try:
        found, _ = _get_resolved_checkpoint_files(
            str(directory), None, None, True, None, False, named, {"local_files_only": True}
        )
    except (OSError, ValueError, KeyError):
        return None
    return sorted(Path(file).name for file in found or [])


def have(directory: Path, present: Iterable[str]) -> None:
    """A directory of which each file says another thing of the table."""
    for number, name in enumerate(present):
        match name:
            case "whole":
                save(directory, "model.safetensors", number)
            case "parts":
                parts(directory, number)
            case "index":
                index(directory, {"lm_head.weight": PARTS[0], TABLE: PARTS[1]})
            case "index of one":
                index(directory, {TABLE: "model.safetensors"})
            case _:
                save(directory, name, number)


@settings(max_examples=examples(150), deadline=None)
@given(present=st.sets(st.sampled_from(["whole", "parts", "index", "index of one", *STRAYS])))
def test_what_transformers_reads_is_read_and_what_it_refuses_is_read_in_one_way(
    tmp_path_factory: pytest.TempPathFactory, present: set[str]
) -> None:
    directory = config(tmp_path_factory.mktemp("layout"))
    have(directory, sorted(present))
    reference = transformers_has(directory)
    missing = reference and not all((directory / name).is_file() for name in reference)
    try:
        found = [file.name for file in weight_files(directory).paths()]
    except InvalidRequestError:
        assert reference is None or missing
        return
    if reference is not None:
        assert found == reference
    # Every library is given a directory where it finds the same.
    for every_file in (False, True):
        with tidied(directory, every_file=every_file) as tidy:
            read = transformers_has(tidy)
            assert read is not None
            assert [(tidy / name).stat() for name in read] == [
                (directory / name).stat() for name in found
            ]
            if every_file:
                assert sorted(file.name for file in tidy.glob("*.safetensors")) == read
                assert (tidy / INDEX).exists() == (read != ["model.safetensors"])
    stored = {tensor.name: tensor.file for tensor in stored_tensors(directory)}
    if TABLE in stored:
        (row,) = EmbeddingTable.open(directory).rows([0])
        assert (row == load_file(stored[TABLE])[TABLE][0]).all()


@pytest.mark.parametrize("stray", STRAYS)
def test_a_second_file_beside_the_weights_changes_nothing(tmp_path: Path, stray: str) -> None:
    directory = config(tmp_path)
    save(directory, "model.safetensors", 1)
    before = EmbeddingTable.open(directory).id, weights_id(directory)
    save(directory, stray, 2)
    assert (EmbeddingTable.open(directory).id, weights_id(directory)) == before


def test_the_whole_file_comes_before_an_index_that_was_left_over(tmp_path: Path) -> None:
    directory = config(tmp_path)
    have(directory, ["whole", "parts", "index"])
    assert EmbeddingTable.open(directory).rows([0]).max() == 0
    alone = config(tmp_path / "alone")
    have(alone, ["whole"])
    assert weights_id(directory) == weights_id(alone)
    for part in PARTS:
        (directory / part).unlink()
    assert weights_id(directory) == weights_id(alone)


def test_parts_without_an_index_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    directory = config(tmp_path)
    parts(directory, 3)
    assert EmbeddingTable.open(directory).rows([0]).max() == 3
    (directory / PARTS[0]).unlink()
    with pytest.raises(InvalidRequestError, match=f"lacks 1 of the 2 weight files that {PARTS[1]}"):
        check_tensors(directory)
    save(directory, "model-00001-of-00001.safetensors", 1)
    with pytest.raises(InvalidRequestError, match="parts of 2 models"):
        check_tensors(directory)


def test_an_index_may_name_files_that_are_not_there_if_nothing_in_them_is_wanted(
    tmp_path: Path,
) -> None:
    directory = config(tmp_path)
    have(directory, ["parts", "index"])
    (directory / PARTS[0]).unlink()
    assert EmbeddingTable.open(directory).shape == (9, 4)
    with pytest.raises(InvalidRequestError, match=f"lacks 1 of the 2 .*: {PARTS[0]}"):
        check_tensors(directory)


def test_a_table_in_another_file_than_its_index_says_is_found_as_transformers_finds_it(
    tmp_path: Path,
) -> None:
    directory = config(tmp_path)
    parts(directory, 5)
    index(directory, {"lm_head.weight": PARTS[1], TABLE: PARTS[0]})
    assert EmbeddingTable.open(directory).rows([0]).max() == 5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../other/model.safetensors", "outside its directory"),
        ("/etc/passwd", "outside its directory"),
        ("sub/model.safetensors", "outside its directory"),
        (INDEX, "of another format"),
        ("pytorch_model.bin", "of another format"),
        (5, "of another format"),
        ("absent.safetensors", "lacks 1 of the 1 weight files"),
    ],
)
def test_an_index_that_names_what_is_no_part_of_the_model_is_refused(
    tmp_path: Path, name: object, said: str
) -> None:
    directory = config(tmp_path)
    index(directory, {TABLE: name})  # type: ignore[dict-item]
    with pytest.raises(InvalidRequestError, match=said):
        check_tensors(directory)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000, "\xff", "{"]
)
def test_an_index_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    directory = config(tmp_path)
    (directory / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequestError, match=f"{INDEX} is not a safetensors index"):
        check_tensors(directory)


def test_a_huge_index_is_refused_before_it_is_read(tmp_path: Path) -> None:
    directory = config(tmp_path)
    with (directory / INDEX).open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(InvalidRequestError, match=f"{INDEX} is over 67108864 bytes"):
        check_tensors(directory)


def test_links_that_lead_nowhere_or_in_a_circle_are_no_weights(tmp_path: Path) -> None:
    directory = config(tmp_path)
    (directory / "model.safetensors").symlink_to(directory / "model.safetensors")
    (directory / INDEX).symlink_to(directory / "nowhere")
    with pytest.raises(InvalidRequestError, match="has no weights"):
        check_tensors(directory)
    os.mkfifo(directory / "fifo.safetensors")  # opening it would block for ever
    with pytest.raises(InvalidRequestError, match="has no weights"):
        check_tensors(directory)


def test_a_tensor_that_stands_in_two_parts_is_refused(tmp_path: Path) -> None:
    directory = config(tmp_path)
    save(directory, PARTS[0], 1)
    save(directory, PARTS[1], 2)
    with pytest.raises(InvalidRequestError, match=f"has tensor {TABLE} twice"):
        check_tensors(directory)


def test_the_file_that_the_configuration_names_comes_first(tmp_path: Path) -> None:
    directory = config(tmp_path, transformers_weights="other.safetensors")
    have(directory, ["whole", "other.safetensors"])
    assert transformers_has(directory, "other.safetensors") == ["other.safetensors"]
    save(directory, "other.safetensors", 7)
    assert EmbeddingTable.open(directory).rows([0]).max() == 7
    with tidied(directory, every_file=True) as tidy:
        assert transformers_has(tidy) == ["model.safetensors"]
        assert "transformers_weights" not in (tidy / "config.json").read_text()
        assert EmbeddingTable.open(tidy).rows([0]).max() == 7
    for name in ("../other.safetensors", "model.bin", 5):
        config(directory, transformers_weights=name)
        with pytest.raises(InvalidRequestError, match="says transformers_weights"):
            check_tensors(directory)


def test_a_part_of_a_pipeline_is_read_by_its_index_first(tmp_path: Path) -> None:
    name = "diffusion_pytorch_model"
    save(tmp_path, f"{name}.safetensors", 1)
    save(tmp_path, f"{name}.fp16.safetensors", 2)
    assert [file.name for file in weight_files(tmp_path).paths()] == [f"{name}.safetensors"]
    save(tmp_path, f"{name}-00001-of-00001.safetensors", 3)
    files = {"weight_map": {TABLE: f"{name}-00001-of-00001.safetensors"}}
    (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(files))
    assert weight_files(tmp_path).names == (f"{name}-00001-of-00001.safetensors",)


def test_a_dense_layer_of_parts_or_beside_strays_is_read(tmp_path: Path) -> None:
    layer = {"linear.weight": np.full((2, 4), 3, np.float32)}
    save_file(layer, tmp_path / "model-00001-of-00001.safetensors")
    config = DenseConfig(tmp_path, 4, 2, bias=False, activation="identity")
    assert Dense(config)._linear.weight.eq(3).all()
    save_file({"linear.weight": np.full((2, 4), 4, np.float32)}, tmp_path / "model.safetensors")
    assert Dense(config)._linear.weight.eq(4).all()
