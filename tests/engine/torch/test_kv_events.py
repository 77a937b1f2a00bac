"""A torch engine under a worker's host.

What routers and readers of vLLM's events hear of the requests it runs.
"""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from inlay import engine as engines
from inlay.base.errors import InvalidRequestError
from inlay.engine.api import GenerateEngine
from inlay.engine.kv_events import EventBatch
from inlay.engine.kv_subscriber import KvSubscriber
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import with_digests
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.routing import KEY_SIZE, KvEvents, routing_chain
from inlay.worker.host import EngineHost
from tests.engine.conformance import SECRET, ids, make_request, run
from tests.engine.kv_view import View
from tests.engine.reference import look_up, rows_of
from tests.models import tiny


def settings(config: dict[str, object]) -> EngineSettings:
    return EngineSettings.of(
        model=str(tiny("llama")),
        device="cpu",
        num_threads=1,
        block_size=16,
        max_model_len=128,
        kv_cache_memory_bytes=1 << 16,
        kv_events_config=json.dumps(config),
        async_scheduling=True,
    )


async def test_routers_and_readers_hear_of_what_is_cached(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    engine = engines.create(settings(config), SECRET)
    await engine.start()
    assert isinstance(engine, GenerateEngine)
    host = EngineHost(engine)
    assert host.card.kv_events
    told: list[KvEvents] = []
    host.watch_cache(told.append)
    view, last = View(), threading.Event()

    def take(batch: EventBatch) -> None:
        view.read(batch)
        if not view.blocks:
            last.set()

    reader = KvSubscriber(endpoint, replay, "", take=take, lost=pytest.fail)
    try:
        rows = rows_of(look_up(tiny("llama"), ids(1, 30)))
        prompts = [
            with_digests(Prompt.of(Tokens(ids(n, 40)), rows, Tokens(ids(n, 9))), SECRET)
            for n in range(6)
        ]
        for number, prompt in enumerate(prompts):
            (found,) = await run(engine, make_request(str(number), prompt, 20, salt="mine"))
        keys = routing_chain(
            prompt, host.card, SECRET, salt="mine", output=tuple(found.output[:-1])
        )
        snapshot = await host.kv_snapshot()
        held = bytes(snapshot.keys.view)
        cached = {held[start : start + KEY_SIZE] for start in range(0, len(held), KEY_SIZE)}
        assert {keys[start : start + KEY_SIZE] for start in range(0, len(keys), KEY_SIZE)} <= cached
        assert [one.sequence for one in told] == list(range(1, snapshot.sequence + 1))
        # Six prompts do not fit: earlier blocks are evicted, and reported as removed.
        assert len(cached) <= host.card.num_blocks < 6 * (len(keys) // KEY_SIZE)
        await engine.reset_prefix_cache()
        # What a step holds that is not read yet stays for that long.
        while len((await host.kv_snapshot()).keys.view):
            await engine.reset_prefix_cache()
    finally:
        await engine.close()
        assert await asyncio.to_thread(last.wait, 30)
        reader.close()
    assert view.parents
    assert not view.blocks


async def test_an_endpoint_that_cannot_be_used_keeps_the_engine_from_starting() -> None:
    engine = engines.create(
        settings({"enable_kv_cache_events": True, "endpoint": "tcp://*:99999"}), SECRET
    )
    with pytest.raises(InvalidRequestError, match="port of rank 0 would be 99999"):
        await engine.start()
    await engine.close()
