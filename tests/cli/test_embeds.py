"""`inlay embeds encode` and `inlay embeds inspect`, as a user types them."""

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pybase64
import pytest

from inlay.cli import main
from inlay.client import EmbeddedPrompt, PromptEmbedder, load, loads
from tests.models import tiny

pytestmark = pytest.mark.extensions("tools")

TEXT = "the harbour town counts"
MESSAGES = [{"role": "user", "content": "Where is the town?"}]


@pytest.fixture
def model() -> str:
    return str(tiny("llama", "bfloat16"))


def failed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 2) -> str:
    assert main(words, {}) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("base64", [[], ["--base64"]])
def test_encoded_text_is_what_the_client_makes(
    model: str, format: str, base64: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows"
    words = [
        "embeds",
        "encode",
        "--model",
        model,
        "--text",
        TEXT,
        "--format",
        format,
        "--output",
        str(path),
        *base64,
    ]
    assert main(words, {}) == 0
    expected = PromptEmbedder.from_pretrained(model).embed(TEXT)
    written = load(path)
    np.testing.assert_array_equal(written.rows, expected.rows)
    assert written.table_id == expected.table_id
    assert f"{expected.num_tokens} rows of 48, bfloat16" in capsys.readouterr().err
    if base64:
        pybase64.b64decode(path.read_bytes().strip(), validate=True)


def test_what_was_encoded_is_told_as_json(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows"
    words = ["embeds", "encode", "--model", model, "--text", TEXT, "-o", "json"]
    assert main([*words, "--output", str(path)], {}) == 0
    said = json.loads(capsys.readouterr().out)
    expected = PromptEmbedder.from_pretrained(model).embed(TEXT)
    assert said == {
        "file": str(path),
        "format": "safetensors",
        "dtype": "bfloat16",
        "shape": [expected.num_tokens, 48],
        "bytes": path.stat().st_size,
        "table_id": expected.table_id,
    }
    assert "needs --output FILE" in failed(capsys, *words, status=2)


def test_text_and_messages_come_from_standard_input(
    model: str, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = PromptEmbedder.from_pretrained(model)
    feed(monkeypatch, TEXT.encode())
    assert main(["embeds", "encode", "--model", model], {}) == 0
    (prompt,) = loads(capsysbinary.readouterr().out)
    np.testing.assert_array_equal(prompt.rows, embedder.embed(TEXT).rows)
    feed(monkeypatch, json.dumps(MESSAGES).encode())
    assert main(["embeds", "encode", "--model", model, "--messages", "-", "--base64"], {}) == 0
    (prompt,) = loads(capsysbinary.readouterr().out)
    np.testing.assert_array_equal(prompt.rows, embedder.embed_messages(MESSAGES).rows)


def test_messages_come_from_a_file_bare_or_as_a_request_has_them(
    model: str, tmp_path: Path
) -> None:
    path, out = tmp_path / "chat.json", tmp_path / "rows"
    expected = PromptEmbedder.from_pretrained(model).embed_messages(MESSAGES)
    for content in (MESSAGES, {"messages": MESSAGES}):
        path.write_text(json.dumps(content))
        words = [
            "embeds",
            "encode",
            "--model",
            model,
            "--messages",
            str(path),
            "--output",
            str(out),
        ]
        assert main(words, {}) == 0
        np.testing.assert_array_equal(load(out).rows, expected.rows)


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (["--text", "a", "--messages", "x"], "cannot both be given", 2),
        (["--messages", "nowhere.json"], "--messages nowhere.json: No such file", 2),
        (["--text", ""], "the text has no tokens", 1),
        (["--text", "a", "--output", "/nowhere/rows"], "--output /nowhere/rows: No such file", 2),
        (
            ["--text", "a", "--format", "pickle"],
            "--format: must be 'safetensors', 'torch' or 'npy', got 'pickle'",
            2,
        ),
        (["--text", "a", "--format", "npy", "--output", "x"], "npy format has no bfloat16", 2),
        (
            ["--text", "a", "--format", "npy", "--output", "x"],
            "cast the rows to float32 (--format, --dtype)",
            2,
        ),
        (
            ["--text", "a", "--dtype", "float16", "--output", "x"],
            "float16 does not hold bfloat16 rows exactly",
            2,
        ),
    ],
)
def test_what_cannot_be_encoded_is_said_in_one_line(
    model: str, words: list[str], said: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in failed(capsys, "embeds", "encode", "--model", model, *words, status=status)


def test_rows_in_a_wider_dtype_hold_the_same_values(model: str, tmp_path: Path) -> None:
    own = PromptEmbedder.from_pretrained(model).embed("a lantern")
    out = tmp_path / "rows.npy"
    words = ["--text", "a lantern", "--format", "npy", "--dtype", "float32", "--output", str(out)]
    assert main(["embeds", "encode", "--model", model, *words], {}) == 0
    rows = load(out).rows
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows.astype(own.rows.dtype), own.rows)


def test_a_missing_file_is_no_reason_to_read_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--help" not in failed(capsys, "embeds", "inspect", "nowhere.safetensors")


@pytest.mark.parametrize("content", ["[1]", '"text"', "{", '{"messages": 3}'])
def test_messages_that_are_none_are_said_in_one_line(
    model: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat.json"
    path.write_text(content)
    error = failed(capsys, "embeds", "encode", "--model", model, "--messages", str(path))
    assert "must be a list of messages" in error or "not JSON" in error


def test_a_model_that_is_not_there_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = failed(capsys, "embeds", "encode", "--model", "/nowhere", "--text", "a", status=1)
    assert "'/nowhere' is not a directory" in error


def test_inspect_reads_the_text_back_out_of_rows_from_the_table(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedder = PromptEmbedder.from_pretrained(model)
    prompt = embedder.embed(TEXT)
    path = tmp_path / "rows"
    path.write_bytes(prompt.to_bytes())
    assert main(["embeds", "inspect", str(path), "--model", model], {}) == 0
    out = capsys.readouterr().out
    assert f"shape   {prompt.num_tokens} rows of 48" in out
    assert "dtype   bfloat16" in out
    assert f"table   {embedder.table.id}, the model's" in out
    assert f"exact   {prompt.num_tokens} of {prompt.num_tokens} rows" in out
    ids = [int(found) for found in re.findall(r"^ +\d+ +[\d.]+ +(\d+)  .*  exact$", out, re.M)]
    assert embedder.renderer.decode(ids, skip_special_tokens=True) == TEXT


def test_inspect_shows_the_nearest_tokens_and_norms_of_other_rows(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = PromptEmbedder.from_pretrained(model).embed(TEXT).rows.astype(np.float32)
    noisy = rows + np.random.default_rng(0).normal(0, 0.01, rows.shape).astype(np.float32)
    path = tmp_path / "rows.npy"
    np.save(path, np.stack([noisy, np.zeros_like(noisy)]))
    assert main(["embeds", "inspect", str(path), "--model", model, "--top", "3"], {}) == 0
    out = capsys.readouterr().out
    assert "prompt 0\n" in out
    assert "table   not stamped; the model's is " in out
    assert f"exact   0 of {len(rows)} rows" in out
    norms = np.sort(np.linalg.norm(noisy.astype(np.float64), axis=1))
    assert f"norms   {norms[0]:.4g} to {norms[-1]:.4g}, median {np.median(norms):.4g}" in out
    table = out[: out.index("prompt 1")].splitlines()[8:]
    assert len(table) == 3 * len(rows)


def test_inspect_without_a_model_and_with_another_says_what_it_can(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, wider = str(tiny("qwen3")), str(tiny("qwen2"))
    capsys.readouterr()
    path = tmp_path / "rows"
    prompt = PromptEmbedder.from_pretrained(model).embed(TEXT)
    path.write_bytes(prompt.to_base64().encode())
    assert main(["embeds", "inspect", str(path)], {}) == 0
    assert f"table   {prompt.table_id}\n" in capsys.readouterr().out
    assert main(["embeds", "inspect", str(path), "--model", other], {}) == 0
    assert "made for another model" in capsys.readouterr().out
    error = failed(capsys, "embeds", "inspect", str(path), "--model", wider, status=1)
    assert "hidden size 48, the table's is 64" in error


def test_inspect_tells_of_rows_a_server_would_refuse(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.ones((3, 48), np.float32)
    rows[1, 5] = np.nan
    feed(monkeypatch, EmbeddedPrompt(rows).to_bytes())
    assert main(["embeds", "inspect", "-", "--model", model], {}) == 0
    out = capsys.readouterr().out
    assert "finite  no: 1 rows" in out
    assert re.search(r"^ +1 +nan  not finite$", out, re.M)


@pytest.mark.parametrize(
    ("data", "said", "status"),
    [
        (None, "rows: No such file", 2),
        (b"hello", "rows: decoded data must be at least 100 bytes", 1),
        (b"\0" * 200, "rows: must be a torch.Tensor", 1),
        (b"A" * 401, "rows: not valid base64", 1),
    ],
)
def test_a_file_that_is_no_embeddings_is_said_in_one_line(
    data: bytes | None, said: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows"
    if data is not None:
        path.write_bytes(data)
    assert said in failed(capsys, "embeds", "inspect", str(path), status=status)


def test_standard_input_that_is_no_embeddings_is_called_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"\0" * 200)
    said = failed(capsys, "embeds", "inspect", "-", status=1)
    assert "standard input: must be a torch.Tensor" in said


def test_inspect_prints_json_for_programs(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedder = PromptEmbedder.from_pretrained(model)
    rows = embedder.embed(TEXT).rows.astype(np.float32)
    rows[1, 5] = np.nan
    path = tmp_path / "rows.npy"
    np.save(path, rows)
    assert main(["embeds", "inspect", str(path), "--model", model, "-o", "json"], {}) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["num_tokens"], found["hidden_size"], found["dtype"]) == (*rows.shape, "float32")
    assert (found["table_id"], found["model_table_id"]) == (None, embedder.table.id)
    assert found["rows"][1] == {"norm": None}
    ids = embedder.renderer.encode(TEXT)
    for index, row in enumerate(found["rows"]):
        if index != 1:
            assert row["nearest"][0]["token_id"] == ids[index]
            assert row["norm"] == pytest.approx(np.linalg.norm(rows[index].astype(np.float64)))
