"""Workers that answer when they are told to, on a plane that says what it is told to."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Never

from msgspec.structs import replace

from inlay.base.errors import OverloadedError
from inlay.messages.card import Limits, ModelCard
from inlay.messages.commands import WorkerCommand
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import EngineUsage, Output, Request, Sampling
from inlay.transport.api import Stream
from tests.router.standing import CARD

SMALL = replace(CARD, limits=Limits(max_model_len=99_999, max_num_seqs=1))
"""A worker that runs one request at a time."""


def request(id_: str, *, length: int = 16, **changes: object) -> Request:
    prompt = Prompt.of(Tokens([1] * length))
    made = Request(id=id_, prompts=(prompt,), params=Sampling(max_tokens=100))
    return replace(made, **changes)


class Answer:
    """What a worker answers a request."""

    def __init__(self, asked: Request) -> None:
        self.request = asked
        self.live = True
        self._ended = False
        self._told: asyncio.Queue[Output | OverloadedError] = asyncio.Queue()

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> Sequence[Output]:
        if self._ended:
            raise StopAsyncIteration
        told = await self._told.get()
        self._ended = isinstance(told, Output) and told.finish_reason is not None
        if isinstance(told, OverloadedError):
            raise told
        return [told]

    def tell(self, *ids: int) -> None:
        """Make some tokens."""
        at = len(self.request.prior_output)
        self.say(Output(self.request.id, self.request.attempt, at, ids))

    def say(self, output: Output) -> None:
        """Give an output as it is."""
        self._told.put_nowait(output)

    def end(self) -> None:
        self.live = False
        at = len(self.request.prior_output)
        usage = EngineUsage(len(self.request.prompt), at)
        self._told.put_nowait(
            Output(self.request.id, self.request.attempt, at, finish_reason="stop", usage=usage)
        )

    def lose(self) -> None:
        self.live = False
        self._told.put_nowait(OverloadedError("the worker is gone", retry_after=1))

    def cancel(self) -> None:
        if self.live:
            self.live = False
            self._told.put_nowait(self.request.end("abort"))


class Answering:
    """A worker.

    Attributes:
        answers: to all that it was sent.
        gone: it takes no more requests.
        tries: times it was sent something.
    """

    def __init__(self, id_: str, card: ModelCard = SMALL) -> None:
        self.id = id_
        self.card = card
        self.answers: list[Answer] = []
        self.gone = False
        self.tries = 0

    @property
    def live(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.live]

    def send(self, request: Request) -> Stream:
        self.tries += 1
        if self.gone:
            raise OverloadedError("the worker is gone", retry_after=1)
        self.answers.append(Answer(request))
        return self.answers[-1]

    async def call(self, command: WorkerCommand[object], within: float = 30.0) -> Never:
        raise NotImplementedError


class ScriptedPlane:
    """A plane of them."""

    def __init__(self, *workers: Answering) -> None:
        self.there = list(workers)
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Say that something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def workers(self) -> Sequence[Answering]:
        return list(self.there)

    def unavailable(self) -> Mapping[str, str]:
        return {}

    async def changed(self) -> None:
        await self._changed.wait()

    def room(self, num_bytes: int) -> memoryview | None:
        return None


async def quiet() -> None:
    """Let everything happen that happens by itself."""
    for _ in range(25):
        await asyncio.sleep(0)
