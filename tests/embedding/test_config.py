"""The files of an embedding model are read, or the field that cannot be is named."""

import json
from pathlib import Path

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.embedding.config import EmbeddingConfig

_SAID = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("file", "field", "value", "kind"),
    [
        (_SAID, "prompts", ["query: "], "an object"),
        (_SAID, "prompts", "query: ", "an object"),
        (_SAID, "default_prompt_name", ["query"], "a string"),
        (_SAID, "activation_fn", {"a": 1}, "a string"),
        ("sentence_bert_config.json", "max_seq_length", "512", "a number"),
        ("tokenizer_config.json", "model_max_length", [512], "a number"),
    ],
)
def test_a_field_of_another_type_is_named_with_its_file(
    tmp_path: Path, file: str, field: str, value: object, kind: str
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    (tmp_path / file).write_text(json.dumps({field: value}))
    with pytest.raises(InvalidRequestError, match=f"{file}: {field} must be {kind}, got "):
        EmbeddingConfig.read(tmp_path)


def test_a_prompt_that_is_no_string_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    (tmp_path / _SAID).write_text('{"prompts": {"query": ["a", "b"]}}')
    with pytest.raises(InvalidRequestError, match=f"{_SAID}: query must be a string"):
        EmbeddingConfig.read(tmp_path)


def test_empty_fields_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    (tmp_path / _SAID).write_text('{"prompts": {"query": null, "document": "d: "}}')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": null}')
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    found = EmbeddingConfig.read(tmp_path)
    assert found.prompts == {"query": "", "document": "d: "}
    assert (found.max_length, found.default_prompt) == (None, None)
