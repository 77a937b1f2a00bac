"""Cards that NATS does not store, or that a frontend does not understand."""

import asyncio
import logging
from typing import Any

import pytest
from msgspec.structs import replace
from nats.js.kv import KeyValue

from inlay.base.errors import OverloadedError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import ModelCard
from inlay.transport.nats import worker as worker_module
from inlay.transport.nats.cards import Cards
from inlay.transport.nats.member import Member
from tests.models import tiny
from tests.transport.conftest import nats_server
from tests.transport.fleet import SECRET, Fleet, found
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
    engine = EngineSettings.of(model=str(tiny("llama")), engine="echo", served_model_name=["m"])
    with caplog.at_level(logging.WARNING, worker_module.__name__):
        async with asyncio.timeout(60):
            await fleet.worker(EchoEngine(engine, SECRET))
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert said == ["full", "away", "full"]
    await fleet.close()


async def test_cards_are_listed_though_the_end_of_the_list_is_told_too_early(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchall = KeyValue.watchall

    async def ending_early(storage: KeyValue, **options: Any) -> KeyValue.KeyWatcher:
        watcher = await watchall(storage, **options)
        watcher._updates._queue.appendleft(None)  # type: ignore[attr-defined]
        return watcher

    monkeypatch.setattr(KeyValue, "watchall", ending_early)
    member = await Member.join(nats_server.settings("listed"), "frontend")
    assert await member.cards.workers() == set()
    card = EchoEngine(EngineSettings.of(model=str(tiny("llama")), engine="echo"), SECRET)
    await card.start()
    for worker in ("one", "two", "three"):
        await member.cards.put(worker, card.card)
    assert await member.cards.workers() == {"one", "two", "three"}
    for worker in ("one", "three"):
        await member.cards.remove(worker)
    assert await member.cards.workers() == {"two"}
    await member.cards.remove("two")
    assert await member.cards.workers() == set()
    await member.leave()


class Painter(EchoEngine):
    """An engine of a later version: it does what nobody here knows."""

    @property
    def card(self) -> ModelCard:
        return replace(super().card, tasks=("paint",))


async def test_a_card_of_an_unknown_task_is_left_out_and_the_others_are_served(
    nats_server: NatsServer,
) -> None:
    fleet = Fleet(nats_server)
    engine = EngineSettings.of(model=str(tiny("llama")), engine="echo", served_model_name=["m"])
    later = await fleet.worker(Painter(engine, SECRET))
    await fleet.worker(EchoEngine(engine, SECRET))
    plane = await fleet.frontend()
    async with asyncio.timeout(60):
        (worker,) = await found(plane)
        while later.member.id not in plane.unavailable():
            await plane.changed()
    assert worker.card.tasks[0] == "generate"
    assert "paint" in plane.unavailable()[later.member.id]
    assert plane.workers() == [worker]
    await fleet.close()
