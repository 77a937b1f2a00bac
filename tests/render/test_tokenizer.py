"""Tokenizers that are read once, and handed on as texts: they are what `load_tokenizer` reads."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from inlay.base.errors import InvalidRequestError
from inlay.engine.grammar.matchers import compiled, tokenizer_of
from inlay.engine.grammar.source import source_of
from inlay.messages.request import Grammar
from inlay.render.tokenizer import keep_tokenizer, load_tokenizer, tokenizer_text
from tests.gguf_models import gguf_of
from tests.models import tiny
from tests.render.directories import CORPUS, llama_like, qwen_like

SCHEMA = {
    "type": "object",
    "properties": {
        "the number of lanterns": {"type": "integer"},
        "name": {"type": "string", "maxLength": 30},
        "of": {"enum": ["straße", "東京", "the harbour town"]},
    },
    "required": ["the number of lanterns", "name", "of"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("json_object", ""),
    Grammar("regex", r"(yes|no), because [a-z ]{3,40}\."),
    Grammar("choice", '["the harbour town", "the hill", "ü (x)"]'),
    Grammar("grammar", 'start: "the town counts " NAME ("and " NAME)? "."\nNAME: /[a-z\\s]+/'),
)


@pytest.fixture(params=["byte level", "bytes where unknown", "GGUF"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "GGUF":
        return gguf_of(tiny("qwen2"), tmp_path / "m.gguf")
    return {"byte level": qwen_like, "bytes where unknown": llama_like}[request.param]()


def changed(directory: Path, to: Path, name: str, **values: Any) -> Path:
    shutil.copytree(directory, to)
    of = json.loads((directory / name).read_text())
    (to / name).write_text(json.dumps(of | values))
    return to


def allowed(matcher: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(matchers: Iterable[LLMatcher], seed: int) -> None:
    """Take the same random tokens with all, and see that all allow and force the same."""
    first, *others = matchers
    draw = np.random.default_rng(seed)
    for _ in range(80):
        if first.is_stopped():
            break
        tokens = allowed(first)
        assert tokens
        assert all(allowed(other) == tokens for other in others)
        assert all(other.compute_ff_tokens() == first.compute_ff_tokens() for other in others)
        token = int(draw.choice(tokens))
        for matcher in (first, *others):
            assert matcher.consume_token(token)


def test_the_text_of_a_file_makes_the_same_masks(directory: Path) -> None:
    text, loaded = tokenizer_text(directory), load_tokenizer(directory).tokenizer
    assert text != loaded.to_str(), "the file's own text is handed on"
    assert Tokenizer.from_str(text).to_str() == loaded.to_str()
    ours, whole = tokenizer_of(directory, (2,)), LLTokenizer(loaded.to_str(), eos_token=[2])
    for token in range(whole.vocab_size):
        assert ours.decode_bytes([token]) == whole.decode_bytes([token])
        assert ours.dbg_tokens([token]) == whole.dbg_tokens([token])
    assert (ours.vocab_size, ours.eos_tokens) == (whole.vocab_size, whole.eos_tokens)
    for line in (*CORPUS, "<|im_start|>user<|im_end|></s>", "e\u0301"):
        assert ours.tokenize_str(line) == whole.tokenize_str(line)
    for grammar in GRAMMARS:
        source = source_of(grammar)
        for seed in range(3):
            walk((compiled(of, grammar.kind, source) for of in (ours, whole)), seed)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"extra_special_tokens": ["<|tool|>"]}),
        ("tokenizer_config.json", {"bos_token": {"content": "<|begin|>"}}),
        ("tokenizer.json", {"padding": {
            "strategy": {"Fixed": 5}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "x",
        }}),
        ("tokenizer.json", {"truncation": {
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
        }}),
    ],
)  # fmt: skip
def test_what_loading_changes_is_in_the_text(
    tmp_path: Path, name: str, values: dict[str, Any]
) -> None:
    directory = changed(qwen_like(), tmp_path / "model", name, **values)
    loaded = load_tokenizer(directory).tokenizer
    text = tokenizer_text(directory)
    assert text == loaded.to_str() != (directory / "tokenizer.json").read_text()
    form = json.loads(text)
    assert form["truncation"] is form["padding"] is None


def test_a_mark_of_byte_order_and_spaces_are_no_part_of_the_text(tmp_path: Path) -> None:
    directory = changed(qwen_like(), tmp_path / "model", "tokenizer.json")
    file = directory / "tokenizer.json"
    file.write_bytes(b"\xef\xbb\xbf \n" + file.read_bytes())
    assert tokenizer_text(directory).startswith("{")
    assert tokenizer_of(directory, ()).vocab_size == tokenizer_of(qwen_like(), ()).vocab_size


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"added_tokens": []}', b"\xff"])
def test_a_text_that_is_none_is_refused_as_when_it_is_loaded(tmp_path: Path, data: bytes) -> None:
    directory = changed(qwen_like(), tmp_path / "model", "tokenizer.json")
    (directory / "tokenizer.json").write_bytes(data)
    with pytest.raises(InvalidRequestError) as loaded:
        load_tokenizer(directory)
    with pytest.raises(InvalidRequestError) as made:
        tokenizer_of(directory, ())
    assert made.value.message == loaded.value.message


def test_a_tokenizer_that_was_kept_is_loaded_once(tmp_path: Path) -> None:
    directory = changed(qwen_like(), tmp_path / "model", "tokenizer.json")
    keep_tokenizer(directory)
    # It is the one that was read: the file cannot be read any more.
    status = (directory / "tokenizer.json").stat()
    (directory / "tokenizer.json").write_bytes(b"x" * status.st_size)
    os.utime(directory / "tokenizer.json", ns=(status.st_atime_ns, status.st_mtime_ns))
    first = load_tokenizer(directory / ".." / "model").tokenizer
    assert first.to_str() == load_tokenizer(qwen_like()).tokenizer.to_str()
    with pytest.raises(InvalidRequestError, match="cannot read"):
        load_tokenizer(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_was_kept_is_not_used_once_its_files_have_changed(
    tmp_path: Path, name: str
) -> None:
    directory = changed(qwen_like(), tmp_path / "model", "tokenizer.json")
    keep_tokenizer(directory)
    (directory / name).write_bytes((directory / name).read_bytes() + b"!")
    with pytest.raises(InvalidRequestError, match="cannot read"):
        load_tokenizer(directory)
