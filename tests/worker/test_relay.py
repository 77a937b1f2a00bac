"""A relay offers another plane what the worker behind it can do, as long as there is one."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inlay.card import ModelCard
from inlay.digest import Secret
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.errors import ContextLengthError, InvalidRequestError, OverloadedError
from inlay.prompt import Buffer, Prompt, Tokens
from inlay.request import Command, EmbedOutput, EmbedRequest, Output, Request, Sampling
from inlay.routing import KEY_SIZE, KvEvents, KvSnapshot, Stored
from inlay.worker import Relay, relay
from tests.transport.caching import CachingHost
from tests.transport.direct import DirectPlane

SECRET = Secret(bytes(32))


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[DirectPlane]:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 99, "hidden_size": 8, "max_position_embeddings": 20000}'
    )
    settings = EngineSettings(model=str(tmp_path), engine="echo", served_model_name=["m"])
    plane = await DirectPlane.around(EchoEngine(settings, SECRET), host=CachingHost)
    yield plane
    await plane.close()


class Followed:
    """A relay that is followed, and what it told."""

    def __init__(self, plane: DirectPlane) -> None:
        self.cards: asyncio.Queue[ModelCard] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.relay = Relay(plane)
        self.relay.watch(self.cards.put_nowait)

    async def __aenter__(self) -> "Followed":
        self._task = asyncio.create_task(self.relay.follow(self.gone.set))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def make_request(max_tokens: int) -> Request:
    return Request(
        id="w", prompt=Prompt.of(Tokens([1, 2])), sampling=Sampling(max_tokens=max_tokens)
    )


async def until_end(outputs: "asyncio.Queue[Output]") -> list[Output]:
    told = [await outputs.get()]
    while told[-1].finish_reason is None:
        told.append(await outputs.get())
    return told


async def test_requests_are_passed_on_until_their_end_and_can_be_stopped(
    plane: DirectPlane,
) -> None:
    async with Followed(plane) as followed:
        assert (await followed.cards.get()).name == "m"
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        followed.relay.generate(make_request(3), outputs.put_nowait)
        assert [id_ for output in await until_end(outputs) for id_ in output.token_ids] == [1, 2, 1]
        followed.relay.generate(make_request(10_000), outputs.put_nowait)
        await outputs.get()
        followed.relay.abort("w")
        assert (await until_end(outputs))[-1].finish_reason == "abort"
        assert not followed.relay._streams


async def test_what_the_worker_refuses_is_refused_in_its_words(plane: DirectPlane) -> None:
    async with Followed(plane) as followed:
        await followed.cards.get()
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        followed.relay.generate(make_request(100_000), outputs.put_nowait)
        (refusal,) = await until_end(outputs)
        assert refusal.error is not None
        assert isinstance(refusal.error.to_error(), ContextLengthError)
        vectors: asyncio.Queue[EmbedOutput] = asyncio.Queue()
        long = EmbedRequest(id="e", prompts=(Prompt.of(Tokens([1] * 30_000)),))
        followed.relay.embed(long, vectors.put_nowait)
        answer = await vectors.get()
        assert answer.error is not None
        assert isinstance(answer.error.to_error(), ContextLengthError)


async def test_when_the_worker_is_gone_everything_says_so(plane: DirectPlane) -> None:
    async with Followed(plane) as followed:
        await followed.cards.get()
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        followed.relay.generate(make_request(10_000), outputs.put_nowait)
        await outputs.get()
        plane.worker_ends[0].close()
        lost = (await until_end(outputs))[-1]
        assert lost.error is not None
        assert isinstance(lost.error.to_error(), OverloadedError)
        await followed.gone.wait()
        followed.relay.generate(make_request(1), outputs.put_nowait)
        (refused,) = await until_end(outputs)
        assert refused.error is not None
        assert refused.error.message == relay.NOBODY
        reply = await followed.relay.call(Command("stats"))
        assert reply.error is not None
        assert reply.error.message == relay.NOBODY
        with pytest.raises(OverloadedError, match="no engine"):
            await followed.relay.kv_snapshot()


async def test_what_the_worker_tells_of_its_cache_is_passed_on(plane: DirectPlane) -> None:
    heard: asyncio.Queue[KvEvents] = asyncio.Queue()
    host = plane.hosts[0]
    assert isinstance(host, CachingHost)
    host.keys = os.urandom(100_000 * KEY_SIZE)
    async with Followed(plane) as followed:
        followed.relay.watch_cache(heard.put_nowait)
        await followed.cards.get()
        assert await followed.relay.kv_snapshot() == KvSnapshot(7, Buffer(host.keys))
        events = KvEvents(1, (Stored(bytes(KEY_SIZE)),))
        host.tell(events)
        assert await heard.get() == events


async def test_a_process_that_stands_still_is_killed(plane: DirectPlane) -> None:
    host = plane.hosts[0]
    assert isinstance(host, CachingHost)
    async with Followed(plane) as followed:
        await followed.cards.get()
        killed = asyncio.Event()
        guarding = asyncio.create_task(followed.relay.guard(killed.set, 0.05))
        await followed.relay.call(Command("stats"))
        assert not killed.is_set()
        host.silent = True
        await killed.wait()
        guarding.cancel()
        host.silent = False
        host.awake.set()


async def test_a_worker_without_events_tells_of_no_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 99, "hidden_size": 8, "max_position_embeddings": 20000}'
    )
    settings = EngineSettings(model=str(tmp_path), engine="echo", served_model_name=["m"])
    plain = await DirectPlane.around(EchoEngine(settings, SECRET))
    async with Followed(plain) as followed:
        await followed.cards.get()
        with pytest.raises(InvalidRequestError, match="tells of no cache"):
            await followed.relay.kv_snapshot()
    await plain.close()
