"""Pools by task: workers that encode a model's images stand beside those that generate."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from inlay.card import ModelCard
from inlay.digest import Secret
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.errors import OverloadedError
from inlay.http.metrics.engine_health import combined_status
from inlay.media.spec import MediaSpec
from inlay.prompt import Prompt, Tokens
from inlay.request import Pooling, Request, Sampling, Task
from inlay.router import Router
from inlay.router.pool import PoolKey
from inlay.worker.host import EngineHost
from tests.router.sending import send
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
    return EngineSettings(model=str(tmp_path), engine="echo", served_model_name=["m"])


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
