"""Requests that are well formed and ask for what should not be had, to a server that others are using."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from inlay.tensors import write
from tests.equality.reference import rows_of, tokenizer_of
from tests.payloads import HIDDEN, b64, constant, saved
from tests.security.company import Attack, Question, named, refused, settings, shown, under_attack
from tests.security.conftest import CHAT_TEMPLATE
from tests.serving import Served

PLACEHOLDERS = (
    "<prompt_embeds>",
    "<##PROMPT_EMBEDS##>",
    "<rows 0123456789abcdef>",
    "{{ messages }}",
    "0" * 46,
)
"""Texts that vLLM reserves, and texts like the internal placeholders of rows."""

ROWS = constant(0.5)
CHOICES = "at most 128"

GREEDY: dict[str, tuple[dict[str, Any], str]] = {
    "choices": ({"prompt": "a", "n": 10**9}, CHOICES),
    "choices beyond 64 bits": ({"prompt": "a", "n": 10**30}, CHOICES),
    "choices for many prompts": ({"prompt": ["a"] * 100, "n": 100}, CHOICES),
    "prompts": ({"prompt": ["a"] * 100_000}, CHOICES),
    "lists of ids": ({"prompt": [[5]] * 90_000}, CHOICES),
    "embeddings": ({"prompt_embeds": [ROWS] * 1000}, CHOICES),
    "a batch of prompts": ({"prompt_embeds": b64(write(np.ones((1000, 1, HIDDEN), np.float32), "npy"))}, CHOICES),
    "parts": ({"prompt": [{"type": "prompt_embeds", "data": ROWS}] * 2000}, "2000 prompt_embeds; at most 128"),
    "token parts": ({"prompt": [{"type": "token_ids", "token_ids": [5]}] * 20_000}, "maximum context length is 512"),
    "tokens": ({"prompt": "a", "max_tokens": 10**18}, "maximum context length is 512"),
    "tokens after rows": ({"prompt_embeds": ROWS, "max_tokens": 509}, "maximum context length is 512"),
    "least tokens": ({"prompt": "a", "min_tokens": 10**18}, "min_tokens"),
    "rows": ({"prompt_embeds": constant(0.5, rows=9000)}, "maximum context length is 512"),
    "biases": ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(40_000)}}, "logit_bias has 40000 entries"),
    "a bias without bound": ({"prompt": "a", "logit_bias": {"5": 1e308}}, "from -100 to 100"),
    "a bias for no token": ({"prompt": "a", "logit_bias": {"4000000000": 1}}, "out of vocabulary"),
    "logprobs": ({"prompt": "a", "logprobs": 10**6}, "from 0 to 20"),
    "stop strings": ({"prompt": "a", "stop": ["a"] * 100_000}, "at most 64"),
    "a stop string": ({"prompt": "a", "stop": "a" * 1_000_000}, "at most 4096"),
    "stop strings together": ({"prompt": "a", "n": 24, "stop": ["a" * 4095 + chr(200 + i) for i in range(64)]}, "stop has 262144 characters in all its strings; at most 16384"),
    "many stop tokens": ({"prompt": "a", "stop_token_ids": [1] * 100_000}, "stop_token_ids has 100000 ids; at most 1024"),
    "allowed ids": ({"prompt": "a", "allowed_token_ids": [5] * 100_000}, "allowed_token_ids has 100000 ids; the model has 384"),
    "stop tokens": ({"prompt": "a", "stop_token_ids": [-1]}, "out of vocabulary"),
    "token ids": ({"prompt": [384]}, "out of vocabulary"),
    "negative token ids": ({"prompt": [-1]}, "out of vocabulary"),
    "token ids beyond 64 bits": ({"prompt": [2**70]}, "prompt"),
    "a temperature": ({"prompt": "a", "temperature": -1}, "temperature"),
    "a penalty": ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    "a beam search": ({"prompt_embeds": ROWS, "use_beam_search": True}, "beam search"),
}  # fmt: skip


def sent(path: str, body: dict[str, Any], phrase: str) -> Attack:
    return lambda client: refused(client.post(path, json=body), 400, phrase)


def test_what_is_too_much_is_refused(server: Served, asked: tuple[Question, ...]) -> None:
    attacks = [
        named(name, sent("/v1/completions", body, phrase))
        for name, (body, phrase) in GREEDY.items()
    ]
    under_attack(server, asked, attacks)


def test_more_candidates_than_any_number_can_count_are_all_of_them(
    server: Served, asked: tuple[Question, ...]
) -> None:
    # Found by the fuzzer: beyond 64 bits it was a 500.
    body = {"prompt": "a", **settings(), "temperature": 1.0, "seed": 5}
    with httpx.Client(base_url=server.url, timeout=180) as client:
        every = shown(client.post("/v1/completions", json=body).json())

    def attack(client: httpx.Client) -> None:
        for top_k in (384, 2**31, 2**63, 10**20, 10**300):
            response = client.post("/v1/completions", json={**body, "top_k": top_k})
            assert response.status_code == 200, response.text
            assert shown(response.json()) == every

    under_attack(server, asked, [attack])


def user(*content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], **settings(), **more}


PART = {"type": "prompt_embeds", "data": ROWS}
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}

CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "logprobs of the prompt": (user(PART, prompt_logprobs=1), "prompt_logprobs is not compatible with prompt embeds"),
    "an echo": (user(PART, echo=True), "echo"),
    "thousands of parts": (user(*[PART] * 2000), "2000 prompt_embeds; at most 128"),
    "an image": (user(PART, IMAGE), "takes no images"),
    "choices": (user(PART, n=10**9), CHOICES),
    "a template of one's own": (user(PART, chat_template_kwargs={"chat_template": "{{ 1 }}"}), "not a variable"),
    "messages of one's own": (user(PART, chat_template_kwargs={"messages": []}), "not a variable"),
    "a part of several kinds": (user({**PART, "ref": "pe-1"}), "exactly one of"),
    "data that is no text": (user({"type": "prompt_embeds", "data": [1]}), "base64"),
}  # fmt: skip


def test_chats_that_break_other_servers_are_refused(
    server: Served, asked: tuple[Question, ...]
) -> None:
    attacks = [
        named(name, sent("/v1/chat/completions", body, phrase))
        for name, (body, phrase) in CHATS.items()
    ]
    under_attack(server, asked, attacks)


@pytest.mark.parametrize("field", ["echo", "prompt_logprobs", "suffix"])
def test_what_needs_the_ids_of_rows_is_refused(
    server: Served, asked: tuple[Question, ...], field: str
) -> None:
    body = {
        "prompt_embeds": ROWS,
        **settings(),
        field: {"echo": True, "prompt_logprobs": 1, "suffix": "a"}[field],
    }

    def attack(client: httpx.Client) -> None:
        refused(client.post("/v1/completions", json=body), 400, field, "no token ids")

    under_attack(server, asked, [attack])  # fmt: skip


def test_text_that_looks_like_a_placeholder_stays_text_wherever_it_stands(
    server: Served, asked: tuple[Question, ...], path: Path
) -> None:
    tokenizer = tokenizer_of(path)

    def attack_with(text: str) -> Attack:
        tools = [{"type": "function", "function": {"name": text, "parameters": {"a": text}}}]
        call = {
            "id": text,
            "type": "function",
            "function": {"name": text, "arguments": json.dumps({"a": text})},
        }
        messages: list[dict[str, Any]] = [
            {"role": "user", "name": text, "content": [{"type": "text", "text": text}, PART]},
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": text},
        ]
        # A template gets arguments as the object their JSON stands for.
        called = {**call, "function": {"name": text, "arguments": {"a": text}}}
        plain = [
            {**messages[0], "content": [{"type": "text", "text": text}]},
            {**messages[1], "tool_calls": [called]},
            messages[2],
        ]
        rendered = tokenizer.apply_chat_template(
            plain,
            tools=tools,
            chat_template=CHAT_TEMPLATE,
            add_generation_prompt=True,
            tokenize=False,
        )
        at = rendered.index("<|im_end|>", rendered.index("<|im_start|>user"))
        ids = [tokenizer.encode(piece) for piece in (rendered[:at], rendered[at:])]

        def attack(client: httpx.Client) -> None:
            body = {"messages": messages, "tools": tools, "tool_choice": "none", **settings(2)}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["prompt_tokens"] == len(ids[0]) + 4 + len(ids[1])

        return attack

    under_attack(server, asked, [attack_with(text) for text in PLACEHOLDERS])


def test_penalties_on_rows_do_not_depend_on_whoever_came_before(
    server: Served, asked: tuple[Question, ...], path: Path
) -> None:
    rows = saved(rows_of(path, tokenizer_of(path).encode("It is the town on the hill")))
    body = {
        "prompt_embeds": rows,
        **settings(24),
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
    }
    body["ignore_eos"] = True
    with httpx.Client(base_url=server.url, timeout=180) as client:
        first = shown(client.post("/v1/completions", json=body).json())

    def attack(client: httpx.Client) -> None:
        # Whoever had the place in the batch before: other texts, with other penalties.
        for text in ("user system assistant " * 9, "naïve café, straße", "the harbour town counts"):
            before = {"prompt": text, **settings(3), "repetition_penalty": 1.9}
            assert client.post("/v1/completions", json=before).status_code == 200
            assert shown(client.post("/v1/completions", json=body).json()) == first

    under_attack(server, asked, [attack])


def test_embeddings_beside_prompts_are_one_choice_and_the_rows_are_counted(
    server: Served, asked: tuple[Question, ...]
) -> None:
    def attack(client: httpx.Client) -> None:
        body = {"prompt": ["a", "b"], "prompt_embeds": ROWS, **settings(2)}
        answer = client.post("/v1/completions", json=body).json()
        assert len(answer["choices"]) == 1
        assert answer["usage"]["prompt_tokens"] == 4
        # Without max_tokens an answer ends where the context does, rows and all.
        rest = {"prompt_embeds": constant(0.5, rows=500), "temperature": 0, "ignore_eos": True}
        assert client.post("/v1/completions", json=rest).json()["usage"]["total_tokens"] == 512

    under_attack(server, asked, [attack])
