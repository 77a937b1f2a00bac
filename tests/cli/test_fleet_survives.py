"""A fleet of processes whose parts are killed, drained, frozen and restarted for a minute, and clients that notice nothing."""

import asyncio
import base64
import io
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch

from tests.equality.reference import rows_of, tokenizer_of
from tests.models import tiny
from tests.parts import Part
from tests.serving import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = float(os.environ.get("SURVIVE_SECONDS", "60"))
STREAMS = 50
WORKERS = 3
TEXT = "the harbour town counts its lanterns every night and writes the number in a book"
MODEL = "llama"
HARMS = ("freeze", "restart NATS", "kill", "drain")


def saved(rows: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(rows.contiguous(), file)
    return base64.b64encode(file.getvalue()).decode()


def prompts() -> dict[str, dict[str, Any]]:
    """A request of every kind of prompt."""
    path = tiny(MODEL)
    ids = tokenizer_of(path)(TEXT)["input_ids"]
    rows = rows_of(path, ids)
    mixed = [
        {"type": "token_ids", "token_ids": ids[:5]},
        {"type": "prompt_embeds", "data": saved(rows[5:11])},
        {"type": "token_ids", "token_ids": ids[11:]},
    ]
    return {
        "text": {"prompt": TEXT},
        "ids": {"prompt": ids},
        "rows": {"prompt": None, "extra_body": {"prompt_embeds": saved(rows)}},
        "mixture": {"prompt": mixed},
    }


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "seed": 8, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"temperature": 0.7, "seed": 9, "logprobs": 2},
}


class Fleet:
    """NATS, two frontends and three workers."""

    def __init__(self, directory: Path) -> None:
        self._nats_port = free_port()
        self._url = f"nats://127.0.0.1:{self._nats_port}"
        self._store = directory
        ports = [free_port(), free_port()]
        self.nats = self._start_nats()
        self.workers = [self._worker() for _ in range(WORKERS)]
        self.frontends = [
            Part("frontend", "--nats", self._url, "--enable-prompt-embeds", "--port", port, until="HTTP at")
            for port in ports
        ]
        for part in (*self.workers, *self.frontends):
            part.wait_ready()
        for part in self.workers:
            _give_way(part)
        self.bases = [f"http://127.0.0.1:{port}/v1" for port in ports]

    def _start_nats(self) -> Part:
        words = ("nats", "--port", self._nats_port, "--store-dir", self._store)
        return Part(*words, until="NATS at").wait_ready()

    def _worker(self) -> Part:
        names = ("--served-model-name", "m", "--dtype", "float32", "--num-threads", 1)
        return Part("worker", tiny(MODEL), "--nats", self._url, *names, until=" serves ")

    def restart_nats(self) -> None:
        self.nats.send(signal.SIGINT)
        self.nats.wait()
        self.nats.end()
        self.nats = self._start_nats()

    def replace(self, index: int, number: signal.Signals) -> None:
        """End a worker by a signal and start another in its place."""
        ended, self.workers[index] = self.workers[index], self._worker()
        ended.send(number)
        ended.end()
        _give_way(self.workers[index].wait_ready())

    def freeze(self, index: int, seconds: float) -> None:
        self.workers[index].send(signal.SIGSTOP)
        time.sleep(seconds)
        self.workers[index].send(signal.SIGCONT)

    def end(self) -> None:
        for part in (*self.workers, *self.frontends, self.nats):
            part.end()


def _give_way(worker: Part) -> None:
    """A worker that starts must get its turn beside engines that are busy all the time."""
    for engine in psutil.Process(worker.process.pid).children():
        engine.nice(10)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.end()


@pytest.fixture
async def clients(fleet: Fleet) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0, timeout=120)
            )
            for base in fleet.bases
        ]


async def answer(client: openai.AsyncOpenAI, request: dict[str, Any]) -> tuple[Any, ...]:
    """All that a stream says of tokens: ids, the tokens with logprobs, why it ended, usage."""
    ids: list[int] = []
    tokens: list[str] = []
    finish, usage = None, None
    stream = await client.completions.create(
        model="m", stream=True, stream_options={"include_usage": True}, **request
    )
    async for chunk in stream:
        for choice in chunk.choices:
            ids += getattr(choice, "token_ids", None) or []
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens or []
            finish = choice.finish_reason or finish
        if chunk.usage is not None:
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    return ids, tokens, finish, usage


def requests() -> list[dict[str, Any]]:
    """One for each stream."""
    made = []
    kinds, samplings = list(prompts().values()), list(SAMPLINGS.values())
    for number in range(STREAMS):
        request = {**kinds[number % len(kinds)], **samplings[number // len(kinds) % len(samplings)]}
        extra = {**request.get("extra_body", {}), "return_token_ids": True, "ignore_eos": True}
        made.append({**request, "max_tokens": 60 + 2 * number, "extra_body": extra})
    return made


async def test_for_a_minute_nobody_notices_what_becomes_of_the_parts(
    fleet: Fleet, clients: list[openai.AsyncOpenAI]
) -> None:
    asked = requests()
    expected = await asyncio.gather(*(answer(clients[0], request) for request in asked))
    assert all(len(ids) == request["max_tokens"] for (ids, *_), request in zip(expected, asked, strict=True))
    until = asyncio.get_running_loop().time() + SECONDS
    ended = 0

    async def client(number: int) -> None:
        nonlocal ended
        while len(done) < len(HARMS) or asyncio.get_running_loop().time() < until:
            assert await answer(clients[(number + ended) % 2], asked[number]) == expected[number]
            ended += 1

    draw = random.Random(20261121)
    done: list[str] = []
    streams = [asyncio.create_task(client(number)) for number in range(STREAMS)]
    while len(done) < len(HARMS) or asyncio.get_running_loop().time() < until:
        await asyncio.sleep(draw.uniform(1, 3))
        index = draw.randrange(WORKERS)
        what = HARMS[len(done) % len(HARMS)]
        done.append(what)
        if what == "kill":
            await asyncio.to_thread(fleet.replace, index, signal.SIGKILL)
        elif what == "drain":
            await asyncio.to_thread(fleet.replace, index, signal.SIGTERM)
        elif what == "freeze":
            await asyncio.to_thread(fleet.freeze, index, 5.0)
        else:
            await asyncio.to_thread(fleet.restart_nats)
    await asyncio.gather(*streams)
    assert ended > STREAMS
    print(f"{ended} streams; {', '.join(done)}")
