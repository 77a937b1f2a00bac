"""Rows as clients hold, join, write and read them."""

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pybase64
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM

from inlay.base.errors import EmbeddingsError, InvalidRequestError
from inlay.client import EmbeddedPrompt, PromptEmbedder, SoftPrompt, load, loads
from inlay.tensors import TensorFormat
from tests.models import tiny

ROWS = np.random.default_rng(7).standard_normal((5, 16)).astype(np.float32)
NUM_VIRTUAL = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """A PEFT prompt-tuning checkpoint of a tiny Llama, and its rows."""
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=NUM_VIRTUAL)
    with warnings.catch_warnings():
        # peft still asks transformers by an attribute's old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        model = get_peft_model(base, config)
    directory = tmp_path_factory.mktemp("peft")
    model.save_pretrained(directory)
    return directory, model.prompt_encoder["default"].embedding.weight.detach().numpy()


@given(
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    shape=st.tuples(st.integers(1, 9), st.integers(30, 70)),
    format=st.sampled_from(["safetensors", "torch", "npy"]),
    stamp=st.sampled_from([None, "00112233445566778899aabbccddeeff"]),
    wrap=st.booleans(),
)
def test_rows_read_back_from_bytes_and_from_base64(
    dtype: str, shape: tuple[int, int], format: TensorFormat, stamp: str | None, wrap: bool
) -> None:
    if format == "npy" and dtype == "bfloat16":
        return
    rows = (
        np.random.default_rng(1)
        .standard_normal(shape)
        .astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    )
    prompt = EmbeddedPrompt(rows, stamp)
    text = prompt.to_base64(format).encode()
    if wrap:
        text = b"\n".join(text[start : start + 76] for start in range(0, len(text), 76)) + b"\n"
    for data in (prompt.to_bytes(format), text):
        (back,) = loads(data)
        assert back.rows.dtype == rows.dtype
        np.testing.assert_array_equal(back.rows, rows)
        assert back.table_id == (None if format == "npy" else stamp)


def test_npy_refuses_bfloat16_by_name() -> None:
    with pytest.raises(EmbeddingsError, match="npy format has no bfloat16"):
        EmbeddedPrompt(ROWS.astype(ml_dtypes.bfloat16)).to_bytes("npy")


def test_torch_itself_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.pt"
    path.write_bytes(EmbeddedPrompt(ROWS, "00").to_bytes("torch"))
    loaded = torch.load(path, weights_only=True)  # noqa: TID251 - the reader of other servers
    np.testing.assert_array_equal(loaded.numpy(), ROWS)


def test_a_batch_holds_one_prompt_each(tmp_path: Path) -> None:
    path = tmp_path / "batch.npy"
    np.save(path, np.stack([ROWS, ROWS + 1]))
    first, second = loads(path.read_bytes())
    np.testing.assert_array_equal(second.rows - first.rows, (ROWS + 1) - ROWS)
    with pytest.raises(InvalidRequestError, match="holds 2 prompts, expected one"):
        load(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "at least 100 bytes"),
        (b"A" * 401, "not valid base64"),
        (b"\x00" * 400, "must be a torch.Tensor"),
        (pybase64.b64encode(b"\x01" * 300), "must be a torch.Tensor"),
    ],
)
def test_bytes_that_are_no_embeddings_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(EmbeddingsError, match=said):
        loads(data)


def test_a_missing_file_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"'nowhere\.pt': No such file"):
        load("nowhere.pt")


def test_a_file_that_is_no_embeddings_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no tensor at all\n" * 20)
    with pytest.raises(EmbeddingsError, match=r"notes\.txt': must be a torch\.Tensor"):
        load(path)


def test_joined_rows_stand_in_order_and_keep_the_wider_dtype_and_the_stamp() -> None:
    narrow = EmbeddedPrompt(ROWS.astype(ml_dtypes.bfloat16), "aa")
    joined = EmbeddedPrompt(ROWS) + narrow
    assert joined.num_tokens == 10
    assert joined.table_id == "aa"
    assert joined.rows.dtype == np.float32
    np.testing.assert_array_equal(joined.rows[:5], ROWS)
    np.testing.assert_array_equal(joined.rows[5:], narrow.rows.astype(np.float32))
    assert (narrow + narrow).rows.dtype == ml_dtypes.bfloat16


def test_rows_that_cannot_be_one_prompt_are_not_joined() -> None:
    with pytest.raises(InvalidRequestError, match="hidden size 16 and 8"):
        EmbeddedPrompt(ROWS) + EmbeddedPrompt(ROWS[:, :8])
    with pytest.raises(InvalidRequestError, match="embedding tables aa and bb"):
        EmbeddedPrompt(ROWS, "aa") + EmbeddedPrompt(ROWS, "bb")
    with pytest.raises(InvalidRequestError, match="num_tokens, hidden"):
        EmbeddedPrompt(ROWS[0])


def test_a_peft_checkpoint_is_read_and_stands_before_a_text(
    checkpoint: tuple[Path, np.ndarray[Any, Any]],
) -> None:
    directory, rows = checkpoint
    soft = SoftPrompt.from_peft(directory)
    assert soft.num_tokens == NUM_VIRTUAL
    np.testing.assert_array_equal(soft.rows, rows)
    text = PromptEmbedder.from_pretrained(tiny("llama")).embed("the town")
    joined = soft + text
    assert joined.num_tokens == NUM_VIRTUAL + text.num_tokens
    assert joined.table_id == text.table_id
    np.testing.assert_array_equal(joined.rows[NUM_VIRTUAL:], text.rows)


def test_checkpoints_of_another_kind_or_form_are_refused(
    checkpoint: tuple[Path, np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=r"has no adapter_config\.json"):
        SoftPrompt.from_peft(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text('{"peft_type": "LORA"}')
    with pytest.raises(InvalidRequestError, match="PROMPT_TUNING checkpoint, this is 'LORA'"):
        SoftPrompt.from_peft(tmp_path)
    config.write_text("[]")
    with pytest.raises(InvalidRequestError, match="not a PEFT configuration"):
        SoftPrompt.from_peft(tmp_path)
    config.write_text((checkpoint[0] / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(InvalidRequestError, match="pickle and is never read"):
        SoftPrompt.from_peft(tmp_path)
