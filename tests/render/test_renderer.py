"""Tokenizing as transformers does on the same directory; single tokens.

Directories that cannot be served.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from inlay.base.errors import InvalidRequestError
from inlay.render import Renderer
from tests.models import tiny
from tests.render.directories import (
    CORPUS,
    KINDS,
    byte_fallback,
    llama_like,
    qwen_like,
    renderer,
    save,
)

DIRECTORIES = {"qwen": qwen_like, "llama": llama_like}

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading and trailing  ",
    "special <|im_start|>user<|im_end|> <s> </s> <think> in text",
    "cafe\u0301 \u212b \x00 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "a\r\n\r\n\tb" * 20,
]


@pytest.fixture(params=DIRECTORIES)
def directory(request: pytest.FixtureRequest) -> Path:
    return DIRECTORIES[request.param]()


def test_ids_are_those_of_transformers(directory: Path) -> None:
    ours, theirs = Renderer.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert list(ids) == theirs(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip
                )


@given(st.text(max_size=40))
def test_ids_of_any_text_are_those_of_transformers(text: str) -> None:
    for make in DIRECTORIES.values():
        assert list(ours_of(make()).encode(text)) == transformers_of(make())(text)["input_ids"]


_loaded: dict[Path, tuple[Renderer, Any]] = {}


def _both(directory: Path) -> tuple[Renderer, Any]:
    if directory not in _loaded:
        _loaded[directory] = (Renderer.load(directory), AutoTokenizer.from_pretrained(directory))
    return _loaded[directory]


def ours_of(directory: Path) -> Renderer:
    return _both(directory)[0]


def transformers_of(directory: Path) -> Any:
    return _both(directory)[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
        {"sep_token": "[SEP]"},
        {"extra_special_tokens": ["<a>", "<b>"]},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {
            "added_tokens_decoder": {
                "600": {
                    "content": "<new>",
                    "lstrip": True,
                    "rstrip": False,
                    "normalized": False,
                    "single_word": False,
                    "special": True,
                }
            }
        },
    ],
    ids=lambda changes: ",".join(changes),
)
def test_what_the_configuration_adds_is_added_as_transformers_adds_it(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    directory = save(
        byte_fallback(), tmp_path / "m", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    ours, theirs = Renderer.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in ("town <a> [SEP] <image> <new> hill", "a [SEP]<b>"):
        for special in (True, False):
            assert (
                list(ours.encode(text, add_special_tokens=special))
                == theirs(text, add_special_tokens=special)["input_ids"]
            )
    assert ours.vocab_size == len(theirs)


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = Renderer.load(tmp_path)
    assert 4 < len(ours.encode("What is the capital of the island?")) < 32


def test_a_directory_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"has no tokenizer\.json.*save_pretrained"
    ) as caught:
        Renderer.load(tmp_path)
    assert caught.value.param == "model"
    with pytest.raises(InvalidRequestError, match=r"has no tokenizer\.json"):
        Renderer.load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"five": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    shutil.copytree(llama_like(), tmp_path / "m")
    (tmp_path / "m" / name).write_text(content)
    with pytest.raises(InvalidRequestError, match=name.replace(".", r"\.")):
        Renderer.load(tmp_path / "m")


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="valid Unicode"):
        renderer("byte_level").encode("a\ud800b")


@pytest.mark.parametrize("ids", [[-1], [2**32], [1, 2**70]])
def test_ids_that_cannot_be_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match=f"token id {ids[-1]} is not one"):
        renderer("byte_level").decode(ids)
    assert renderer("byte_level").token_text(ids[-1]) == ""


def test_ids_without_a_token_stand_for_nothing() -> None:
    of = renderer("byte_level")
    assert of.decode([of.vocab_size, *of.encode("town"), 2**31]) == "town"
    assert of.token_text(of.vocab_size) == ""
    assert of.token_bytes(of.vocab_size) == []


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_bytes_of_single_tokens_join_to_the_text(kind: str) -> None:
    of = renderer(kind)
    for text in [*CORPUS, "🙂 and 漢字"]:
        ids = of.encode(text, add_special_tokens=False)
        data = bytes(byte for id_ in ids for byte in of.token_bytes(id_))
        assert data.decode().removeprefix(" ") == text
        for id_ in ids:
            assert of.token_text(id_) == bytes(of.token_bytes(id_)).decode("utf-8", "replace")


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"sparse"}))
def test_the_text_of_a_token_keeps_its_leading_space(kind: str) -> None:
    of = renderer(kind)
    texts = [of.token_text(id_) for id_ in of.encode("a town in a book", add_special_tokens=False)]
    assert "".join(texts).strip() == "a town in a book"
    assert any(text.startswith(" ") for text in texts[1:])


def test_special_tokens_read_as_they_are_written() -> None:
    of = renderer("byte_level")
    (id_,) = of.encode("<|im_end|>")
    assert of.token_text(id_) == "<|im_end|>"
    assert of.token_bytes(id_) == list(b"<|im_end|>")


def test_the_directories_other_tests_use_are_read() -> None:
    of = Renderer.load(tiny("llama"))
    assert of.decode(of.encode("Hello world")) == "Hello world"


def test_many_threads_may_use_one_renderer() -> None:
    of = Renderer.load(qwen_like())
    texts = [f"{text} {number}" for number in range(20) for text in CORPUS]
    expected = [of.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(of.encode, texts)) == expected
        assert list(pool.map(lambda ids: of.decode(ids), expected)) == texts
