"""Embeddings, classes, scores and ranks beside those of vLLM's own server, field by field."""

import base64
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import pytest

from tests.embedding_models import sized_embedding, tiny_scoring
from tests.serving import free_port, serving

START_SECONDS = 600.0
SIZES = {"hidden_size": 96, "num_attention_heads": 3}
"""vLLM's attention on a CPU takes heads of 32 elements."""

TEMPLATE = "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}"
CHAT = [{"role": "user", "content": "how many ships"}]
TEXTS = ["the harbour town counts its lanterns", "cold wind"]
DOCUMENTS = ["the harbour counts ships every night", "cold wind", "ships sail south"]

Case = tuple[str, dict[str, Any]]


class Both(NamedTuple):
    """The base URLs of the two servers of one model."""

    vllm: str
    inlay: str


@contextmanager
def vllm_serving(directory: Path, *template: object) -> Iterator[str]:
    """vLLM's own server; yields its base URL once it is ready."""
    port = free_port()
    words = (
        "--model",
        directory,
        "--served-model-name",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        port,
    )
    options = ("--runner", "pooling", "--enforce-eager", "--dtype", "float32", "--max-num-seqs", 8)
    more = (*template, "--enable-tokenizer-info-endpoint")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *map(str, (*words, *options, *more)),
        ],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            assert process.poll() is None, f"vLLM ended with status {process.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def both(directory: Path, template: Path | None) -> Iterator[Both]:
    """The two servers of a model, with a chat template or without one."""
    chats: tuple[object, ...] = ()
    if template is not None:
        template.write_text(TEMPLATE)
        chats = ("--chat-template", template)
    environment = {"HF_HUB_OFFLINE": "1", "INLAY_ENABLE_TOKENIZER_INFO_ENDPOINT": "true"}
    options = ("--dtype", "float32", "--num-threads", 1, *chats)
    with (
        vllm_serving(directory, *chats) as theirs,
        serving(
            directory,
            "--served-model-name",
            "m",
            *options,
            environment=environment,
            within=START_SECONDS,
        ) as server,
    ):
        yield Both(theirs, server.url)


READ = {"input_tokens", "truncated"}
"""What items have beyond vLLM's: how much of an input was read."""


def same(found: Any, wanted: Any, where: str) -> None:
    """The same fields in the same order, and numbers that are close."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict), where
        assert [name for name in found if name not in READ] == list(wanted), where
        for key in wanted:
            if key not in ("id", "created"):
                same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{where}[{index}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=2e-4), where
    elif where.endswith((".embedding", "].data")) and isinstance(wanted, str):
        assert len(base64.b64decode(found)) == len(base64.b64decode(wanted)), where
    else:
        assert found == wanted, where


def compare(servers: Both, path: str, body: dict[str, Any]) -> None:
    """Ask both, and require the same of both."""
    theirs, mine = (httpx.post(url + path, json=body, timeout=300) for url in servers)
    assert mine.status_code == theirs.status_code, (path, body, theirs.text[:500], mine.text[:500])
    if theirs.status_code != 200:
        assert theirs.status_code == 400
        return
    assert mine.headers["content-type"] == theirs.headers["content-type"]
    if theirs.headers["content-type"] == "application/json":
        same(mine.json(), theirs.json(), path)
        return
    one, other = mine.headers.get("metadata"), theirs.headers.get("metadata")
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        same(msgspec.json.decode(one), msgspec.json.decode(other), "metadata")
    assert len(mine.content) == len(theirs.content)
    if body.get("embed_dtype", "float32") == "float32":
        order = {"big": ">f4", "little": "<f4"}.get(body.get("endianness", "native"), "=f4")
        found, wanted = (np.frombuffer(answer.content, order) for answer in (mine, theirs))
        assert np.allclose(found, wanted, atol=2e-4)


ENCODINGS: list[dict[str, Any]] = [
    {"encoding_format": encoding, "embed_dtype": dtype, "endianness": order}
    for encoding in ("base64", "bytes", "bytes_only")
    for dtype in ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
    for order in ("native", "big", "little")
]
EMBEDDING: list[Case] = [
    *(("/v1/embeddings", {"input": TEXTS, **encoding}) for encoding in ENCODINGS),
    *(("/pooling", {"input": TEXTS, **encoding}) for encoding in ENCODINGS[::4]),
    *(
        (path, body)
        for path in ("/v1/embeddings", "/pooling")
        for body in (
            {"input": TEXTS[0]},
            {"input": TEXTS},
            {"input": [5, 6, 7]},
            {"input": [[5, 6, 7], [8]]},
            {"messages": CHAT},
            {"input": TEXTS, "use_activation": False},
            {"input": "the hill " * 20, "truncate_prompt_tokens": 9},
            # From the left vLLM cuts a text's first special token off; here it stays.
            {"input": [list(range(5, 25))], "truncate_prompt_tokens": 9, "truncation_side": "left"},
            {"input": "the hill " * 20, "truncate_prompt_tokens": -1},
            {"input": "x", "add_special_tokens": False},
            {"input": "x", "request_id": "mine", "user": "me", "padding": "do_not_pad"},
            {"input": "x", "encoding_format": "hex"},
            {"input": "x", "embed_dtype": "int4"},
            {"input": "x", "endianness": "middle"},
            {"input": "x", "truncate_prompt_tokens": -2},
            {"input": "x", "truncate_prompt_tokens": 100_000},
            {"input": "x", "chat_template": "{{ 1 }}", "messages": CHAT},
            {"input": "the hill " * 2000},
            {},
        )
    ),
    ("/v1/embeddings", {"input": CHAT}),
    ("/v1/embeddings", {"input": [CHAT, CHAT]}),
    ("/v1/embeddings", {"messages": [CHAT, CHAT]}),
    ("/pooling", {"input": "x", "task": "embed"}),
    ("/pooling", {"input": "x", "task": "classify"}),
    ("/pooling", {"input": "x", "dimensions": 8}),
    ("/score", {"text_1": DOCUMENTS[0], "text_2": DOCUMENTS}),
    ("/rerank", {"query": "ships", "documents": DOCUMENTS, "top_n": 2}),
    ("/rerank", {"query": "how many ships", "documents": DOCUMENTS, "max_tokens_per_doc": 2}),
]
CLASSIFYING: list[Case] = [
    (path, body)
    for path in ("/classify", "/pooling")
    for body in (
        {"input": TEXTS[0]},
        {"input": TEXTS},
        {"input": [[5, 6, 7], [8]]},
        {"messages": CHAT},
        {"input": TEXTS, "use_activation": False},
        {"input": "the hill " * 20, "truncate_prompt_tokens": 9},
    )
]
SCORING: list[Case] = [
    *(
        ("/score", {first: "how many ships", second: DOCUMENTS})
        for first, second in (
            ("text_1", "text_2"),
            ("queries", "documents"),
            ("queries", "items"),
            ("data_1", "data_2"),
        )
    ),
    *(
        (path, {"query": "how many ships", "documents": DOCUMENTS, **more})
        for path in ("/rerank", "/v1/rerank")
        for more in (
            {},
            {"top_n": 1},
            {"use_activation": False},
            {"max_tokens_per_doc": 2},
            {"max_tokens_per_query": 1, "max_tokens_per_doc": 3},
            {"max_tokens_per_doc": -1},
            {"max_tokens_per_doc": 100_000},
            {"top_n": -1},
        )
    ),
    ("/rerank", {"query": "ships", "documents": "cold wind"}),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}),
]


@pytest.mark.parametrize(
    ("directory", "cases"),
    [
        (lambda: sized_embedding("bert", **SIZES), EMBEDDING),
        (lambda: tiny_scoring("bert", 3, **SIZES), CLASSIFYING),
        (lambda: tiny_scoring("bert", **SIZES), SCORING),
    ],
    ids=["embedding", "classifying", "scoring"],
)
@pytest.mark.timeout(1500)
def test_answers_have_the_fields_and_the_values_of_vllms_server(
    directory: Any, cases: list[Case], tmp_path: Path
) -> None:
    # vLLM writes pairs with a chat template, where it is given one.
    template = None if cases is SCORING else tmp_path / "chat.jinja"
    with both(directory(), template) as servers:
        failed = []
        for path, body in cases:
            try:
                compare(servers, path, body)
            except AssertionError as error:
                failed.append(f"{path} {body}: {error}"[:800])
        assert not failed, "\n".join(failed)
        for path in ("/ping", "/load", "/tokenizer_info"):
            theirs, mine = (httpx.get(url + path, timeout=60) for url in servers)
            assert mine.status_code == theirs.status_code == 200
        assert set(httpx.get(servers.inlay + "/load").json()) == {"server_load"}
        theirs, mine = (httpx.get(url + "/tokenizer_info").json() for url in servers)
        for key in ("chat_template", "model_max_length", "pad_token", "cls_token"):
            assert mine.get(key) == theirs.get(key), key
