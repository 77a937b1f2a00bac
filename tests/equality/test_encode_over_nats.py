"""Two workers with `--task encode` behind one frontend: images are shared, a killed one's retried."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from inlay.api import build_app
from inlay.base.errors import InlayError
from inlay.engine.torch.media.engine import EncodeEngine
from inlay.engine.torch.media.tower import Arrays, Tower
from inlay.http import FrontendSettings
from inlay.http.serve import serve
from inlay.router import Router
from tests.engine.torch.encode_reference import SECRET, features, settings
from tests.engine.torch.vision_reference import Picture
from tests.equality.test_encode_over_http import tensor
from tests.equality.test_images_over_http import data_url
from tests.transport.conftest import nats_server
from tests.transport.fleet import Fleet, found
from tests.transport.nats_server import NatsServer

__all__ = ["nats_server"]

FAMILY = "llava"
PICTURES = [Picture(seed, 40, 56) for seed in range(8)]


class Held:
    """A tower that waits until it is let go."""

    def __init__(self, tower: Tower) -> None:
        self.go = threading.Event()
        self._tower = tower

    def encode(
        self, inputs: Sequence[dict[str, Tensor]], counts: Sequence[int]
    ) -> list[Arrays | InlayError]:
        self.go.wait(60)
        return self._tower.encode(inputs, counts)


@pytest.fixture
async def served(
    nats_server: NatsServer,
) -> AsyncIterator[tuple[str, Fleet, list[EncodeEngine]]]:
    """A frontend and two workers, which are processes of their own but for the process."""
    fleet = Fleet(nats_server)
    engines = [EncodeEngine(settings(FAMILY, served_model_name=["tower"]), SECRET) for _ in "ab"]
    for engine in engines:
        await fleet.worker(engine, secret=SECRET)
    plane = await fleet.frontend(SECRET)
    await found(plane, 2)
    app = build_app(Router(plane), FrontendSettings(port=0), secret=SECRET)
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        serve(app, FrontendSettings(port=0), on_started=started.set_result, stop=stop)
    )
    yield await started, fleet, engines
    stop.set()
    await serving
    await fleet.close()


async def until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)


async def encode(url: str) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(timeout=180, trust_env=False) as client:
        body = {"input": [data_url(picture.data) for picture in PICTURES]}
        response = await client.post(url + "/v1/encode", json=body)
    assert response.status_code == 200, response.text
    elements: list[dict[str, Any]] = response.json()["data"]
    return elements


async def test_images_of_a_worker_that_is_killed_are_encoded_by_the_other(
    served: tuple[str, Fleet, list[EncodeEngine]],
) -> None:
    url, fleet, engines = served
    towers = []
    for engine in engines:
        encoder = engine._started.encoder
        assert encoder._tower is not None
        tower = Held(encoder._tower)
        towers.append(tower)
        encoder._tower = tower  # type: ignore[assignment]  # all that is used of one
    async with asyncio.timeout(120):
        answering = asyncio.create_task(encode(url))
        await until(lambda: sum(engine.stats().running for engine in engines) == len(PICTURES))
        assert all(engine.stats().running for engine in engines)
        killing = asyncio.create_task(fleet.workers[0].kill())
        await until(lambda: engines[0]._started.shell.closing)
        for tower in towers:
            tower.go.set()
        await killing
        elements = await answering
    for element, picture in zip(elements, PICTURES, strict=True):
        truth = features(FAMILY, picture).rows
        torch.testing.assert_close(tensor(element), truth, atol=2e-5, rtol=1e-4)
    assert engines[1].stats().image_cache_misses == len(PICTURES)
