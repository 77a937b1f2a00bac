"""Vectors are the same over NATS with several workers."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest

from inlay import engine as engines
from inlay.api import build_app
from inlay.engine.settings import EngineSettings
from inlay.http import FrontendSettings
from inlay.http.serve import serve
from inlay.messages.digest import Secret
from inlay.router import Router
from tests import embedding_reference as reference
from tests.embedding_models import WORDS, tiny_embedding
from tests.transport.conftest import nats_server
from tests.transport.fleet import Fleet, found
from tests.transport.nats_server import NatsServer

__all__ = ["nats_server"]

SECRET = Secret(bytes(range(32)))
TEXTS = [
    " ".join((WORDS * 3)[number : number + 2 + number % 40]) for number in range(len(WORDS))
] * 12


@pytest.fixture
async def served(nats_server: NatsServer) -> AsyncIterator[tuple[str, Fleet]]:
    """A frontend and two workers, which are processes of their own but for the process."""
    fleet = Fleet(nats_server)
    settings = EngineSettings.of(
        model=str(tiny_embedding("bert")), task="embed", served_model_name=["tiny"]
    )
    for _ in range(2):
        await fleet.worker(engines.create(settings, SECRET), secret=SECRET)
    plane = await fleet.frontend(SECRET)
    await found(plane, 2)
    app = build_app(Router(plane), FrontendSettings(port=0), secret=SECRET)
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        serve(app, FrontendSettings(port=0), on_started=started.set_result, stop=stop)
    )
    yield await started, fleet
    stop.set()
    await serving
    await fleet.close()


async def test_a_request_that_two_workers_share_has_the_vectors_of_transformers(
    served: tuple[str, Fleet],
) -> None:
    url, fleet = served
    texts = [f"{text} {'x ' * (number % 7)}" for number, text in enumerate(TEXTS)]
    async with httpx.AsyncClient(timeout=180) as client:
        response = await client.post(url + "/v1/embeddings", json={"input": texts})
    assert response.status_code == 200, response.text
    vectors = np.array([item["embedding"] for item in response.json()["data"]], np.float32)
    path = tiny_embedding("bert")
    for number in range(0, len(texts), 37):
        ids = reference.tokenizer_of(path)(texts[number])["input_ids"]
        assert reference.cosine(vectors[number], reference.vector(path, ids)) > 0.9999
    steps = [worker.engine.stats().steps for worker in fleet.workers]
    assert min(steps) > 0
