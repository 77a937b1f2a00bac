"""`/live`, `/ready` and `/health` differ.

What the process, the next request and the engines say.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from inlay.base.errors import EngineError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.http.metrics import engine_health
from inlay.http.metrics.engine_health import Health, combined_status
from inlay.messages.card import ModelCard, Probe
from inlay.messages.commands import ReadStats
from inlay.messages.digest import Secret
from inlay.transport import link
from inlay.transport.local import LocalPlane
from inlay.worker import spawn
from inlay.worker.host import EngineHost
from inlay_stages.cards import StageCard
from tests.live import Fleet, fleet
from tests.models import tiny
from tests.router.scripted_stages import GRAPH
from tests.router.standing import CARD


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 9, "hidden_size": 8, "max_position_embeddings": 64}'
    )
    return EngineSettings.of(model=str(tmp_path), engine="echo", served_model_name=["m"])


class Seen:
    """A worker as a frontend sees it."""

    def __init__(self, id_: str, card: ModelCard) -> None:
        self.id = id_
        self.card = card


def judged(*workers: Seen, **missing: str) -> Health:
    cards = {worker.card.name: worker.card for worker in workers}
    return combined_status(cards.values(), workers, missing)  # type: ignore[arg-type]


@asynccontextmanager
async def probing(
    engine: EchoEngine, seconds: float = 90
) -> AsyncIterator["asyncio.Queue[ModelCard]"]:
    """The cards that a worker announces which probes `engine` all the time."""
    await engine.start()
    host = EngineHost(engine, probe_interval=0.01, probe_timeout=seconds)
    cards: asyncio.Queue[ModelCard] = asyncio.Queue()
    host.watch(cards.put_nowait)
    task = asyncio.create_task(host.probe())
    yield cards
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_that_answers_is_well_and_says_when_it_last_did(
    settings: EngineSettings,
) -> None:
    async with probing(EchoEngine(settings, Secret(bytes(32)))) as cards:
        assert (await cards.get()).probe is None
        first, second = await cards.get(), await cards.get()
    assert first.probe is not None
    assert second.probe is not None
    assert second.probe.at > first.probe.at
    found = judged(Seen("w", second))
    assert (found.status, found.workers[0].state) == ("ok", "ok")
    probe = found.workers[0].last_probe
    assert probe is not None
    assert probe.age >= 0
    assert probe.error is None


def test_a_pipeline_one_of_whose_stages_was_never_there_is_not_well() -> None:
    cards = {
        name: replace(CARD, name=GRAPH.served_name(name), stage=StageCard(GRAPH, name))
        for name in GRAPH.stages
    }
    whole = judged(*(Seen(name, card) for name, card in cards.items()))
    assert whole.status == "ok"
    for lacking in cards:
        found = judged(*(Seen(name, card) for name, card in cards.items() if name != lacking))
        assert found.error is not None
        assert f"no worker of {cards[lacking].name} is well" in found.error.message


async def test_an_engine_that_is_stuck_or_fails_shows(settings: EngineSettings) -> None:
    class Stuck(EchoEngine):
        async def probe(self) -> float:
            await asyncio.Event().wait()
            raise AssertionError

    class Failing(EchoEngine):
        async def probe(self) -> float:
            raise EngineError("the device fell off the bus")

    for kind, reason in ((Stuck, "did not answer within 0.05 s"), (Failing, "fell off the bus")):
        async with probing(kind(settings, Secret(bytes(32))), 0.05) as cards:
            assert (await cards.get()).probe is None
            card = await cards.get()
        found = judged(Seen("w", card))
        assert (found.status, found.workers[0].state) == ("failing", "failing")
        assert found.error is not None
        assert reason in found.error.message
        well = Seen("other", replace(card, probe=None))
        assert judged(Seen("w", card), well).status == "degraded"


async def test_an_engine_that_fails_its_first_probe_is_refused_with_the_reason(
    settings: EngineSettings,
) -> None:
    class Failing(EchoEngine):
        async def probe(self) -> float:
            raise EngineError("the device fell off the bus")

    engine = Failing(settings, Secret(bytes(32)))
    await engine.start()
    with pytest.raises(EngineError, match="failed at its first token: the device fell off the bus"):
        await EngineHost(engine, probe_interval=30).first_probe()
    await EngineHost(engine).first_probe()  # which nobody asked for


async def test_a_worker_that_says_nothing_for_too_long_is_not_well(
    settings: EngineSettings,
) -> None:
    engine = EchoEngine(settings, Secret(bytes(32)))
    await engine.start()
    old = Probe(at=time.time() - 101, seconds=0.1, next_within=100)
    found = judged(Seen("w", replace(engine.card, probe=old)))
    assert found.workers[0].state == "silent"
    assert found.error is not None
    assert "has not reported its engine's health for 101 s" in found.error.message
    asleep = judged(Seen("w", replace(engine.card, probe=old, asleep=1)))
    assert (asleep.status, asleep.workers[0].state) == ("ok", "asleep")


async def test_a_worker_process_that_stands_still_is_not_well_until_it_goes_on(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(engine_health, "SILENT_SECONDS", 0.2)
    settings = settings.replace(health_probe_interval=600)
    process = await spawn(settings, Secret(bytes(32)), arena_bytes=1 << 20)
    plane = LocalPlane([process.channel])
    await plane.start()
    await plane.wait_ready()

    async def seen(status: str) -> Health:
        async with asyncio.timeout(60):
            while True:
                cards = {worker.card.name: worker.card for worker in plane.workers()}
                found = combined_status(cards.values(), plane.workers(), {})
                if found.status == status:
                    return found
                await asyncio.sleep(0.01)

    await seen("ok")
    os.kill(process.pid, signal.SIGSTOP)
    found = await seen("failing")
    os.kill(process.pid, signal.SIGCONT)
    assert found.workers[0].state == "silent"
    assert found.error is not None
    assert "no worker of m is well; local-0 has not answered for 0 s" in found.error.message
    await seen("ok")
    await plane.close()
    await process.close()


def test_what_is_missing_is_told() -> None:
    assert judged(worker="it is loading").status == "failing"


@pytest.fixture(scope="module")
def probed() -> Iterator[Fleet]:
    with fleet(tiny("llama"), health_probe_interval=0.1, enable_sleep_mode=True) as running:
        yield running


def waited(url: str, state: str) -> dict[str, Any]:
    while True:
        body: dict[str, Any] = httpx.get(url + "/health").json()
        if body["workers"][0]["state"] == state:
            return body
        time.sleep(0.02)


def test_health_tells_of_the_last_real_request_to_a_torch_engine(probed: Fleet) -> None:
    url = probed.serve()
    before = probed.run(probed.plane.workers()[0].call(ReadStats())).steps
    body = waited(url, "ok")
    assert body["status"] == "ok"
    assert body["workers"][0]["last_probe"]["seconds"] > 0
    age = body["workers"][0]["last_probe"]["age"]
    while waited(url, "ok")["workers"][0]["last_probe"]["age"] >= age:
        time.sleep(0.02)
    after = probed.run(probed.plane.workers()[0].call(ReadStats())).steps
    assert after > before


def test_an_engine_is_not_probed_in_its_sleep(probed: Fleet) -> None:
    url = probed.serve(admin_api_key=["chief"])
    for path, state in (("/sleep", "asleep"), ("/wake_up", "ok")):
        assert (
            httpx.post(
                url + path, headers={"authorization": "Bearer chief"}, timeout=180
            ).status_code
            == 200
        )
        body = waited(url, state)
        assert body["status"] == "ok"


def test_an_engine_that_is_not_probed_is_not_judged(llama: Fleet) -> None:
    answer = httpx.get(llama.serve() + "/health")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ok",
        "workers": [{"id": "local-0", "model": "tiny", "state": "unprobed"}],
    }
