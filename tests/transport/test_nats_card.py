"""A worker whose card NATS does not store."""

import asyncio
import logging

import pytest

from inlay.card import ModelCard
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.errors import OverloadedError
from inlay.transport.nats import worker as worker_module
from inlay.transport.nats.cards import Cards
from tests.models import tiny
from tests.transport.conftest import nats_server
from tests.transport.fleet import SECRET, Fleet
from tests.transport.nats_server import NatsServer

__all__ = ["nats_server"]


async def test_it_warns_once_of_each_reason_however_often_it_tries(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = ["full", "full", "full", "away", "away", "full"]
    put = Cards.put

    async def refused(cards: Cards, worker: str, card: ModelCard) -> int:
        if reasons:
            raise OverloadedError(f"NATS does not store the card: {reasons.pop(0)}", retry_after=1)
        return await put(cards, worker, card)

    monkeypatch.setattr(Cards, "put", refused)
    monkeypatch.setattr(worker_module, "_RETRY_SECONDS", 0.01)
    fleet = Fleet(nats_server)
    engine = EngineSettings(model=str(tiny("llama")), engine="echo", served_model_name=["m"])
    with caplog.at_level(logging.WARNING, worker_module.__name__):
        async with asyncio.timeout(60):
            await fleet.worker(EchoEngine(engine, SECRET))
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert said == ["full", "away", "full"]
    await fleet.close()
