"""Embedding tables and heads that stand whole in an adapter: the model's own, or refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inlay.adapter import LoraFiles, open_adapter
from inlay.adapter.library import AdapterLibrary
from inlay.adapter.tables import ignore, unchanged_from
from inlay.base.errors import InvalidRequestError
from tests import adapters
from tests.models import tiny

CURE = "delete it from adapter_model.safetensors"


def table(rows: int = 5000, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1)).to(dtype)


def model(directory: Path, **tensors: Tensor) -> Path:
    directory.mkdir()
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(named, directory / "model.safetensors")
    return directory


def adapter(write: Any, directory: Path, **tables: Tensor) -> Path:
    path: Path = write(directory=directory)
    file = path / "adapter_model.safetensors"
    named = {f"base_model.model.{name.replace('__', '.')}": each for name, each in tables.items()}
    save_file({**load_file(file), **named}, file)
    return path


def opened(path: Path, base: Path) -> LoraFiles:
    files = open_adapter(path, check_table=unchanged_from(base))
    assert isinstance(files, LoraFiles)
    assert list(files.modules) == ["model.layers.0.self_attn.q_proj"]
    return files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_tables_that_equal_the_models_are_left_out_and_logged(
    write: Any, tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    base = model(
        tmp_path / "base",
        model__embed_tokens__weight=table(),
        mtp__x__embed_tokens__weight=table(7),
    )
    tables = {
        "model__embed_tokens__weight": table().to(dtype),
        "lm_head__weight": table().to(dtype),
        "model__language_model__embed_tokens__base_layer__weight": table().to(dtype),
    }
    path = adapter(write, tmp_path / "a", **tables)
    with caplog.at_level(logging.INFO):
        opened(path, base)
    assert caplog.text.count("equals the model's, and is left out") == 3


def test_a_head_of_its_own_is_compared_with_the_head(write: Any, tmp_path: Path) -> None:
    head = table(dtype=torch.float16) + 1
    base = model(tmp_path / "base", model__embed_tokens__weight=table(), lm_head__weight=head)
    opened(adapter(write, tmp_path / "a", lm_head__weight=head.float()), base)
    with pytest.raises(InvalidRequestError, match=r"lm_head\.weight' differs from the model's"):
        opened(adapter(write, tmp_path / "b", lm_head__weight=table()), base)


def test_a_table_that_was_trained_is_refused_with_the_cure(write: Any, tmp_path: Path) -> None:
    trained = table()
    trained[-1, -1] += 1
    base = model(tmp_path / "base", model__embed_tokens__weight=table())
    for number, (changed, says) in enumerate(
        (
            (trained, "differs from the model's"),
            (torch.cat((table(), table(1))), r"has shape \(5001, 4\), and the model's \(5000, 4\)"),
        )
    ):
        path = adapter(write, tmp_path / f"{number}", model__embed_tokens__weight=changed)
        with pytest.raises(InvalidRequestError, match=f"embed_tokens.weight' {says}.*{CURE}"):
            opened(path, base)


@pytest.mark.parametrize(
    "names", [{}, {"model__embed_tokens__weight": torch.ones(5000, 4, dtype=torch.int8)}]
)
def test_what_cannot_be_compared_is_refused_with_the_cure(
    write: Any, tmp_path: Path, names: dict[str, Tensor]
) -> None:
    base = model(tmp_path / "base", **names) if names else tmp_path / "nothing"
    path = adapter(write, tmp_path / "a", model__embed_tokens__weight=table())
    with pytest.raises(InvalidRequestError, match=f"cannot be compared.*{CURE}"):
        opened(path, base)
    with pytest.raises(InvalidRequestError, match=f"is a whole table.*{CURE}"):
        open_adapter(path)
    assert isinstance(open_adapter(path, check_table=ignore), LoraFiles)


def test_what_peft_saves_with_save_embedding_layers_is_served_by_the_library(
    tmp_path: Path,
) -> None:
    base = tiny("llama")
    path = adapters.make_lora(tmp_path / "a", base, save_embedding_layers=True)
    stored = load_file(path / "adapter_model.safetensors")
    assert any(name.endswith("embed_tokens.weight") for name in stored)

    def library(model: Path | None) -> AdapterLibrary:
        return AdapterLibrary(
            ["file:///"], cache_dir=None, cache_bytes=1 << 20, max_bytes=1 << 23, model=model
        )

    library(base).open(str(path)).close()
    with pytest.raises(InvalidRequestError, match=CURE):
        library(tiny("mistral")).open(str(path))
    with pytest.raises(InvalidRequestError, match=CURE):
        library(None).open(str(path))
