"""`inlay status` asks who is there, and waits for nobody's next heartbeat."""

import asyncio
import io
import json

import pytest

from inlay.cli.process import Console
from inlay.cli.settings import StatusSettings
from inlay.cli.status import _show
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.transport.nats import worker as worker_module
from tests.models import tiny
from tests.transport.conftest import nats_server
from tests.transport.fleet import SECRET, Fleet
from tests.transport.nats_server import NatsServer

__all__ = ["nats_server"]

BOUND = 60
"""Seconds within which everything must have come to an end: nothing hangs."""


async def test_workers_answer_a_roll_call_however_long_their_next_heartbeat_takes(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "BEAT_SECONDS", 600.0)
    fleet = Fleet(nats_server)
    engine = EngineSettings.of(model=str(tiny("llama")), engine="echo", served_model_name=["m"])
    for _ in range(3):
        await fleet.worker(EchoEngine(engine, SECRET))
    out = io.StringIO()
    async with asyncio.timeout(BOUND):
        await _show(
            StatusSettings(fleet=fleet.settings, output_json=True), Console(out, io.StringIO())
        )
    seen = json.loads(out.getvalue())
    assert [worker["state"] for worker in seen["workers"]] == ["ready"] * 3
    assert seen["missing"] == {}
    await fleet.close()


async def test_many_roll_calls_at_once_are_answered_with_one_heartbeat(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "BEAT_SECONDS", 600.0)
    monkeypatch.setattr(worker_module, "_ROLL_SECONDS", 1.0)
    fleet = Fleet(nats_server)
    engine = EngineSettings.of(model=str(tiny("llama")), engine="echo", served_model_name=["m"])
    worker = await fleet.worker(EchoEngine(engine, SECRET))
    beats = 0
    heard = asyncio.Event()

    def hear(_: object) -> None:
        nonlocal beats
        beats += 1
        heard.set()

    control = worker.member.control
    await control.subscribe(worker.member.subjects.beats(), hear)
    await control.settle()
    beats = 0
    heard.clear()
    for _ in range(100):
        control.publish(worker.member.subjects.roll_call, b"")
    await control.settle()
    async with asyncio.timeout(BOUND):
        await heard.wait()
    await control.settle()
    assert beats == 1
    await fleet.close()
