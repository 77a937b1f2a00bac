"""Adapters on several workers: on all of them, or on none."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from inlay.adapter.library import AdapterLibrary
from inlay.api import build_app
from inlay.engine.api import Engine
from inlay.engine.settings import EngineSettings
from inlay.http.settings import FrontendSettings
from inlay.messages.commands import UnloadAdapter
from inlay.messages.digest import Secret
from inlay.router import Router
from inlay.worker.adapters import AdapterRegistry
from inlay.worker.host import EngineHost
from tests.transport.direct import DirectPlane
from tests.worker.echoing import AdaptingEcho
from tests.worker.test_adapters import HIDDEN, write_lora, write_prompt

SECRET = Secret(bytes(32))
CHIEF = {"authorization": "Bearer chief"}


def engine_of(directory: Path, *names: str, weights: str = "") -> AdaptingEcho:
    directory.mkdir(exist_ok=True)
    sizes = {"vocab_size": 99, "hidden_size": HIDDEN, "max_position_embeddings": 1000}
    (directory / "config.json").write_text(json.dumps({**sizes, "weights": weights}))
    settings = EngineSettings.of(
        model=str(directory), engine="echo", served_model_name=list(names), max_cpu_loras=2
    )
    return AdaptingEcho(settings, SECRET)


def hosted(engine: Engine) -> EngineHost:
    library = AdapterLibrary(["file:///"], cache_dir=None, cache_bytes=1 << 20, max_bytes=1 << 20)
    return EngineHost(engine, AdapterRegistry(engine, library, SECRET, most=2, drain_seconds=5))


class Fleet:
    """Engines behind a plane, a router and a frontend."""

    def __init__(
        self, engines: list[AdaptingEcho], client: httpx.AsyncClient, router: Router
    ) -> None:
        self.engines = engines
        self.router = router
        self._client = client

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self._client.post(path, json=body, headers=CHIEF)

    async def load(self, name: str, path: Path, **more: Any) -> httpx.Response:
        return await self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)

    async def listed(self) -> list[tuple[str, str, str]]:
        answer = await self._client.get("/v1/loras", headers=CHIEF)
        return [(entry["worker"], entry["id"], entry["state"]) for entry in answer.json()["data"]]


async def fleet_of(*engines: AdaptingEcho) -> AsyncIterator[Fleet]:
    plane = await DirectPlane.around(*engines, host=hosted)
    router = Router(plane)
    app = build_app(router, FrontendSettings(admin_api_key=[SecretStr("chief")]), secret=SECRET)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://inlay"
    ) as client:
        yield Fleet(list(engines), client, router)
    await plane.close()
    app.server.close()


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Fleet]:
    async for fleet in fleet_of(*(engine_of(tmp_path / "model", "m") for _ in range(3))):
        yield fleet


@pytest.fixture
async def two_models(tmp_path: Path) -> AsyncIterator[Fleet]:
    engines = engine_of(tmp_path / "one", "one", "first"), engine_of(tmp_path / "two", "two")
    async for fleet in fleet_of(*engines):
        yield fleet


async def test_it_is_loaded_on_all_workers_and_unloaded_from_all(
    three: Fleet, tmp_path: Path
) -> None:
    assert (await three.load("a", write_lora(tmp_path / "a"))).status_code == 200
    assert await three.listed() == [(f"local-{n}", "a", "ready") for n in range(3)]
    assert (await three.post("/v1/unload_lora_adapter", lora_name="a")).status_code == 200
    assert not any(engine.held for engine in three.engines)


@pytest.mark.parametrize("failure", ["load_adapter", "refuses"])
async def test_where_one_worker_fails_none_has_it(
    three: Fleet, tmp_path: Path, failure: str
) -> None:
    path = write_lora(tmp_path / "a")
    three.engines[1].failing.add(failure)
    answer = await three.load("a", path)
    assert answer.status_code == (400 if failure == "refuses" else 500)
    assert "failed on 1 of 3 workers" in answer.json()["error"]["message"]
    assert "it is loaded on none" in answer.json()["error"]["message"]
    assert await three.listed() == []
    assert not any(engine.held for engine in three.engines)
    assert (await three.load("a", path)).status_code == 200


async def test_where_undoing_fails_too_the_answer_says_where_it_is(
    three: Fleet, tmp_path: Path
) -> None:
    three.engines[1].failing.add("load_adapter")
    three.engines[2].failing.add("unload_adapter")
    answer = await three.load("a", write_lora(tmp_path / "a"))
    assert "could not be unloaded again on local-2" in answer.json()["error"]["message"]
    assert await three.listed() == [("local-2", "a", "failed")]
    assert (await three.post("/v1/unload_lora_adapter", lora_name="a")).status_code == 200
    assert await three.listed() == []


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_worker_that_lacks_it_gets_it_and_the_others_keep_theirs(
    three: Fleet, tmp_path: Path, in_place: bool
) -> None:
    path = write_lora(tmp_path / "a")
    await three.load("a", path)
    (late,) = three.router.workers("m")[2:]
    await late.call(UnloadAdapter("a"))
    assert len(await three.listed()) == 2
    other = write_lora(tmp_path / "b", seed=2)
    assert (await three.load("a", other)).status_code == 400
    assert len(await three.listed()) == 2
    assert (await three.load("a", path, load_inplace=in_place)).status_code == 200
    assert len(await three.listed()) == 3
    assert [engine.loads for engine in three.engines][:2] == [1, 1]


async def test_where_loading_again_fails_those_that_had_it_keep_it(
    three: Fleet, tmp_path: Path
) -> None:
    path = write_lora(tmp_path / "a")
    await three.load("a", path)
    await three.router.workers("m")[2].call(UnloadAdapter("a"))
    three.engines[2].failing.add("load_adapter")
    assert (await three.load("a", path)).status_code == 500
    assert [worker for worker, *_ in await three.listed()] == ["local-0", "local-1"]


async def test_of_several_models_it_must_be_said_which_it_is_for(
    two_models: Fleet, tmp_path: Path
) -> None:
    path = write_lora(tmp_path / "a")
    refused = await two_models.load("a", path)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "base_model_name")
    assert (await two_models.load("a", path, base_model_name="first")).status_code == 200
    assert await two_models.listed() == [("local-0", "a", "ready")]
    taken = await two_models.load("a", path, base_model_name="two")
    assert "has already been loaded for the model 'one'" in taken.json()["error"]["message"]
    named = await two_models.load("two", path, base_model_name="one")
    assert "conflicts with a served base model" in named.json()["error"]["message"]
    itself = await two_models.load("b", path, base_model_name="a")
    assert "is an adapter itself" in itself.json()["error"]["message"]
    assert two_models.router.model("a").card.name == "one"
    await two_models.load("p", write_prompt(tmp_path / "p"), base_model_name="two")
    assert two_models.router.model("p").positions_before == 3
