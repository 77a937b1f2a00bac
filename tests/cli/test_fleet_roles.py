"""Prefill and decode workers as processes, asked by the `openai` client over HTTP.

Answers are those of one worker, whichever of the two is killed or frozen in the middle of a
handover; so are those of requests beside it, and afterwards no page is held.
"""

import asyncio
import base64
import io
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.equality.reference import rows_of
from tests.models import make
from tests.parts import Part, workers_of
from tests.transport.nats_server import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOKENS = 40
POSITIONS = 1500
TEXT = "the harbour town counts its lanterns every night and writes the number in a book. "
FREE_SECONDS = 4.0
"""Seconds after an answer within which no page of it is held."""
WORDS = (
    *("--served-model-name", "m", "--dtype", "float32", "--num-threads", 1),
    *("--enable-prompt-embeds", "--block-size", 16, "--kv-cache-memory-bytes", 64 << 20),
    # Many steps: a prompt takes a while.
    *("--max-num-batched-tokens", 16),
)


class Fleet:
    """NATS, a frontend, and workers that are started and ended."""

    def __init__(self, nats: NatsServer, model: Path) -> None:
        self._nats, self.model = nats, model
        self._parts: list[Part] = []
        words = ("--nats", nats.url, "--port", 0, "--router-interference-weight", 1000)
        frontend = self._part("frontend", *words, until="HTTP at")
        line = next(line for line in frontend.wait_ready().said if "HTTP at" in line)
        self.url = line.split()[-1]

    def _part(self, *words: object, until: str) -> Part:
        self._parts.append(Part(*words, until=until))
        return self._parts[-1]

    def worker(self, role: str) -> Part:
        """Start a worker of a role."""
        return self._part(
            "worker", self.model, "--role", role, "--nats", self._nats.url, *WORDS,
            until=" serves ",
        )  # fmt: skip

    def end(self) -> None:
        for part in self._parts:
            part.end()

    async def metric(self, name: str) -> dict[str, float]:
        """Values of a metric by worker, or under "" where it is the frontend's."""
        async with httpx.AsyncClient(timeout=60) as client:
            text = (await client.get(self.url + "/metrics")).text
        lines = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
        found: dict[str, float] = {}
        for labels, value in lines:
            engine = re.search(r'engine="([^"]*)"', labels)
            found["" if engine is None else engine[1]] = float(value)
        return found

    async def of(self, worker: str, name: str) -> float:
        """A worker's value, once it is there: one that has much to do may not say it in time."""
        async with asyncio.timeout(60):
            while worker not in (found := await self.metric(name)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return found[worker]

    async def handed_over(self) -> float:
        return sum((await self.metric("inlay:router_handovers_total")).values())

    async def workers(self, count: int) -> set[str]:
        """Ids of the workers, once the frontend knows so many that answer."""
        async with asyncio.timeout(180):
            while True:
                found = await self.metric("inlay:worker_answers")
                if sum(found.values()) == len(found) == count:
                    return set(found)
                await asyncio.sleep(0.1)

    async def nothing_is_held(self, workers: set[str]) -> None:
        """Return once no page of these is in use, `FREE_SECONDS` after now at the latest."""
        until = time.monotonic() + FREE_SECONDS
        for worker in workers:
            while await self.of(worker, "vllm:kv_cache_usage_perc"):
                assert time.monotonic() < until
                await asyncio.sleep(0.05)


def signalled(part: Part, number: signal.Signals) -> None:
    """Signal a worker's supervisor and its engine."""
    engines = workers_of(part.process.pid)
    assert engines
    part.send(number)
    for engine in engines:
        os.kill(engine.pid, number)


def saved(rows: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(rows, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@contextmanager
def fleet_of(model: Path, path: Path) -> Iterator[Fleet]:
    nats = NatsServer(path)
    nats.start()
    fleet = Fleet(nats, model)
    try:
        yield fleet
    finally:
        fleet.end()
        nats.kill()


class Client:
    """The `openai` client, and requests of each kind. Each number is another prompt."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._client = openai.AsyncOpenAI(
            base_url=fleet.url + "/v1", api_key="unused", max_retries=0, timeout=300
        )

    def ids(self, number: int) -> list[int]:
        drawn = torch.Generator().manual_seed(number)
        return torch.randint(3, 200, (POSITIONS,), generator=drawn).tolist()

    async def chat(self, number: int, salt: str) -> Any:
        said = f"{number} " + TEXT * 40
        answer = await self._client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": said}],
            max_tokens=TOKENS,
            temperature=0.8,
            seed=number,
            extra_body={"cache_salt": salt, "ignore_eos": True},
        )
        assert answer.usage is not None
        return answer.choices[0].message.content, answer.usage.completion_tokens

    async def embeds(self, number: int, salt: str) -> Any:
        rows = rows_of(self.fleet.model, self.ids(number))
        answer = await self._client.completions.create(
            model="m",
            prompt=None,
            max_tokens=TOKENS,
            temperature=0,
            extra_body={
                "prompt_embeds": saved(rows),
                "cache_salt": salt,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        return answer.choices[0].token_ids  # type: ignore[attr-defined]

    async def stream(self, number: int, salt: str, tokens: int = TOKENS) -> AsyncIterator[str]:
        """The texts of a streamed completion, as they come."""
        stream = await self._client.completions.create(
            model="m",
            prompt=self.ids(number),
            max_tokens=tokens,
            temperature=0.9,
            seed=number,
            presence_penalty=0.4,
            stream=True,
            extra_body={"cache_salt": salt, "ignore_eos": True},
        )
        async for chunk in stream:
            yield chunk.choices[0].text

    async def streamed(self, number: int, salt: str) -> str:
        return "".join([text async for text in self.stream(number, salt)])

    @asynccontextmanager
    async def neighbour(self, seed: int) -> AsyncIterator["asyncio.Task[str]"]:
        """A short prompt that is being answered at length, at the decode worker."""
        begun = asyncio.Event()

        async def answered() -> str:
            stream = await self._client.completions.create(
                model="m", prompt=[5, 6, 7], max_tokens=2500, temperature=1, seed=seed,
                stream=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            found = ""
            async for chunk in stream:
                found += chunk.choices[0].text
                begun.set()
            return found

        task = asyncio.create_task(answered())
        await begun.wait()
        try:
            yield task
        finally:
            task.cancel()

    async def close(self) -> None:
        await self._client.close()


FETCHED = "inlay:kv_pages_fetched_total"
SLICE = 25_000_000
"""Nanoseconds of a core: a prompt takes some 200 ms, and with 5 at a time no page is sent before."""


def nanoseconds(part: Part) -> int:
    """How long a core has run the engine of a worker."""
    found = 0
    for engine in workers_of(part.process.pid):
        for file in Path(f"/proc/{engine.pid}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended
                found += int(file.read_text().split()[0])
    return found


async def frozen_between(
    client: Client, number: int, prefill: Part, decoder: str
) -> "tuple[asyncio.Task[str], int]":
    """Ask with a prompt, and freeze who computes it when some of its pages have come.

    It runs in slices of its own time: others may have the cores, or it may be fast.

    Returns the answer to come, and how often the prompt was asked with: it may be computed between
    two looks nevertheless.
    """
    for tried in range(1, 11):
        fetched = await client.fleet.of(decoder, FETCHED)
        signalled(prefill, signal.SIGSTOP)
        asked = asyncio.create_task(client.streamed(number, f"apart {tried}"))
        while True:
            ran = nanoseconds(prefill)
            signalled(prefill, signal.SIGCONT)
            for _ in range(500):
                await asyncio.sleep(0.001)
                if asked.done() or nanoseconds(prefill) > ran + SLICE:
                    break
            signalled(prefill, signal.SIGSTOP)
            await asyncio.sleep(0.6)  # a scrape is kept for half a second
            if asked.done():
                break
            if await client.fleet.of(decoder, FETCHED) >= fetched + 8:
                return asked, tried
        signalled(prefill, signal.SIGCONT)
        await asked
    raise AssertionError("each prompt was computed at once")


async def test_answers_are_those_of_one_worker_whatever_happens_to_either(
    model: Path, tmp_path: Path
) -> None:
    with fleet_of(model, tmp_path) as fleet:
        client = Client(fleet)
        decode = fleet.worker("decode").wait_ready()
        (decoder,) = await fleet.workers(1)
        # What one worker answers.
        kinds = {"chat": client.chat, "embeds": client.embeds, "streamed": client.streamed}
        truth = {name: await ask(1, "alone") for name, ask in kinds.items()}
        truths = {number: await client.streamed(number, "alone") for number in range(2, 5)}
        async with client.neighbour(1) as task:
            besides = await task
        prefill = fleet.worker("prefill").wait_ready()
        both = await fleet.workers(2)

        handed = 0
        async with client.neighbour(1) as beside:
            for name, ask in kinds.items():
                fetched = await fleet.of(decoder, FETCHED)
                assert await ask(1, "apart") == truth[name], name
                handed += 1
                assert await fleet.handed_over() == handed
                # Nearly all pages of each, 88 to 93.
                assert await fleet.of(decoder, FETCHED) > fetched + 80
            assert await beside == besides
        await fleet.nothing_is_held(both)

        for number, signum in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
            async with client.neighbour(1) as beside:
                asked, tried = await frozen_between(client, number, prefill, decoder)
                signalled(prefill, signum)
                # A frozen one is given up after its silence; the prompt is computed here.
                assert await asked == truths[number], signum
                handed += tried
                assert await fleet.handed_over() == handed
                assert await beside == besides
            await fleet.nothing_is_held({decoder})
            if signum == signal.SIGSTOP:
                signalled(prefill, signal.SIGKILL)
            assert await fleet.workers(1) == {decoder}
            prefill = fleet.worker("prefill").wait_ready()
            both = await fleet.workers(2)

        # The decode worker is lost after its first tokens, with all that runs there.
        async with client.neighbour(1) as beside:
            found = []
            async for text in client.stream(4, "apart"):
                found.append(text)
                if len(found) == 4:
                    signalled(decode, signal.SIGKILL)
            assert "".join(found) == truths[4]
            handed += 1
            assert await fleet.handed_over() == handed
            assert await beside == besides
        left = await fleet.workers(1)
        assert left == both - {decoder}
        await fleet.nothing_is_held(left)
        # The one that is left serves alone.
        assert await client.chat(1, "left") == truth["chat"]
        await client.close()
