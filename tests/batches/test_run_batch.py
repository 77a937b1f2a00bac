"""`inlay run-batch`: a file of requests from a shell."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.batches.test_batches import COMPLETION, line


def run_batch(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "inlay.cli", "run-batch", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )


def read(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(each) for each in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in rows}) == len(rows)
    return {each["custom_id"]: each for each in rows}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b"".join(line(f"a{n}", "/v1/completions", COMPLETION) for n in range(20))
        + line("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}]})
        + line("bad", "/v1/completions", {**COMPLETION, "max_tokens": -1})
    )
    return path


def test_a_file_is_answered_and_goes_on_after_it_was_cut(
    plain_url: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = (source, "-o", out, "--url", f"{plain_url}/v1", "--max-inflight", 4)
    done = run_batch(*words)
    assert done.returncode == 1, done.stderr
    assert "22 of 22 lines, 1 failed" in done.stderr
    whole = read(out)
    assert set(whole) == {*(f"a{n}" for n in range(20)), "chat", "bad"}
    assert whole["bad"]["response"]["status_code"] == 400
    assert whole["bad"]["response"]["body"]["error"]["param"] == "max_tokens"

    assert "--resume goes on with it" in run_batch(*words).stderr
    kept = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(kept[:9]) + kept[9][:30])
    done = run_batch(*words, "--resume")
    again = read(out)
    assert set(again) == set(whole)
    for id_ in (f"a{n}" for n in range(20)):
        texts = [each[id_]["response"]["body"]["choices"][0]["text"] for each in (whole, again)]
        # A line that was asked again has the same seed.
        assert texts[0] == texts[1]


def test_a_bad_line_is_told_with_its_number_and_nothing_is_asked(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = line("a", "/v1/completions", COMPLETION)
    source.write_bytes(good + b"{\n" + good)
    done = run_batch(source, "-o", out, "--url", "http://127.0.0.1:1/v1")
    assert done.returncode == 2
    assert f"{source}:2: the line is not a JSON object" in done.stderr
    assert f"{source}:3: custom_id is that of line 1" in done.stderr
    assert not out.exists()
    source.write_bytes(b"\n")
    assert "has no lines" in run_batch(source, "-o", out).stderr
    assert "need --model" in run_batch(source, "-o", out, "--", "--port", "1").stderr
