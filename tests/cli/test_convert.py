"""`inlay embeds convert`: every format and data type to every other, and what cannot be."""

import io
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from inlay.cli import main
from inlay.client import EmbeddedPrompt, load, loads
from inlay.tensors import ReadLimits, TensorFormat, read, write

pytestmark = pytest.mark.extensions("tools")

ROWS = np.random.default_rng(0).normal(0, 0.3, (5, 48)).astype(np.float32)
FORMATS: tuple[TensorFormat, ...] = ("torch", "safetensors", "npy")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def convert(path: Path, out: Path, *words: str) -> int:
    return main(["embeds", "convert", str(path), "--output", str(out), *words], {})


@pytest.mark.parametrize("start", FORMATS)
@pytest.mark.parametrize("end", FORMATS)
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16", "float64"])
def test_values_are_those_that_were_there_in_the_wanted_type(
    start: TensorFormat, end: TensorFormat, dtype: str, tmp_path: Path
) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    path.write_bytes(write(ROWS, start, table_id=None if start == "npy" else "table-1"))
    status = convert(path, out, "--format", end, "--dtype", dtype)
    if end == "npy" and dtype == "bfloat16":
        assert status == 2
        assert not out.exists()
        return
    assert status == 0
    wanted = np.dtype(DTYPES.get(dtype, np.float64 if dtype == "float64" else np.float32))
    found = load(out)
    assert found.rows.dtype == wanted
    np.testing.assert_array_equal(found.rows, ROWS.astype(wanted))
    assert found.table_id == (None if "npy" in (start, end) else "table-1")


def test_the_libraries_of_the_formats_read_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(EmbeddedPrompt(ROWS).to_bytes())
    for format in FORMATS:
        assert convert(path, tmp_path / format, "--format", format) == 0
    expected = torch.from_numpy(ROWS)
    loaded = torch.load(tmp_path / "torch", weights_only=True)  # noqa: TID251 - of our own writing
    assert torch.equal(loaded, expected)
    (stored,) = load_file(tmp_path / "safetensors").values()
    assert torch.equal(stored, expected)
    np.testing.assert_array_equal(np.load(tmp_path / "npy"), ROWS)


def test_what_was_rounded_and_lost_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    path.write_bytes(EmbeddedPrompt(ROWS, "table-1").to_bytes())
    assert convert(path, out, "--dtype", "float16", "--format", "npy") == 0
    error = capsys.readouterr().err
    assert f"of {ROWS.size} values rounded" in error
    assert "without the table id" in error
    assert convert(path, out, "--dtype", "float16", "-o", "json") == 0
    said = json.loads(capsys.readouterr().out)
    rounded = int((ROWS.astype(np.float16).astype(np.float32) != ROWS).sum())
    assert said["rounded"] == rounded > 0
    assert (said["dtype"], said["shape"]) == ("float16", [5, 48])
    assert said["table_id"] == "table-1"
    assert said["bytes"] == out.stat().st_size


def test_batches_base64_and_pipes_are_converted(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = np.stack([ROWS, -ROWS])
    given = io.TextIOWrapper(io.BytesIO(EmbeddedPrompt(ROWS).to_base64().encode()))
    monkeypatch.setattr(sys, "stdin", given)
    assert main(["embeds", "convert", "-", "--format", "torch"], {}) == 0
    (prompt,) = loads(capsysbinary.readouterr().out)
    np.testing.assert_array_equal(prompt.rows, ROWS)
    path = tmp_path / "batch"
    path.write_bytes(write(batch, "npy"))
    assert main(["embeds", "convert", str(path), "--base64"], {}) == 0
    first, second = loads(capsysbinary.readouterr().out)
    np.testing.assert_array_equal(np.stack([first.rows, second.rows]), batch)


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (["nowhere"], "nowhere: No such file", 2),
        (["huge", "--dtype", "float16", "--output", "out"], "no room for 1 of the values", 2),
        (["huge", "-o", "json"], "needs --output FILE", 2),
        (["huge", "--output", "/nowhere/out"], "--output /nowhere/out: No such file", 2),
        (["text", "--output", "out"], "text: must be a torch.Tensor", 1),
        (["huge", "--dtype", "int8", "--output", "out"], "--dtype: must be 'auto'", 2),
    ],
)
def test_what_cannot_be_converted_is_one_line_and_writes_nothing(
    words: list[str],
    said: str,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ROWS.copy()
    rows[2, 3] = 1e6
    Path("huge").write_bytes(EmbeddedPrompt(rows).to_bytes())
    Path("text").write_text("no tensor at all " * 20)
    assert main(["embeds", "convert", *words], {}) == status
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not Path("out").exists()


def test_the_grid_of_an_images_rows_is_kept_or_missed_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    path.write_bytes(write(ROWS, "safetensors", grid=(1, 5, 1)))
    assert convert(path, out, "--dtype", "bfloat16") == 0
    data = out.read_bytes()
    assert read(data, limits=ReadLimits(max_bytes=len(data))).grid == (1, 5, 1)
    assert convert(path, out, "--format", "torch") == 2
    assert "no place for the grid" in capsys.readouterr().err


def test_rows_that_a_server_would_refuse_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[0, 0], rows[1, 1] = np.nan, np.inf
    path, out = tmp_path / "in", tmp_path / "out"
    path.write_bytes(EmbeddedPrompt(rows).to_bytes())
    assert convert(path, out, "--dtype", "bfloat16") == 0
    found = load(out).rows.astype(np.float32)
    assert np.isnan(found[0, 0])
    assert np.isinf(found[1, 1])
