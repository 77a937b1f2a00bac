"""A fleet of processes whose parts are killed, drained, frozen and restarted, and clients that notice nothing."""

import asyncio
import base64
import io
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.equality.reference import rows_of, tokenizer_of
from tests.models import tiny
from tests.parts import Part, workers_of
from tests.transport.nats_server import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = float(os.environ.get("SURVIVE_SECONDS", "10"))
STREAMS = 50
WORKERS = 3
FRONTENDS = 2
CLIENT_SECONDS = 300
TEXT = "the harbour town counts its lanterns every night and writes the number in a book"
MODEL = "llama"
HARMS = ("freeze", "restart NATS", "kill a frontend", "kill", "drain")
READY_SECONDS = 180
MAX_PAYLOAD = 48 * 1024
"""Of NATS: less than the long prompts, so that those come in chunks."""


def saved_bytes(rows: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(rows.contiguous(), file)
    return file.getvalue()


def saved(rows: torch.Tensor) -> str:
    return base64.b64encode(saved_bytes(rows)).decode()


async def stored(client: openai.AsyncOpenAI, rows: torch.Tensor) -> str:
    """The id of rows that were uploaded."""
    raw = {"content-type": "application/octet-stream"}
    told = await client.post(
        "/prompt_embeds",
        content=saved_bytes(rows),
        cast_to=httpx.Response,
        options={"headers": raw},
    )
    id_: str = told.json()["id"]
    return id_


async def prompts(client: openai.AsyncOpenAI) -> dict[str, dict[str, Any]]:
    """A request of every kind of prompt; what they refer to is stored through `client`."""
    path = tiny(MODEL)
    ids = tokenizer_of(path)(TEXT)["input_ids"]
    rows = rows_of(path, ids)
    long = rows_of(path, [*ids] * 10)
    assert long.nbytes > MAX_PAYLOAD
    mixed = [
        {"type": "token_ids", "token_ids": ids[:5]},
        {"type": "prompt_embeds", "data": saved(rows[5:11])},
        {"type": "token_ids", "token_ids": ids[11:]},
    ]
    part = {"type": "prompt_embeds", "ref": await stored(client, rows[5:11])}
    whole = {"ref": await stored(client, rows)}
    said = [
        {"type": "text", "text": "the harbour town"},
        {"type": "text", "text": " counts its lanterns"},
    ]
    return {
        "chat": {"messages": [{"role": "user", "content": TEXT}]},
        "chat with rows": {"messages": [{"role": "user", "content": [said[0], mixed[1], said[1]]}]},
        "chat by reference": {"messages": [{"role": "user", "content": [said[0], part, said[1]]}]},
        "chat with a tool": {"messages": [{"role": "user", "content": [part, said[1]]}], **A_TOOL},
        "text": {"prompt": TEXT},
        "ids": {"prompt": ids},
        "rows": {"prompt": None, "extra_body": {"prompt_embeds": saved(rows)}},
        "mixture": {"prompt": mixed},
        "reference": {"prompt": None, "extra_body": {"prompt_embeds": whole}},
        "mixture by reference": {"prompt": [mixed[0], part, mixed[2]]},
        "long rows": {"prompt": None, "extra_body": {"prompt_embeds": saved(long)}},
        "long reference": {
            "prompt": None,
            "extra_body": {"prompt_embeds": {"ref": await stored(client, long)}},
        },
    }


A_TOOL: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "write",
                "parameters": {
                    "type": "object",
                    "properties": {"text": {"type": "string", "minLength": 2000}},
                    "required": ["text"],
                    "additionalProperties": False,
                },
            },
        }
    ],
    "tool_choice": "required",
}
"""A call that no answer here comes to the end of: a grammar binds each of its tokens."""

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "seed": 8, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"temperature": 0.7, "seed": 9, "logprobs": 2},
}


class Fleet:
    """NATS, two frontends and three workers.

    Attributes:
        bases: where the frontends are; None for one that is dead.
        deaths: how often each was killed.
    """

    def __init__(self, directory: Path) -> None:
        self._nats = NatsServer(directory, max_payload=MAX_PAYLOAD)
        self._nats.start()
        self.workers = [self._worker() for _ in range(WORKERS)]
        self._frontends = [self._frontend() for _ in range(FRONTENDS)]
        self.bases: list[str | None] = [_ready(part) for part in self._frontends]
        self.deaths = [0] * FRONTENDS
        for part in self.workers:
            _give_way(part.wait_ready())

    def _frontend(self) -> Part:
        return Part("frontend", "--nats", self._nats.url, "--port", 0, until="HTTP at")

    def _worker(self) -> Part:
        names = (
            "--served-model-name",
            "m",
            "--dtype",
            "float32",
            "--num-threads",
            1,
            "--enable-prompt-embeds",
        )
        return Part("worker", tiny(MODEL), "--nats", self._nats.url, *names, until=" serves ")

    def restart_nats(self) -> None:
        self._nats.kill()
        self._nats.start()

    def kill_frontend(self, index: int) -> None:
        """Kill a frontend, and start another in its place."""
        # In this order: whoever still finds it has counted one death less.
        self.bases[index] = None
        self.deaths[index] += 1
        dead, self._frontends[index] = self._frontends[index], self._frontend()
        dead.send(signal.SIGKILL)
        dead.end()
        self.bases[index] = _ready(self._frontends[index])

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
        for part in (*self.workers, *self._frontends):
            part.end()
        self._nats.kill()


def _ready(frontend: Part) -> str:
    """The base URL of a frontend that knows the workers."""
    said = frontend.wait_ready().said
    url = next(line for line in said if "HTTP at" in line).split()[-1]
    deadline = time.monotonic() + READY_SECONDS
    while httpx.get(url + "/ready", timeout=READY_SECONDS).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return url + "/v1"


def _give_way(worker: Part) -> None:
    """A worker that starts must get its turn beside engines that are busy all the time."""
    for engine in workers_of(worker.process.pid):
        engine.nice(10)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.end()


class Clients:
    """A client for each frontend there was, without retries of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._made: dict[str, openai.AsyncOpenAI] = {}

    def at(self, index: int) -> openai.AsyncOpenAI:
        """Of that frontend, or where it is dead of another."""
        base = self._fleet.bases[index] or next(filter(None, self._fleet.bases))
        if base not in self._made:
            self._made[base] = openai.AsyncOpenAI(
                base_url=base, api_key="unused", max_retries=0, timeout=CLIENT_SECONDS
            )
        return self._made[base]

    async def ask(self, index: int, request: dict[str, Any]) -> tuple[Any, ...]:
        """The answer; from another frontend when this one is killed meanwhile, and only then."""
        while True:
            deaths = sum(self._fleet.deaths)
            try:
                return await answer(self.at(index), request)
            except (openai.APIConnectionError, httpx.TransportError):
                if sum(self._fleet.deaths) == deaths:
                    raise
                index = (index + 1) % FRONTENDS

    async def close(self) -> None:
        for client in self._made.values():
            await client.close()


@pytest.fixture
async def clients(fleet: Fleet) -> AsyncIterator[Clients]:
    clients = Clients(fleet)
    yield clients
    await clients.close()


async def answer(client: openai.AsyncOpenAI, request: dict[str, Any]) -> tuple[Any, ...]:
    """All that a stream says of tokens.

    Ids, the tokens with logprobs, the calls, why it ended, usage.
    """
    ids: list[int] = []
    tokens: list[str] = []
    calls = ""
    finish, usage = None, None
    create: Any = (
        client.chat.completions.create if "messages" in request else client.completions.create
    )
    stream = await create(model="m", stream=True, stream_options={"include_usage": True}, **request)
    async for chunk in stream:
        for choice in chunk.choices:
            ids += getattr(choice, "token_ids", None) or []
            if choice.logprobs is not None:
                tokens += tokens_of(choice.logprobs)
            if "messages" in request:
                calls += "".join(
                    call.function.arguments or "" for call in choice.delta.tool_calls or ()
                )
            finish = choice.finish_reason or finish
        if chunk.usage is not None:
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    return ids, tokens, calls, finish, usage


def tokens_of(logprobs: Any) -> list[str]:
    """Tokens with logprobs, of completions or chats."""
    if hasattr(logprobs, "content"):
        return [one.token for one in logprobs.content or ()]
    return logprobs.tokens or []


async def requests(client: openai.AsyncOpenAI) -> list[dict[str, Any]]:
    """One for each stream."""
    made = []
    kinds, samplings = list((await prompts(client)).values()), list(SAMPLINGS.values())
    for number in range(STREAMS):
        request = {**kinds[number % len(kinds)], **samplings[number // len(kinds) % len(samplings)]}
        if "messages" in request and "logprobs" in request:
            request |= {"logprobs": True, "top_logprobs": request["logprobs"]}
        extra = {**request.get("extra_body", {}), "return_token_ids": True, "ignore_eos": True}
        made.append({**request, "max_tokens": 60 + 2 * number, "extra_body": extra})
    return made


async def test_nobody_notices_what_becomes_of_the_parts(fleet: Fleet, clients: Clients) -> None:
    asked = await requests(clients.at(0))
    expected = await asyncio.gather(*(clients.ask(0, request) for request in asked))
    assert all(
        len(ids) == request["max_tokens"]
        for (ids, *_), request in zip(expected, asked, strict=True)
    )
    until = asyncio.get_running_loop().time() + SECONDS
    ended = 0

    async def client(number: int) -> None:
        nonlocal ended
        while len(done) < len(HARMS) or asyncio.get_running_loop().time() < until:
            assert (
                await clients.ask((number + ended) % FRONTENDS, asked[number]) == expected[number]
            )
            ended += 1

    draw = random.Random(20261121)
    done: list[str] = []
    streams = [asyncio.create_task(client(number)) for number in range(STREAMS)]
    while len(done) < len(HARMS) or asyncio.get_running_loop().time() < until:
        await asyncio.sleep(draw.uniform(0.3, 1.5))
        index = draw.randrange(WORKERS)
        what = HARMS[len(done) % len(HARMS)]
        done.append(what)
        if what == "kill":
            await asyncio.to_thread(fleet.replace, index, signal.SIGKILL)
        elif what == "drain":
            await asyncio.to_thread(fleet.replace, index, signal.SIGTERM)
        elif what == "freeze":
            await asyncio.to_thread(fleet.freeze, index, 5.0)
        elif what == "kill a frontend":
            await asyncio.to_thread(fleet.kill_frontend, done.count(what) % FRONTENDS)
        else:
            await asyncio.to_thread(fleet.restart_nats)
    await asyncio.gather(*streams)
    assert ended > STREAMS
    print(f"{ended} streams; {', '.join(done)}")
