"""Probes of an engine end when their worker does."""

import asyncio

import pytest

from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from inlay.worker.probing import EngineProber
from inlay.worker.sleeping import RunningRequests, SleepControl
from tests.models import tiny


class Held(EchoEngine):
    """One whose probe is answered when it is let go."""

    def __init__(self) -> None:
        super().__init__(
            EngineSettings.of(model=str(tiny("llama")), engine="echo"), Secret(bytes(32))
        )
        self.asked = asyncio.Event()
        self.let_go = asyncio.Event()

    async def probe(self) -> float:
        self.asked.set()
        await self.let_go.wait()
        return 0.0


@pytest.mark.parametrize("turns", range(6))
async def test_a_worker_that_ends_while_its_engine_answers_a_probe_probes_no_more(
    turns: int,
) -> None:
    engine = Held()
    sleeping = SleepControl(engine, RunningRequests(), enabled=False, tell=lambda: None)
    probing = asyncio.create_task(
        EngineProber(engine, sleeping, interval=600, timeout=600, tell=lambda: None).run()
    )
    await engine.asked.wait()
    engine.let_go.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    probing.cancel()
    await asyncio.wait([probing], timeout=30)
    assert probing.cancelled()
