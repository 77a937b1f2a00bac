"""Requests for embeddings take the way of all requests through the router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from msgspec.structs import replace

from inlay.base.errors import DeadlineExceededError, EngineError, NotFoundError, OverloadedError
from inlay.embedding.bundles import FIRST_PORTS, bundles_of
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret
from inlay.messages.outputs import payloads_of
from inlay.messages.prompt import Buffer, Prompt, Tokens
from inlay.messages.request import Emit, Output, Payload, Pooling, Request, Task
from inlay.router import Router
from inlay.router.settings import RouterSettings
from tests.router.sending import IDLE, send
from tests.transport.conftest import echo_settings
from tests.transport.direct import DirectPlane

__all__ = ["echo_settings"]

SECRET = Secret(bytes(32))


class Gated(EchoEngine):
    """Answers requests one after another, each when the test lets it.

    Attributes:
        taken: the requests it was given, as they came.
        came: set with each of them.
        full: refuses more.
        most: positions it says it may queue.
    """

    def __init__(self, settings: EngineSettings, *, most: int | None = None) -> None:
        super().__init__(settings, SECRET)
        self.taken: list[Request] = []
        self.came = asyncio.Event()
        self.full = False
        self._most = most
        self._gate = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def card(self) -> ModelCard:
        card = super().card
        return replace(card, limits=replace(card.limits, max_num_queued_tokens=self._most))

    def submit(self, request: Request, emit: Emit) -> None:
        if self.full:
            raise OverloadedError("too much is waiting", retry_after=1)
        self.taken.append(request)
        self.came.set()
        self._tasks.append(asyncio.create_task(self._answer(request, emit)))

    async def _answer(self, request: Request, emit: Emit) -> None:
        await self._gate.acquire()
        super().submit(request, emit)

    def let(self, requests: int = 1000) -> None:
        for _ in range(requests):
            self._gate.release()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await super().close()


@asynccontextmanager
async def routed(
    *engines: Gated, backlog: float = 1.0
) -> AsyncIterator[tuple[Router, DirectPlane]]:
    plane = await DirectPlane.around(*engines)
    router = Router(plane, RouterSettings(router_worker_backlog=backlog), secret=SECRET)
    try:
        yield router, plane
    finally:
        await plane.close()


def make_request(id_: str, length: int = 3, **fields: object) -> Request:
    prompts = (Prompt.of(Tokens([5] * length)),)
    return Request(id=id_, task=Task.EMBED, prompts=prompts, params=Pooling(), **fields)  # type: ignore[arg-type]


async def embed(router: Router, request: Request, name: str = "echo") -> Payload:
    async with asyncio.timeout(90):
        (found,) = await payloads_of(await send(router, request, name))
        return found


async def until_taken(engine: Gated, count: int) -> None:
    async with asyncio.timeout(90):
        while len(engine.taken) < count:
            engine.came.clear()
            await engine.came.wait()


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_requests_go_where_fewest_positions_are_under_way(
    echo_settings: EngineSettings,
) -> None:
    one, two = Gated(echo_settings), Gated(echo_settings)
    async with routed(one, two) as (router, _):
        long = asyncio.create_task(embed(router, make_request("long", 100)))
        await settle()
        short = [
            asyncio.create_task(embed(router, make_request(str(n)), "mirror")) for n in range(4)
        ]
        await settle()
        one.let()
        two.let()
        await asyncio.gather(long, *short)
        assert sorted((len(one.taken), len(two.taken))) == [1, 4]
        assert router.stats.decisions == {("echo", False): 5}
        assert set(router.loads().values()) == {IDLE}


async def test_a_worker_that_refuses_is_passed_over(echo_settings: EngineSettings) -> None:
    one, two = Gated(echo_settings), Gated(echo_settings)
    one.full = True
    two.let()
    async with routed(one, two) as (router, _):
        await asyncio.gather(*(embed(router, make_request(str(n))) for n in range(4)))
        assert len(two.taken) == 4
        assert 1 in {request.attempt for request in two.taken}
        two.full = True
        with pytest.raises(OverloadedError, match="too much is waiting"):
            await embed(router, make_request("no"))


async def test_an_unknown_model_makes_no_vectors(echo_settings: EngineSettings) -> None:
    async with routed(Gated(echo_settings)) as (router, _):
        with pytest.raises(NotFoundError, match="does not exist"):
            await embed(router, make_request("x"), "other")


async def test_waiting_requests_of_clients_take_turns(echo_settings: EngineSettings) -> None:
    engine = Gated(echo_settings.replace(max_num_seqs=1))
    async with routed(engine, backlog=0) as (router, _):
        tasks = [
            asyncio.create_task(embed(router, make_request(f"{client}{n}", client=client)))
            for client in "ab"
            for n in range(4)
        ]
        await settle()
        assert [request.id for request in engine.taken] == ["a0"]
        assert router.waiting() == {"echo": 7}
        engine.let()
        await asyncio.gather(*tasks)
        assert [request.id for request in engine.taken[:7]] in (
            ["a0", "a1", "b0", "a2", "b1", "a3", "b2"],
            ["a0", "b0", "a1", "b1", "a2", "b2", "a3"],
        )


async def test_a_waiting_request_of_a_lower_priority_number_goes_first(
    echo_settings: EngineSettings,
) -> None:
    engine = Gated(echo_settings.replace(max_num_seqs=1))
    async with routed(engine, backlog=0) as (router, _):
        tasks = [
            asyncio.create_task(embed(router, make_request(str(priority), priority=priority)))
            for priority in (3, 2, 1)
        ]
        await settle()
        engine.let()
        await asyncio.gather(*tasks)
        assert [request.id for request in engine.taken] == ["3", "1", "2"]


async def test_a_worker_is_sent_no_more_positions_than_it_may_queue(
    echo_settings: EngineSettings,
) -> None:
    engine = Gated(echo_settings, most=100)
    async with routed(engine) as (router, _):
        tasks = [
            asyncio.create_task(embed(router, make_request(f"{length}", length)))
            for length in (500, 60, 40, 41)
        ]
        await settle()
        assert [request.id for request in engine.taken] == ["500"]
        engine.let(1)
        await until_taken(engine, 3)
        await settle()
        assert [request.id for request in engine.taken] == ["500", "60", "40"]
        assert router.num_waiting == 1
        engine.let()
        await asyncio.gather(*tasks)


async def test_a_lost_attempt_is_answered_by_another_worker(echo_settings: EngineSettings) -> None:
    one, two = Gated(echo_settings), Gated(echo_settings)
    async with routed(one, two) as (router, plane):
        task = asyncio.create_task(embed(router, make_request("a", 7)))
        await settle()
        lost, other = (one, two) if one.taken else (two, one)
        other.let()
        plane.worker_ends[(one, two).index(lost)].close()
        payload = await task
        assert [request.attempt for request in other.taken] == [1]
        assert router.stats.decisions == {("echo", False): 1, ("echo", True): 1}
        again = await embed(router, make_request("b", 7))
        assert payload.shape == (1, 64)
        np.testing.assert_array_equal(payload.data.view, again.data.view)


class Halting(EchoEngine):
    """Gives half of its embeddings and nothing more."""

    def submit(self, request: Request, emit: Emit) -> None:
        half = Payload("embeddings", "float32", (1, 1), Buffer(bytes(4)), last=False)
        emit(Output(request.id, request.attempt, 0, payloads=(half,)))


async def test_a_payload_that_was_given_is_not_given_again(echo_settings: EngineSettings) -> None:
    plane = await DirectPlane.around(*(Halting(echo_settings, SECRET) for _ in range(2)))
    outputs = aiter(await send(Router(plane), make_request("a"), "echo"))
    (output,) = await anext(outputs)
    assert [payload.last for payload in output.payloads] == [False]
    for end in plane.worker_ends:
        end.close()
    with pytest.raises(OverloadedError, match="does not continue payloads exactly"):
        await anext(outputs)
    await plane.close()


async def test_a_request_that_ends_without_its_payload_is_an_error_of_the_engine() -> None:
    async def outputs() -> AsyncIterator[list[Output]]:
        yield [make_request("a").end("stop")]

    with pytest.raises(EngineError, match="without embeddings"):
        bundles_of(await payloads_of(outputs()), 1, ("dense",), FIRST_PORTS)


async def test_a_request_that_waits_keeps_its_deadline(echo_settings: EngineSettings) -> None:
    engine = Gated(echo_settings.replace(max_num_seqs=1))
    async with routed(engine, backlog=0) as (router, _):
        first = asyncio.create_task(embed(router, make_request("first", client="a")))
        await settle()
        late = asyncio.create_task(embed(router, make_request("late", client="b", deadline=0.01)))
        patient = asyncio.create_task(
            embed(router, make_request("patient", client="c", deadline=1000.0))
        )
        await asyncio.sleep(0.05)
        engine.let()
        await first
        with pytest.raises(DeadlineExceededError):
            await late
        await patient
        assert [request.id for request in engine.taken] == ["first", "patient"]
        assert engine.taken[1].deadline is not None
        assert engine.taken[1].deadline < 1000


async def test_a_cancelled_request_leaves_no_load_and_makes_room(
    echo_settings: EngineSettings,
) -> None:
    engine = Gated(echo_settings.replace(max_num_seqs=1))
    async with routed(engine, backlog=0) as (router, _):
        stream = await send(router, make_request("left", client="a"), "echo")
        waiting = asyncio.create_task(embed(router, make_request("next", client="b")))
        await settle()
        assert router.num_waiting == 1
        stream.cancel()
        await until_taken(engine, 2)
        engine.let()
        await waiting
        assert set(router.loads().values()) == {IDLE}
