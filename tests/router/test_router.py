"""The router finds models by name and spreads work over their workers."""

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inlay.base.errors import NotFoundError, OverloadedError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.commands import ReadStats
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling
from inlay.router import Router
from inlay.transport.api import Stream
from tests.router.sending import IDLE, send
from tests.transport.direct import DirectPlane

SECRET = Secret(bytes(32))


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 99, "hidden_size": 8, "max_position_embeddings": 100000}'
    )
    return EngineSettings.of(model=str(tmp_path), engine="echo", served_model_name=["m", "alias"])


@pytest.fixture
async def plane(settings: EngineSettings) -> AsyncIterator[DirectPlane]:
    plane = await DirectPlane.around(*(EchoEngine(settings, SECRET) for _ in range(3)))
    yield plane
    await plane.close()


def make_request(id_: str, max_tokens: int = 5) -> Request:
    return Request(
        id=id_, prompts=(Prompt.of(Tokens([1])),), params=Sampling(max_tokens=max_tokens)
    )


async def finish(stream: Stream) -> int:
    return sum([len(delta.token_ids) async for deltas in stream for delta in deltas])


async def test_a_model_is_found_by_its_name_and_by_its_aliases(plane: DirectPlane) -> None:
    router = Router(plane)
    assert [card.name for card in router.models()] == ["m"]
    assert router.card("alias") == router.card("m")
    with pytest.raises(NotFoundError, match=r"`other` does not exist; served: `m`, `alias`$"):
        router.card("other")
    with pytest.raises(NotFoundError):
        await send(router, make_request("x"), "other")


async def test_requests_go_to_the_worker_with_the_least_under_way(plane: DirectPlane) -> None:
    router = Router(plane)
    streams = [await send(router, make_request(str(n), 1000)) for n in range(9)]
    counts = Counter[int]()
    for index, worker in enumerate(plane.workers()):
        counts[index] = (await worker.call(ReadStats())).running
    assert set(counts.values()) == {3}
    for stream in streams:
        await finish(stream)
    assert set(router.loads().values()) == {IDLE}


async def test_a_cancelled_stream_no_longer_counts(plane: DirectPlane) -> None:
    router = Router(plane)
    stream = await send(router, make_request("c", 50_000))
    stream.cancel()
    assert set(router.loads().values()) == {IDLE}
    await finish(stream)
    assert set(router.loads().values()) == {IDLE}


async def test_a_model_whose_workers_are_gone_is_overloaded_not_unknown(
    settings: EngineSettings,
) -> None:
    plane = await DirectPlane.around(EchoEngine(settings, SECRET))
    router = Router(plane)
    assert router.card("m").name == "m"
    plane.worker_ends[0].close()
    while plane.workers():
        await plane.changed()
    assert router.card("m").name == "m"
    with pytest.raises(OverloadedError, match="No worker"):
        await send(router, make_request("x"))
    await plane.close()
