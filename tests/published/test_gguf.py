"""A published GGUF file answers as the directory that transformers makes of it."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors import safe_open
from scripts.published import file_of

from inlay.client import PromptEmbedder
from inlay.engine.torch.weights.gguf import dense
from inlay.render import Renderer
from inlay.tensors.checkpoint import stored_tensors
from tests.published.conftest import Servers, checkpoint
from tests.published.forms import all_forms_have_one_answer
from tests.published.numbers import Steps, expect_checked
from tests.published.prompts import CODE, GEMMA, QWEN, TEXTS
from tests.serving import Served

pytestmark = [
    pytest.mark.published,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("name", [GEMMA, QWEN]),
]

SOURCES = sorted(Path(np.__file__).parent.glob("lib/*.py"))[:12]
"""Texts of many kinds of words, spaces and signs."""


def said(server: Served) -> list[Steps]:
    with httpx.Client(base_url=server.url, timeout=400) as http:
        return [Steps.of(http, text) for text in TEXTS[:3]]


def test_weights_are_those_of_transformers_bit_for_bit(name: str) -> None:
    with safe_open(checkpoint(name) / "model.safetensors", framework="pt") as file:
        tensors = {tensor.name: tensor for tensor in stored_tensors(file_of(name))}
        assert tensors.keys() == {*file.keys()}
        for key, tensor in tensors.items():
            assert torch.equal(dense(tensor, torch.bfloat16), file.get_tensor(key)), key


def test_ids_are_those_of_the_published_tokenizer(name: str) -> None:
    directory, file = (Renderer.load(path) for path in (checkpoint(name), file_of(name)))
    texts = [*TEXTS, "cafe\u0301  a\t\t\tb\n\n\n", *(path.read_text() for path in SOURCES)]
    for text in texts:
        ids = file.encode(text)
        assert ids == directory.encode(text)
        assert file.decode(ids) == directory.decode(ids)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello, world!"}]
    assert file.chat_templates == directory.chat_templates
    if file.chat_templates:
        assert file.chat(messages).token_ids() == directory.chat(messages).token_ids()


def test_rows_are_those_of_the_directory(name: str) -> None:
    directory, file = (
        PromptEmbedder.from_pretrained(path).embed(CODE)
        for path in (checkpoint(name), file_of(name))
    )
    assert file.rows.tobytes() == directory.rows.tobytes()
    assert file.table_id != directory.table_id


def test_answers_are_those_of_the_directory_and_one_in_every_form(
    servers: Servers, name: str
) -> None:
    # Of the directory first, whose server runs already.
    expected = said(servers.of(name))
    # Its numbers are those of the directory, which are checked.
    server = servers.of(name, "--activations", "exact", "--self-check", "off", gguf=True)
    with httpx.Client(base_url=server.url, timeout=400) as http:
        (entry,) = http.get("/v1/models").json()["data"]
    assert entry["weights_form"].startswith("GGUF (Q")
    assert entry["weights_form"].endswith("dequantised to bfloat16")
    assert said(server) == expected
    all_forms_have_one_answer(server, file_of(name), CODE, tokens=8)


def test_in_blocks_every_form_has_one_answer_too(servers: Servers, name: str) -> None:
    server = servers.of(name, gguf=True)
    with httpx.Client(base_url=server.url, timeout=400) as http:
        expect_checked(http)
        (entry,) = http.get("/v1/models").json()["data"]
    assert entry["weights_form"].endswith("activations int8")
    all_forms_have_one_answer(server, file_of(name), CODE, tokens=8)
