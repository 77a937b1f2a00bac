"""Text, ids, embeddings and any mixture of them decode greedily to the same tokens, over HTTP, in any company.

Every request goes through the real `openai` client to a real server; the expected tokens come from
plain `transformers` in float32 and must be identical.
"""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.equality.reference import greedy, rows_of, tokenizer_of
from tests.models import EOS_ID, tiny
from tests.serving import Served, serving

TOKENS = 24

TEXTS = (
    "the harbour town counts its lanterns every night and writes the number in a book",
    "Hello world, what is the capital of the island?",
    "naïve café, straße, привет",
    "It is",
    "system user assistant " * 20,
    "the town on the hill writes the number of lanterns, and the harbour counts them again " * 3,
)

VARIANTS = {
    "as it comes": (),
    "without prefix caching": ("--no-enable-prefix-caching",),
    "in chunks of 16": ("--max-num-batched-tokens", 16),
    "each step launched before the last is read": ("--async-scheduling",),
    # Pages for about 340 positions: the six texts together need more than twice that, so sequences
    # are preempted.
    "preempted": ("--max-model-len", 320, "--kv-cache-memory-bytes", "{pages:22}"),
}


def kv_bytes(path: Path, pages: int) -> int:
    """Bytes of `pages` pages of 16 positions in float32."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    elements: int = 16 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2
    return pages * elements * 4


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def path(request: pytest.FixtureRequest) -> Path:
    return tiny(request.param)


@pytest.fixture(scope="module", params=list(VARIANTS))
def server(request: pytest.FixtureRequest, path: Path) -> Iterator[Served]:
    arguments = [
        kv_bytes(path, 22) if argument == "{pages:22}" else argument
        for argument in VARIANTS[request.param]
    ]
    with serving(path, "--served-model-name", "m", "--enable-prompt-embeds", *arguments) as served:
        yield served


@pytest.fixture
async def client(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        yield client


def saved(rows: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(rows, file)
    return base64.b64encode(file.getvalue()).decode()


def expected(path: Path, ids: list[int]) -> list[int]:
    """The tokens, without the end token that a client is not shown."""
    tokens = greedy(path, rows_of(path, ids), TOKENS)
    return tokens[:-1] if tokens[-1] == EOS_ID else tokens


def ways(path: Path, text: str) -> dict[str, dict[str, Any]]:
    """The same prompt in every form completions takes."""
    ids = tokenizer_of(path).encode(text)
    rows = rows_of(path, ids)
    third, two_thirds = len(ids) // 3, 2 * len(ids) // 3
    parts = {
        "tokens, rows, tokens": [
            {"type": "token_ids", "token_ids": ids[:third]},
            {"type": "prompt_embeds", "data": saved(rows[third:two_thirds])},
            {"type": "token_ids", "token_ids": ids[two_thirds:]},
        ],
        "rows, tokens": [
            {"type": "prompt_embeds", "data": saved(rows[:two_thirds])},
            {"type": "token_ids", "token_ids": ids[two_thirds:]},
        ],
        "tokens, rows": [
            {"type": "token_ids", "token_ids": ids[:third]},
            {"type": "prompt_embeds", "data": saved(rows[third:])},
        ],
        "rows, rows": [
            {"type": "prompt_embeds", "data": saved(rows[:third])},
            {"type": "prompt_embeds", "data": saved(rows[third:])},
        ],
    }
    if third == 0:
        parts = {}
    return {
        "text": {"prompt": text},
        "token ids": {"prompt": ids},
        "rows": {"prompt": "", "extra_body": {"prompt_embeds": saved(rows)}},
        "rows in a batch of one": {
            "prompt": "",
            "extra_body": {"prompt_embeds": saved(rows[None])},
        },
        **{
            name: {"prompt": None, "extra_body": {"prompt": value}} for name, value in parts.items()
        },
    }


async def complete(client: openai.AsyncOpenAI, **fields: Any) -> list[int]:
    extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
    answer = await client.completions.create(
        model="m", max_tokens=TOKENS, temperature=0, extra_body=extra, **fields
    )
    return shown(answer.choices[0])


def shown(choice: Any) -> list[int]:
    """The ids of a choice, without an end token."""
    ids: list[int] = choice.token_ids
    return ids[:-1] if ids and ids[-1] == EOS_ID else ids


async def every_form_decodes_to_the_reference(client: openai.AsyncOpenAI, path: Path) -> None:
    """Alone, and all at once."""
    requests = [(text, name, fields) for text in TEXTS for name, fields in ways(path, text).items()]
    want = {text: expected(path, tokenizer_of(path).encode(text)) for text in TEXTS}
    alone = [await complete(client, **fields) for text, _, fields in requests if text == TEXTS[0]]
    assert alone == [want[TEXTS[0]]] * len(alone)
    together = await asyncio.gather(*(complete(client, **fields) for _, _, fields in requests))
    for (text, name, _), got in zip(requests, together, strict=True):
        assert got == want[text], f"{name}: {text!r}"


async def test_every_form_of_a_prompt_decodes_to_the_reference_alone_and_in_company(
    client: openai.AsyncOpenAI, path: Path
) -> None:
    await every_form_decodes_to_the_reference(client, path)


async def test_a_chat_that_mixes_text_and_rows_decodes_to_the_chat_in_text(
    client: openai.AsyncOpenAI, path: Path
) -> None:
    tokenizer = tokenizer_of(path)
    document = " the town on the hill is the capital of the island"
    messages: list[Any] = [
        {"role": "system", "content": "Hello"},
        {"role": "user", "content": "what is" + document},
    ]
    rows = rows_of(path, tokenizer.encode(document))
    mixed = [
        messages[0],
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is"},
                {"type": "prompt_embeds", "data": saved(rows)},
            ],
        },
    ]
    ids = tokenizer.apply_chat_template(
        [messages[0], {"role": "user", "content": "what is\0"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in ids.split("\0"))
    want = expected(path, [*before, *tokenizer.encode(document), *after])

    async def chat(messages: list[Any]) -> list[int]:
        answer = await client.chat.completions.create(
            model="m",
            messages=messages,
            max_tokens=TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        return shown(answer.choices[0])

    answers = await asyncio.gather(*(chat(mixed) for _ in range(4)))
    assert answers == [want] * 4


async def test_a_stream_carries_the_same_text_as_the_whole_answer(
    client: openai.AsyncOpenAI, path: Path
) -> None:
    rows = saved(rows_of(path, tokenizer_of(path).encode(TEXTS[1])))
    whole = await client.completions.create(
        model="m", prompt="", max_tokens=TOKENS, temperature=0, extra_body={"prompt_embeds": rows}
    )
    stream = await client.completions.create(
        model="m",
        prompt="",
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"prompt_embeds": rows},
    )
    chunks = [chunk async for chunk in stream]
    assert (
        "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    )
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == len(tokenizer_of(path).encode(TEXTS[1]))


async def test_sampling_depends_on_the_seed_and_not_on_form_or_company(
    client: openai.AsyncOpenAI, path: Path
) -> None:
    async def sample(fields: dict[str, Any], seed: int) -> list[int]:
        extra = {"return_token_ids": True, "top_k": 20, **fields.get("extra_body", {})}
        answer = await client.completions.create(
            model="m",
            prompt=fields["prompt"],
            max_tokens=TOKENS,
            temperature=1.0,
            seed=seed,
            extra_body=extra,
        )
        return shown(answer.choices[0])

    forms = list(ways(path, TEXTS[1]).values())
    first = [await sample(form, 7) for form in forms]
    assert all(ids == first[0] for ids in first)
    together = await asyncio.gather(*(sample(form, seed) for form in forms for seed in (7, 8, 9)))
    assert all(ids == first[0] for ids in together[::3])
    assert together[1] != together[0]
