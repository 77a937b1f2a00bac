"""Rows that pass every check and overflow inside the model.

Their request fails, and nobody else notices.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.equality.reference import rows_of, tokenizer_of
from tests.models import make
from tests.payloads import HIDDEN, saved
from tests.security.company import Question, questions, refused, settings, shown, under_attack
from tests.serving import Served, serving

TRAP = 7
"""A channel in which every token's embedding is zero, and which nothing in the model writes to."""

PAGES = 24
PAGE_BYTES = 16 * 2 * 2 * 8 * 2
"""Elements of a page of 16 positions: layers, heads, head size, keys and values."""


def trapped(directory: Path, dtype: str) -> Path:
    """A Llama that is itself for tokens, and overflows where a row is not zero in channel `TRAP`."""
    make("llama", directory, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    huge = torch.finfo(getattr(torch, dtype)).max / 4
    with torch.no_grad():
        model.model.embed_tokens.weight[:, TRAP] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[TRAP] = 0
            layer.mlp.down_proj.weight[TRAP] = 0
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.up_proj):
                projection.weight[:, TRAP] = huge
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def path(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trapped(tmp_path_factory.mktemp(f"trapped-{dtype}") / "model", dtype)


@pytest.fixture(scope="module")
def server(path: Path, dtype: str) -> Iterator[Served]:
    # Few pages, so that those of a failed request are the next ones to be handed out.
    size = PAGES * PAGE_BYTES * torch.finfo(getattr(torch, dtype)).bits // 8
    options = ("--max-model-len", 192, "--kv-cache-memory-bytes", size, "--enable-prompt-embeds")
    with serving(path, "--served-model-name", "m", *options) as served:
        yield served


@pytest.fixture(scope="module")
def asked(path: Path, dtype: str, server: Served) -> tuple[Question, ...]:
    found = questions(path)
    if dtype == "float32":
        return found
    # In bfloat16 the reference may differ in the last bit; what is asked for is that nothing
    # changes.
    with httpx.Client(base_url=server.url, timeout=180) as client:
        answers = [shown(client.post(one.path, json=one.body).json()) for one in found]
    return tuple(
        Question(one.path, one.body, answer) for one, answer in zip(found, answers, strict=True)
    )


@pytest.mark.thorough
def test_rows_that_overflow_in_the_model_fail_alone(
    server: Served, asked: tuple[Question, ...], path: Path
) -> None:
    rows = rows_of(
        path, tokenizer_of(path).encode("the harbour town counts its lanterns " * 6)[:100]
    )
    bad = rows.clone()
    bad[40:, TRAP] = 1.0
    assert rows.shape == (len(rows), HIDDEN)
    assert len(rows) > 40

    def attack(client: httpx.Client) -> None:
        body = {"prompt_embeds": saved(bad), **settings()}
        for more in ({}, {"logprobs": 3}, {"n": 2, "temperature": 1.0}, {"cache_salt": "a"}):
            response = client.post("/v1/completions", json={**body, **more})
            refused(response, 400, "not finite")
        # A prompt that begins alike shares the good pages and none of the bad.
        good = client.post("/v1/completions", json={"prompt_embeds": saved(rows), **settings()})
        assert good.status_code == 200, good.text

    under_attack(server, asked, [attack])


@pytest.mark.thorough
def test_a_stream_that_overflows_ends_with_a_status_and_not_with_text(
    server: Served, asked: tuple[Question, ...], path: Path
) -> None:
    bad = rows_of(path, tokenizer_of(path).encode("count the lanterns")).clone()
    bad[-1, TRAP] = -1.0
    body = {"prompt_embeds": saved(bad), **settings(), "stream": True}

    def attack(client: httpx.Client) -> None:
        refused(client.post("/v1/completions", json=body), 400, "not finite")

    under_attack(server, asked, [attack])
