"""`inlay serve --engine vllm`, vLLM in its own environment, asked by the `openai` client.

The expected tokens come from plain transformers in float32 and must be identical: text, ids, rows
and mixtures, alone and together.
"""

import asyncio
import base64
import io
import math
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch

from tests import preloaded
from tests.engines.held import keep_reference, own_cache
from tests.engines.vllm.serving import model
from tests.equality.reference import greedy, rows_of, tokenizer_of
from tests.equality.test_over_http import (
    TEXTS,
    complete,
    every_form_decodes_to_the_reference,
    expected,
    saved,
)
from tests.models import EOS_ID
from tests.serving import PYTHON, Served, serving

WORDS: tuple[object, ...] = (
    *("--engine", "vllm", "--engine-python", sys.executable, "--served-model-name", "m"),
    *(
        "--enable-prompt-embeds",
        "--block-size",
        32,
        "--kv-cache-memory-bytes",
        8 << 20,
        "--num-threads",
        1,
    ),
    *("--max-num-seqs", 16, "--max-num-batched-tokens", 512),
)
START_SECONDS = 280.0


@pytest.fixture(scope="module")
def path() -> Path:
    return model("qwen3")


def serve(
    path: Path,
    *rest: object,
    admin_key: str = "",
    media: bool = False,
    cache: Path | None = None,
    **more: Any,
) -> Any:
    words = [path, *WORDS, *(["--enable-mm-embeds"] if media else [])]
    # `serving` puts the port last, and the words after -- have to stand behind it.
    environment = {
        "HF_HUB_OFFLINE": "1",
        **({"INLAY_ADMIN_API_KEY": admin_key} if admin_key else {}),
        **({} if cache is None else {"XDG_CACHE_HOME": str(cache)}),
        "INLAY_ENGINE_ARGUMENTS": " ".join(map(str, ("--enforce-eager", *rest))),
    }
    return serving(*words, environment=environment, within=START_SECONDS, **more)


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cache = tmp_path_factory.mktemp("cache")
    with own_cache(cache / "inlay" / "self-check"):
        keep_reference(path, "float32")
    # All of it started, none forked, as users have it.
    with preloaded.started(), serve(path, cache=cache) as served:
        yield served


def test_it_is_held_to_the_logprobs_that_the_torch_engine_has_kept(server: Served) -> None:
    check = httpx.get(server.v1 + "/models/m").json()["self_check"]
    assert check["result"] == "passed"
    assert check["reference"].endswith("sdpa float32, kept")
    assert 0 < check["distance"] < check["bound"]
    (line,) = re.findall(r"inlay:self_check_distance\{.*", httpx.get(server.url + "/metrics").text)
    assert 'result="passed"' in line


@pytest.fixture
async def client(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        yield client


async def test_every_form_of_a_prompt_decodes_to_the_reference_alone_and_in_company(
    client: openai.AsyncOpenAI, path: Path
) -> None:
    await every_form_decodes_to_the_reference(client, path)


async def test_the_text_of_vllms_placeholder_stays_text_beside_rows(
    client: openai.AsyncOpenAI, path: Path
) -> None:
    tokenizer = tokenizer_of(path)
    said, document = "what is <prompt_embeds> in <prompt_embeds>?", " the town on the hill"
    ids = tokenizer.encode(tokenizer.apply_chat_template(
        [{"role": "user", "content": said + document}], add_generation_prompt=True, tokenize=False
    ))  # fmt: skip
    want = greedy(path, rows_of(path, ids), 8)
    parts: list[Any] = [
        {"type": "text", "text": said},
        {"type": "prompt_embeds", "data": saved(rows_of(path, tokenizer.encode(document)))},
    ]
    answer = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": parts}], max_tokens=8, temperature=0,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    found = answer.choices[0].model_dump()["token_ids"]
    assert [id_ for id_ in found if id_ != EOS_ID] == [id_ for id_ in want if id_ != EOS_ID]


def encoded(values: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(values, file)
    return base64.b64encode(file.getvalue()).decode()


def test_what_would_harm_vllm_is_a_400_that_says_why(server: Served, path: Path) -> None:
    rows = rows_of(path, [5, 6, 7])
    entry = httpx.get(server.v1 + "/models/m").json()
    bound = entry["limits"]["max_prompt_embeds_abs"]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("must be finite", {"prompt_embeds": encoded(torch.full((4, rows.shape[1]), math.nan))}),
        ("magnitude", {"prompt_embeds": encoded(torch.full((4, rows.shape[1]), 2 * bound))}),
        (
            "size of tensor must match",
            {"prompt_embeds": encoded(torch.zeros(4, rows.shape[1] + 1))},
        ),
        ("echo", {"prompt_embeds": encoded(rows), "echo": True}),
        ("prompt_logprobs", {"prompt_embeds": encoded(rows), "prompt_logprobs": 1}),
        ("vllm 0.32", {"prompt": "Hello", "temperature": 2.5}),
        ("out of vocabulary", {"prompt": [5, entry["vocab_size"]]}),
    ]
    for said, fields in cases:
        answer = httpx.post(
            server.v1 + "/completions", json={"model": "m", "max_tokens": 4, **fields}
        )
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
    assert entry["engine"].startswith("vllm 0.32")
    assert {"feature", "prompts", "reason"} == set(entry["refusals"][0])


def test_a_word_vllm_does_not_know_is_its_own_error(path: Path) -> None:
    done = subprocess.run(
        [
            PYTHON,
            "-m",
            "inlay.cli",
            "serve",
            path,
            *map(str, WORDS),
            "--port",
            "0",
            "--",
            "--no-such-thing",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1
    assert "inlay serve: vLLM's arguments: unrecognized arguments: --no-such-thing" in done.stderr


def descendants(server: Served) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def cores(server: Served) -> list[psutil.Process]:
    """vLLM's engine processes under `server`."""
    found = []
    for process in descendants(server):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "EngineCore" in process.name() + " ".join(process.cmdline()):
                found.append(process)
    return found


async def test_when_vllm_dies_requests_end_with_an_error_and_another_takes_its_place(
    client: openai.AsyncOpenAI, server: Served, path: Path
) -> None:
    before = descendants(server)
    ended = None
    # On a busy machine the answer may be complete before its first token is read.
    while ended is None:
        (core,) = cores(server)
        ended = await _killed(client, core)
        await _another(server, core)
    assert await complete(client, prompt=TEXTS[0]) == expected(
        path, tokenizer_of(path).encode(TEXTS[0])
    )
    left = {process.pid for process in before if process.is_running()} - {server.process.pid}
    now = {process.pid for process in descendants(server)}
    assert left <= now


async def _killed(client: openai.AsyncOpenAI, core: psutil.Process) -> openai.APIError | None:
    """The error of an answer in which vLLM is killed; None where the answer ended before."""
    stream = await client.completions.create(
        model="m",
        prompt=TEXTS[0],
        max_tokens=400,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    killed = False
    try:
        async for _ in stream:
            if not killed:
                core.kill()
                killed = True
    except openai.APIError as error:
        return error
    return None


async def _another(server: Served, core: psutil.Process) -> None:
    """Wait until the server is ready with another vLLM."""
    async with httpx.AsyncClient() as plain:
        for _ in range(int(2 * START_SECONDS)):
            # For a moment it is ready with the one that has just died.
            ready = (await plain.get(server.url + "/ready")).status_code == 200
            if ready and any(process != core for process in cores(server)):
                return
            await asyncio.sleep(0.5)
    pytest.fail("no other vLLM is ready")
