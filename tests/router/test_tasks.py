"""Pools by task: workers that encode a model's images stand beside those that generate."""

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from msgspec.structs import replace

from inlay.base.address import Address
from inlay.base.errors import OverloadedError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.http.metrics.engine_health import combined_status
from inlay.media.spec import MediaSpec
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Media, Prompt, Tokens
from inlay.messages.request import Pooling, Request, Sampling, Task
from inlay.messages.routing import WorkerLoad
from inlay.router import Router
from inlay.router.decide import Ask, Part, Placement, decide
from inlay.router.fleet import Fleet
from inlay.router.sending import Booking
from inlay.router.settings import RouterSettings
from inlay.router.snapshot import PoolKey
from inlay.worker.host import EngineHost
from tests.router.sending import send
from tests.router.standing import Standing
from tests.router.test_retired import Cluster
from tests.transport.direct import DirectPlane

SECRET = Secret(bytes(32))
MEDIA = MediaSpec(family="llava", encoder_id="e" * 32)


class TaskEngine(EchoEngine):
    """An echo engine whose card says other tasks; it refuses what its host lets through."""

    def __init__(self, settings: EngineSettings, tasks: tuple[Task, ...]) -> None:
        super().__init__(settings, SECRET)
        self._tasks = tasks

    @property
    def card(self) -> ModelCard:
        return replace(
            super().card,
            tasks=self._tasks,
            media=MEDIA,
            prompt_embeds="no rows" if Task.GENERATE not in self._tasks else None,
        )


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 99, "hidden_size": 8, "max_position_embeddings": 1000}'
    )
    return EngineSettings.of(model=str(tmp_path), engine="echo", served_model_name=["m"])


@pytest.fixture
async def plane(settings: EngineSettings) -> AsyncIterator[DirectPlane]:
    plane = await DirectPlane.around(
        TaskEngine(settings, (Task.ENCODE,)),
        TaskEngine(settings, (Task.GENERATE, Task.ENCODE)),
        TaskEngine(settings, (Task.ENCODE,)),
        host=EngineHost,
    )
    yield plane
    await plane.close()


def generation(id_: str) -> Request:
    return Request(id=id_, prompts=(Prompt.of(Tokens([1])),), params=Sampling(max_tokens=3))


def encoding(id_: str) -> Request:
    return Request(id=id_, task=Task.ENCODE, prompts=(Prompt.of(Tokens([1])),), params=Pooling())


async def test_generations_never_go_to_workers_that_only_encode(plane: DirectPlane) -> None:
    router = Router(plane)
    (card,) = router.models()
    assert card.role is Task.GENERATE
    for number in range(6):
        stream = await send(router, generation(str(number)))
        assert sum([len(one.token_ids) async for some in stream for one in some]) == 3


async def test_encodings_go_to_the_workers_that_do_nothing_else(plane: DirectPlane) -> None:
    router = Router(plane)
    ids = [worker.id for worker in plane.workers()]
    streams = [await send(router, encoding(str(number))) for number in range(4)]
    loads = router.loads()
    assert [loads[id_].requests for id_ in ids] == [2, 0, 2]
    for stream in streams:
        stream.cancel()
    assert router.model("m", Task.ENCODE).card.role is Task.ENCODE


async def test_a_model_whose_encode_workers_alone_are_left_is_unavailable_not_another(
    plane: DirectPlane,
) -> None:
    router = Router(plane)
    assert router.card("m").role is Task.GENERATE
    plane.worker_ends[1].close()
    while len(plane.workers()) > 2:
        await plane.changed()
    assert router.card("m").role is Task.GENERATE
    with pytest.raises(OverloadedError, match="No worker of the model `m` is ready"):
        await send(router, generation("x"))
    health = combined_status(router.models(), router.ready(), {})
    assert health.error is not None
    assert "no worker of m is well" in health.error.message


async def test_encode_workers_are_equal_where_their_encoders_are(plane: DirectPlane) -> None:
    card = plane.workers()[0].card
    other = replace(card, media=replace(MEDIA, encoder_id="f" * 32))
    assert PoolKey.of(card) != PoolKey.of(other)
    both = replace(card, tasks=(Task.GENERATE, Task.ENCODE))
    alone = replace(card, tasks=(Task.GENERATE,))
    assert PoolKey.of(both) == PoolKey.of(alone) != PoolKey.of(card)


class Placed:
    """An encode worker of another machine, as a router sees it."""

    def __init__(self, number: int, card: ModelCard, **changes: Any) -> None:
        self.id = f"encoder-{number}"
        address = Address("h", number, bytes(32))
        self.card = replace(card, **{"tasks": (Task.ENCODE,), "address": address, **changes})


def image(name: int) -> Media:
    return Media("image", bytes([name]) * 16, 4, Buffer(b"file"))


def asked(*images: Media) -> Ask:
    return Ask(4, media={one.digest: one.total for one in images}, salt="t")


def fleet_of(card: ModelCard, *encoders: Placed, slack: float = 1.0) -> Fleet:
    """One worker of a language model, and encode workers."""
    cluster = Cluster()
    cluster.there = cast("Any", [Standing("lm", card), *encoders])
    return Fleet(cluster, RouterSettings(router_session_slack=slack), Random(1))


def part_of(fleet: Fleet, card: ModelCard, ask: Ask) -> Part:
    fleet.refresh()
    placement = decide(fleet.pool(card).view(), ask)
    assert isinstance(placement, Placement)
    return placement.part


async def test_an_image_is_named_the_workers_of_its_encoder_the_same_first_at_every_frontend(
    plane: DirectPlane,
) -> None:
    card = plane.workers()[1].card
    workers = [Placed(number, card) for number in range(5)]
    strangers = [
        Placed(5, card, media=replace(MEDIA, encoder_id="f" * 32)),
        Placed(6, card, dtype="float16"),
        Placed(7, card, address=None),
        Placed(8, card, asleep=1),
    ]
    one, other = fleet_of(card, *workers, *strangers), fleet_of(card, *reversed(workers))
    firsts = set()
    for number in range(20):
        ask = asked(image(number), image(number), image(99))
        sources = part_of(one, card, ask).sources
        assert part_of(other, card, ask).sources == sources
        assert [source.name for source in sources] == [bytes([number]) * 16, b"c" * 16]
        peers = sources[0].peers
        assert len(set(peers)) == 3
        assert {peer.port for peer in peers} <= set(range(5))
        firsts.add(peers[0])
    assert len(firsts) > 1


async def test_what_is_being_encoded_is_load_and_moves_further_images_elsewhere(
    plane: DirectPlane,
) -> None:
    card = plane.workers()[1].card
    fleet = fleet_of(card, *(Placed(number, card) for number in range(2)), slack=0.0)
    part = part_of(fleet, card, asked(image(1)))
    pool = fleet.pool(card)
    booking = Booking(
        pool, pool.seated[part.seat], prefill=4, length=4, client="c",
        released=lambda client: None, encoding=part.encoding,
    )  # fmt: skip
    loads = fleet.loads()
    assert sorted(loads[f"encoder-{number}"].requests for number in range(2)) == [0, 1]
    assert sum(loads[f"encoder-{number}"].prefill for number in range(2)) == 4
    moved = part_of(fleet, card, asked(image(1)))
    assert moved.sources[0].peers[0] != part.sources[0].peers[0]
    # The images are computed with the prompt.
    booking.add(1)
    assert fleet.loads()["lm"] == WorkerLoad(1, 0, 4)
    assert {fleet.loads()[f"encoder-{number}"] for number in range(2)} == {WorkerLoad()}
    booking.end()
    booking.end()
    assert set(fleet.loads().values()) == {WorkerLoad()}


async def test_requests_without_images_and_models_without_encoders_name_nobody(
    plane: DirectPlane,
) -> None:
    card = plane.workers()[1].card
    fleet = fleet_of(card, Placed(0, card))
    assert part_of(fleet, card, asked()).sources == ()
    assert part_of(fleet, card, asked(image(1))).sources
    assert part_of(fleet_of(card), card, asked(image(1))).sources == ()
