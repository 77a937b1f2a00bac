"""Encoder and language model in workers apart answer as together, also when an encoder is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.media.engine import EncodeEngine
from inlay.messages.prompt import Buffer, Media, Prompt, Tokens
from inlay.messages.request import Request, Sampling, Task
from inlay.router import Router
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.peers import PeerConnections
from tests.engine.torch.encode_reference import SECRET, damaged, settings
from tests.engine.torch.vision_reference import (
    OMNI_CASES,
    Clip,
    Parts,
    Picture,
    Sound,
    directory_of,
    generated,
    prompt_of,
    surrounded,
)
from tests.equality.test_encode_over_nats import Held
from tests.router.sending import IDLE
from tests.transport.conftest import nats_server
from tests.transport.fleet import Fleet, found
from tests.transport.nats_server import NatsServer

__all__ = ["nats_server"]

PICTURE, COUNT = Picture(5, 40, 56), 6
BEFORE, AFTER = [5, 6, 7], [8, 9]
PARTS: Parts = [BEFORE, PICTURE, AFTER]


class Apart:
    """A frontend, encode workers, and one that generates."""

    def __init__(self, fleet: Fleet, plane: NatsPlane, model: TorchEngine) -> None:
        self.fleet = fleet
        self.plane = plane
        self.router = Router(plane, secret=SECRET)
        self.model = model
        self.encoders: list[EncodeEngine] = []

    async def ids(self, prompt: Prompt, **values: Any) -> list[int]:
        request = Request(
            id="r",
            prompts=(prompt,),
            params=Sampling(max_tokens=COUNT, temperature=0, ignore_eos=True),
            **values,
        )
        (stream,) = await self.router.send("m", [request])
        async with asyncio.timeout(120):
            return [id_ async for some in stream for output in some for id_ in output.token_ids]

    def encoded(self) -> list[int]:
        """Images that each encode worker has encoded."""
        return [engine.stats().image_cache_misses for engine in self.encoders]


@asynccontextmanager
async def apart(
    server: NatsServer, family: str, encoders: int = 1, **values: object
) -> AsyncIterator[Apart]:
    fleet, peers = Fleet(server), PeerConnections(SECRET)
    common = {"served_model_name": ["m"], "model": str(directory_of(family))}
    model = TorchEngine(settings("llava", task="generate", **common, **values), SECRET)
    model.use_peers(peers)
    plane = await fleet.frontend(SECRET)
    found_ = Apart(fleet, plane, model)
    try:
        await fleet.worker(model, secret=SECRET)
        for _ in range(encoders):
            engine = EncodeEngine(settings("llava", **common), SECRET)
            found_.encoders.append(engine)
            await fleet.worker(engine, secret=SECRET)
        await found(plane, 1 + encoders)
        yield found_
    finally:
        await found_.router.close()
        await peers.close()
        await fleet.close()


async def until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)


def _with(data: bytes) -> Prompt:
    """The prompt with another file of the same size."""
    return Prompt.of(
        *(
            replace(segment, data=Buffer(data), digest=bytes(16))
            if isinstance(segment, Media)
            else segment
            for segment in prompt_of("llava", PARTS).segments
        )
    )


def hold(engine: EncodeEngine) -> Held:
    encoder = engine._started.encoder
    assert encoder._tower is not None
    held = Held(encoder._tower)
    encoder._tower = held  # type: ignore[assignment]  # all that is used of one
    return held


@pytest.mark.parametrize("family", ["llava", "mistral3", "gemma3", "qwen2_vl", "qwen3_vl"])
async def test_answers_are_those_of_transformers_and_an_image_is_encoded_once(
    nats_server: NatsServer, family: str
) -> None:
    async with apart(nats_server, family, language_model_only=True) as fleet:
        prompt, truth = prompt_of(family, PARTS), generated(family, PARTS, COUNT)
        assert await fleet.ids(prompt) == truth.ids
        assert fleet.model._model is not None
        assert fleet.model._model.tower is None
        assert fleet.encoded() == [1]
        # The whole prompt is cached: nobody is asked.
        assert await fleet.ids(prompt) == truth.ids
        assert fleet.encoded() == [1]
        assert fleet.model.stats().image_cache_misses == 1
        # The image stands elsewhere: its rows were kept.
        moved: Parts = [[11, 12], PICTURE, AFTER]
        assert await fleet.ids(prompt_of(family, moved)) == generated(family, moved, COUNT).ids
        assert fleet.encoded() == [1]
        assert fleet.model.stats().image_cache_misses == 1
        assert set(fleet.router.loads().values()) == {IDLE}


@pytest.mark.parametrize(
    ("family", "item"),
    [
        ("qwen2_audio", Sound(3, 9000)),
        ("voxtral", Sound(4, 9000)),
        ("qwen2_vl+video", Clip(2, 4, 40, 56)),
        ("qwen2_5_omni", Sound(3, 9000)),
        ("qwen2_5_omni", Clip(2, 4, 40, 56)),
    ],
)
async def test_audio_and_video_are_encoded_apart_too(
    nats_server: NatsServer, family: str, item: Sound | Clip
) -> None:
    parts: Parts = [BEFORE, item, AFTER]
    parts = surrounded(parts) if family in OMNI_CASES else parts
    async with apart(nats_server, family, language_model_only=True) as fleet:
        ids = await fleet.ids(prompt_of(family, parts))
        assert ids == generated(family, parts, COUNT).ids
        assert fleet.encoded() == [1]


async def test_tenants_share_no_rows(nats_server: NatsServer) -> None:
    async with apart(nats_server, "llava", language_model_only=True) as fleet:
        prompt = prompt_of("llava", PARTS)
        ids = await fleet.ids(prompt, salt="a")
        assert await fleet.ids(prompt, salt="b") == ids
        assert fleet.encoded() == [2]


@pytest.mark.parametrize(
    ("family", "item"),
    [
        ("llava", Picture(9, 40, 56)),
        ("qwen2_audio", Sound(3, 9000)),
        ("qwen2_vl+video", Clip(2, 4, 40, 56)),
    ],
)
async def test_an_item_of_a_killed_encode_worker_is_encoded_by_the_other(
    nats_server: NatsServer, family: str, item: Picture | Sound | Clip
) -> None:
    async with apart(nats_server, family, 2, language_model_only=True) as fleet:
        towers = [hold(engine) for engine in fleet.encoders]
        parts: Parts = [BEFORE, item, AFTER]
        prompt = prompt_of(family, parts)
        answering = asyncio.create_task(fleet.ids(prompt))
        await until(lambda: any(engine.stats().running for engine in fleet.encoders))
        busy = [bool(engine.stats().running) for engine in fleet.encoders].index(True)
        killing = asyncio.create_task(fleet.fleet.workers[1 + busy].kill())
        await until(lambda: fleet.encoders[busy]._started.shell.closing)
        for tower in towers:
            tower.go.set()
        await killing
        assert await answering == generated(family, parts, COUNT).ids
        assert fleet.encoders[1 - busy].stats().image_cache_misses == 1


async def test_a_worker_with_an_encoder_encodes_where_no_other_does_in_time(
    nats_server: NatsServer,
) -> None:
    async with apart(nats_server, "llava") as fleet:
        (engine,) = fleet.encoders
        tower = hold(engine)
        # Half of the time is the encode worker's, which does nothing in it.
        ids = await fleet.ids(prompt_of("llava", PARTS), deadline=20.0)
        tower.go.set()
        assert fleet.model.encoder is not None
        assert fleet.model.encoder.encoded == 1
        assert ids == generated("llava", PARTS, COUNT).ids
        await until(lambda: not engine.stats().running)


async def test_without_any_encoder_the_error_names_the_cause(nats_server: NatsServer) -> None:
    async with apart(nats_server, "llava", language_model_only=True) as fleet:
        await fleet.fleet.workers[1].kill()
        await until(lambda: len(fleet.plane.workers()) == 1)
        with pytest.raises(OverloadedError, match="no worker with --task encode of the same"):
            await fleet.ids(prompt_of("llava", PARTS))
        text = Prompt.of(Tokens(BEFORE))
        assert len(await fleet.ids(text)) == COUNT
        assert Task.ENCODE not in fleet.model.card.tasks


async def test_a_damaged_image_is_the_clients_error_not_the_encoders(
    nats_server: NatsServer,
) -> None:
    async with apart(nats_server, "llava", 2, language_model_only=True) as fleet:
        with pytest.raises(InvalidRequestError):
            await fleet.ids(_with(damaged(PICTURE.data)))
        assert len(await fleet.ids(prompt_of("llava", PARTS))) == COUNT
