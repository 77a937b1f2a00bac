"""Adapters that are loaded at run time are the namespace's: workers that come later have them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from inlay.adapter.library import AdapterLibrary
from inlay.api import build_app
from inlay.base.errors import InvalidRequestError
from inlay.engine.api import Engine
from inlay.http.settings import FrontendSettings
from inlay.messages.commands import AdapterStatus, LoadAdapter
from inlay.router import Router
from inlay.transport.nats.adapters import AdapterRecord, RecordedAdapter, decode, encode, key_of
from inlay.transport.nats.member import Member
from inlay.worker.adapters import AdapterRegistry
from inlay.worker.host import EngineHost
from tests.api.test_adapters_fleet import engine_of
from tests.transport.fleet import SECRET, Fleet, FleetWorker, until
from tests.transport.nats_server import NatsServer
from tests.worker.test_adapters import write_lora

CHIEF = {"authorization": "Bearer chief"}


def hosted(*sources: str) -> Callable[[Engine], EngineHost]:
    def host(engine: Engine) -> EngineHost:
        library = AdapterLibrary(sources, cache_dir=None, cache_bytes=1 << 20, max_bytes=1 << 20)
        return EngineHost(engine, AdapterRegistry(engine, library, SECRET, most=4, drain_seconds=5))

    return host


class Loading:
    """A fleet of echo engines, and a client of one frontend's admin routes."""

    def __init__(self, fleet: Fleet, router: Router, client: httpx.AsyncClient, model: Path):
        self.fleet = fleet
        self.router = router
        self._client = client
        self._model = model

    async def worker(self, *sources: str, weights: str = "one") -> FleetWorker:
        """A further worker, once it is ready; of its sources any directory unless given."""
        engine = engine_of(self._model / weights, "m", weights=weights)
        return await self.fleet.worker(engine, host=hosted(*(sources or ("file:///",))))

    async def know(self, num_workers: int) -> None:
        """Return once the frontend knows so many ready workers."""
        async with asyncio.timeout(90):
            # Heartbeats: there is no one event to wait for.
            while len(self.router.ready()) != num_workers:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self._client.post(path, json=body, headers=CHIEF)

    async def load(self, name: str, path: Path, **more: Any) -> httpx.Response:
        return await self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)

    async def unload(self, name: str) -> httpx.Response:
        return await self.post("/v1/unload_lora_adapter", lora_name=name)


def names(worker: FleetWorker) -> list[str]:
    """The adapters that a worker has ready."""
    return sorted(adapter.name for adapter in worker.host.card.adapters)


def statuses(worker: FleetWorker) -> list[AdapterStatus]:
    adapters = worker.host._adapters
    assert adapters is not None
    return adapters.statuses()


@pytest.fixture
async def loading(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Loading]:
    fleet = Fleet(nats_server)
    router = Router(await fleet.frontend())
    await router.start()
    app = build_app(router, FrontendSettings(admin_api_key=[SecretStr("chief")]), secret=SECRET)
    transport = httpx.ASGITransport(app)
    (tmp_path / "model").mkdir()
    async with httpx.AsyncClient(transport=transport, base_url="http://inlay") as client:
        yield Loading(fleet, router, client, tmp_path / "model")
    await router.close()
    app.server.close()
    await fleet.close()


async def test_a_rolling_update_loses_no_adapter(loading: Loading, tmp_path: Path) -> None:
    workers = [await loading.worker(), await loading.worker()]
    await loading.know(2)
    for name in ("a", "b", "an/odd name.*>"):
        answer = await loading.load(name, write_lora(tmp_path / name.strip(".*>")))
        assert answer.status_code == 200, answer.text
    for old in workers:
        new = await loading.worker()
        assert names(new) == ["a", "an/odd name.*>", "b"]
        await loading.know(3)
        await old.close()
        await loading.know(2)
    assert loading.router.model("a").adapter_name == "a"


async def test_a_later_worker_takes_the_source_that_was_recorded_last(
    loading: Loading, tmp_path: Path
) -> None:
    await loading.worker()
    await loading.know(1)
    one, other = write_lora(tmp_path / "a"), write_lora(tmp_path / "b", seed=2)
    await loading.load("a", one)
    assert (await loading.load("a", other)).status_code == 400
    assert (await loading.load("a", other, load_inplace=True)).status_code == 200
    late = await loading.worker()
    (adapter,) = late.host.card.adapters
    assert adapter.path == str(other)


async def test_what_was_unloaded_is_not_loaded_by_later_workers(
    loading: Loading, tmp_path: Path
) -> None:
    await loading.worker()
    await loading.know(1)
    await loading.load("a", write_lora(tmp_path / "a"))
    await loading.load("b", write_lora(tmp_path / "b"))
    assert (await loading.unload("a")).status_code == 200
    assert names(await loading.worker()) == ["b"]
    assert (await loading.unload("a")).status_code == 404


async def test_an_adapter_that_a_later_worker_may_not_read_is_named_and_it_serves(
    loading: Loading, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await loading.worker()
    await loading.know(1)
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    await loading.load("a", write_lora(allowed / "a"))
    await loading.load("b", write_lora(other / "b"))
    late = await loading.worker(f"file://{allowed}/")
    await loading.know(2)
    assert names(late) == ["a"]
    (failed,) = [status for status in statuses(late) if status.state == "failed"]
    assert failed.name == "b"
    assert "--allowed-lora-sources" in (failed.reason or "")
    assert "namespace's adapter 'b'" in caplog.text
    assert (await loading.unload("b")).status_code == 200
    assert [status.name for status in statuses(late)] == ["a"]


async def test_loading_reaches_all_weights_of_a_name(loading: Loading, tmp_path: Path) -> None:
    workers = [await loading.worker(), await loading.worker(weights="two")]
    await loading.know(2)
    assert len({worker.host.card.weights_id for worker in workers}) == 2
    assert (await loading.load("a", write_lora(tmp_path / "a"))).status_code == 200
    assert [names(worker) for worker in workers] == [["a"], ["a"]]


async def test_a_load_that_failed_is_not_recorded(loading: Loading, tmp_path: Path) -> None:
    first = await loading.worker()
    await loading.know(1)
    first.engine.failing.add("load_adapter")  # type: ignore[attr-defined]
    assert (await loading.load("a", write_lora(tmp_path / "a"))).status_code == 500
    assert names(await loading.worker()) == []


async def test_what_is_recorded_while_a_worker_becomes_ready_it_loads_afterwards(
    loading: Loading, tmp_path: Path
) -> None:
    worker = await loading.worker()
    await worker.member.secret(SECRET)
    member = await Member.join(loading.fleet.settings, "frontend")
    path = str(write_lora(tmp_path / "a"))
    await AdapterRecord(member).add("m", RecordedAdapter("a", path))
    async with asyncio.timeout(90):
        # The worker looks by itself.
        while names(worker) != ["a"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await member.leave()


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


async def test_a_running_member_writes_the_adapters_back(own_server: NatsServer) -> None:
    settings = own_server.settings()
    member, other = [await Member.join(settings, kind) for kind in ("worker", "frontend")]
    record, adapter = AdapterRecord(member), RecordedAdapter("a", "/srv/a", "0" * 64)
    member.keep(record.uphold)
    await member.secret(None)
    await record.add("m", adapter)
    await asyncio.to_thread(own_server.empty)
    newcomer = AdapterRecord(other)

    async def back() -> bool:
        return await newcomer.read("m") == (adapter,)

    await until(back)
    assert await record.drop(["m", "n"], "a")
    # Knowing it from before does not bring it back.
    assert await newcomer.read("m") == ()
    assert not await record.drop(["m", "n"], "a")
    await member.leave()
    await other.leave()


async def test_two_members_that_record_at_once_lose_nothing(nats_server: NatsServer) -> None:
    settings = nats_server.settings("at-once")
    members = [await Member.join(settings, "frontend") for _ in range(2)]
    await asyncio.gather(
        *(
            AdapterRecord(member).add("m", RecordedAdapter(name, f"/{name}"))
            for member, name in zip(members, "ab", strict=True)
        )
    )
    recorded = await AdapterRecord(members[0]).read("m")
    assert sorted(adapter.name for adapter in recorded) == ["a", "b"]
    for member in members:
        await member.leave()


@pytest.mark.parametrize("model", ["m", "org/Model.v1", "* >", "modèle", "x" * 5000])
def test_the_key_of_any_model_is_one_that_nats_takes(model: str) -> None:
    assert key_of(model).removeprefix("adapters.").isalnum()
    assert len(key_of(model)) < 100
    assert key_of(model) != key_of(model + "x")


def test_what_is_recorded_is_read_as_it_was_written() -> None:
    adapters = RecordedAdapter("a", "hf://owner/name", "f" * 64), RecordedAdapter("b c", "/b")
    assert decode(encode(adapters)) == adapters
    assert adapters[0].order == LoadAdapter(
        "a", "hf://owner/name", "f" * 64, in_place=True, recorded=True
    )
    with pytest.raises(InvalidRequestError, match="are not understood"):
        decode(b"\xc1")
