"""Sending of requests under load, and when each piece of their answers came."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from inlay.base.errors import InlayError
from inlay_tools.bench.workload import Body
from inlay_tools.http_client import EventReader, HttpClient


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def says(self) -> bool:
        """True if it has a piece of the answer; a chat's first event has only a role."""
        delta = self.delta
        return bool(
            self.text or (delta and (delta.content or delta.reasoning or delta.reasoning_content))
        )


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass
class SentRequest:
    """One request and its answer; times are seconds of `time.perf_counter`.

    Attributes:
        due: when it was to be sent, by the arrivals.
        started: when it was sent; later than `due` while others fill the concurrency.
        came: when each event with a piece of the answer came.
        ended: when the last event of the answer came.
        input_tokens: as the server counts them.
        output_tokens: likewise.
        error: why it failed, or None.
    """

    due: float
    started: float = 0.0
    came: list[float] = field(default_factory=list)
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    def add(self, event: bytes, at: float) -> None:
        """Take in an event. Raises `msgspec.MsgspecError` where it is none of OpenAI's."""
        chunk = _decoder.decode(event)
        if chunk.choices:
            self.ended = at
            if any(choice.says for choice in chunk.choices):
                self.came.append(at)
        if chunk.usage is not None:
            self.input_tokens = chunk.usage.prompt_tokens
            self.output_tokens = chunk.usage.completion_tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first piece of the answer; to its end if it had no text."""
        return (self.came[0] if self.came else self.ended) - self.started

    @property
    def latency(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first, or None where there was one at most."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between pieces of the answer."""
        return [later - earlier for earlier, later in zip(self.came, self.came[1:], strict=False)]


@dataclass(frozen=True)
class LoadShape:
    """The way requests are sent.

    Attributes:
        request_rate: requests per second, or None for all at once.
        burstiness: shape of the gamma distribution of the times between them.
        max_concurrency: requests that run at a time at most, or None.
        request_timeout: seconds of a request.
    """

    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    request_timeout: float = 600.0

    def arrivals(self, count: int, rng: np.random.Generator) -> list[float]:
        """Seconds from the start at which requests are due.

        They are scaled so that the last comes at count / rate: the rate is kept, not only on
        average.
        """
        if self.request_rate is None:
            return [0.0] * count
        gaps = rng.gamma(self.burstiness, 1.0, size=count)
        at = np.cumsum(gaps)
        scaled: list[float] = (at * (count / self.request_rate / at[-1])).tolist()
        return scaled


class LoadSender:
    """Sends requests to one server."""

    def __init__(self, client: HttpClient, load: LoadShape) -> None:
        self._client = client
        self._load = load
        self.sent = 0
        self.done = 0

    async def send(self, bodies: Sequence[Body], rng: np.random.Generator) -> list[SentRequest]:
        """Send all, and return what became of each, in order."""
        load = self._load
        room = asyncio.Semaphore(load.max_concurrency or len(bodies))
        self.sent = self.done = 0
        tasks = []
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body, offset in zip(bodies, load.arrivals(len(bodies), rng), strict=True):
                due = begin + offset
                if (early := due - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                tasks.append(group.create_task(self._one(body, due, room)))
                self.sent += 1
        return [task.result() for task in tasks]

    async def _one(self, body: Body, due: float, room: asyncio.Semaphore) -> SentRequest:
        sent = SentRequest(due)
        async with room:
            sent.started = time.perf_counter()
            try:
                async with asyncio.timeout(self._load.request_timeout):
                    await self._answered(body, sent)
            except TimeoutError:
                sent.error = f"no end within {self._load.request_timeout:g} s"
            except InlayError as error:
                sent.error = error.message
            except msgspec.MsgspecError as error:
                sent.error = f"an event that is none of OpenAI's: {error}"
        self.done += 1
        return sent

    async def _answered(self, body: Body, sent: SentRequest) -> None:
        events = EventReader()
        async with self._client.streaming("POST", body.path, body.data) as pieces:
            async for piece in pieces:
                for event in events.feed(piece.data):
                    sent.add(event, piece.at)
        if not events.done:
            sent.error = "the stream ended before the answer was complete"
        elif not sent.ended:
            sent.error = "the stream had no answer"
