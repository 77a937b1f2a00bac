"""The ids of the text that numbers are compared by are kept: a tokenizer is read for them once."""

import json
import shutil
from pathlib import Path

import pytest

from inlay.engine import check_text
from inlay.engine.check_text import text_ids
from inlay.render.tokenizer import load_tokenizer
from tests.render.directories import llama_like, qwen_like


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which ids are kept; this process knows none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(check_text, "_known", {})
    return tmp_path / "cache" / "inlay" / "tokenizers"


def large(directory: Path) -> Path:
    """A model with a tokenizer of over a megabyte."""
    shutil.copytree(qwen_like(), directory)
    file = directory / "tokenizer.json"
    form = json.loads(file.read_text())
    size = len(form["model"]["vocab"]) + len(form["added_tokens"])
    form["model"]["vocab"] |= {f"{number}{'x' * 60}": size + number for number in range(20_000)}
    file.write_text(json.dumps(form))
    return directory


def first_ids(directory: Path) -> tuple[int, ...]:
    return tuple(load_tokenizer(directory).tokenizer.encode(check_text._TEXT).ids[:20])


def test_ids_are_those_of_each_tokenizer() -> None:
    for directory in (qwen_like(), llama_like(), qwen_like()):
        assert text_ids(directory, 1000, 20) == first_ids(directory)
    assert first_ids(qwen_like()) != first_ids(llama_like())


def test_ids_of_a_large_tokenizer_are_kept_for_later_starts(tmp_path: Path, kept: Path) -> None:
    directory = large(tmp_path / "model")
    ids = text_ids(directory, 100_000, 20)
    (file,) = kept.iterdir()
    assert ids == first_ids(directory) == tuple(json.loads(file.read_text())[:20])
    check_text._known.clear()
    file.write_text(json.dumps([7] * 20))
    assert text_ids(directory, 100_000, 20) == (7,) * 20
    assert text_ids(directory, 100_000, 21) == ()
    assert text_ids(directory, 7, 20) == ()


@pytest.mark.parametrize("data", [b"", b"{}", b'["a"]', b"\xff", b"[]", b"[-1, 2]"])
def test_kept_ids_that_are_damaged_are_made_again(tmp_path: Path, kept: Path, data: bytes) -> None:
    directory = large(tmp_path / "model")
    text_ids(directory, 100_000, 20)
    (file,) = kept.iterdir()
    check_text._known.clear()
    file.write_bytes(data)
    assert text_ids(directory, 100_000, 20) == first_ids(directory)


def test_without_a_cache_a_tokenizer_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    directory = large(tmp_path / "model")
    assert text_ids(directory, 100_000, 20) == first_ids(directory)
    assert next(iter(check_text._known.values()))[:20] == first_ids(directory)


def test_small_tokenizers_are_not_kept_and_wrong_ones_have_no_ids(
    tmp_path: Path, kept: Path
) -> None:
    text_ids(qwen_like(), 1000, 20)
    assert not kept.exists()
    assert text_ids(tmp_path, 1000, 20) == ()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert text_ids(tmp_path, 1000, 20) == ()
