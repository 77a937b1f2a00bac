"""Preempted sequences go on with the pages they lost: output is that of an engine with room."""

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.needs import PAGES_AGAIN
from inlay.engine.torch.pages.host_memory import HostPages
from inlay.engine.torch.pages.price import WorkerPrice
from inlay.engine.torch.pages.tiers import PageTiers, Tier
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Grammar, Request
from inlay.transport.local.arena import anonymous_file
from tests.engine.conformance import Receiver, ids, make_request, run
from tests.engine.torch.test_page_exchange import WINDOWED, Always, settings, started
from tests.engine.torch.test_page_tiers import keeping, small
from tests.models import make, tiny


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = anonymous_file(8 << 20)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def pages_are_kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed in the engine's thread, not later, so that it is known what is there."""

    def keep(tiers: PageTiers, group: int, digests: Sequence[bytes], records: Tensor) -> None:
        tiers._queued += records.nbytes
        tiers._keep(group, digests, records)

    monkeypatch.setattr(PageTiers, "keep", keep)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3},
    "grammar": {"grammar": Grammar("regex", "[a-z]{50,90}"), "temperature": 1.0, "seed": 2},
}


def requests(**options: Any) -> list[Request]:
    """Four that need 10 pages each at their ends."""
    return [
        make_request(str(n), Prompt.of(Tokens(ids(n, 90 + n))), 60, **options) for n in range(4)
    ]


async def outputs(engine: TorchEngine, some: Sequence[Request]) -> list[list[int]]:
    found = [receiver.output for receiver in await run(engine, *some)]
    assert engine.stats().blocks_used == 0
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("llama", kind) for kind in KINDS),
        *(("windows", kind) for kind in ("greedy", "grammar")),
        *(("qwen3_next", kind) for kind in ("greedy", "penalties")),
    ],
)
async def test_a_preempted_sequence_goes_on_with_its_pages(
    kind: str, model: str, memory: int, tmp_path: Path
) -> None:
    directory = make("qwen3", tmp_path, **WINDOWED) if model == "windows" else tiny(model)
    some = requests(**KINDS[kind])
    async with started(settings(directory)) as (roomy,):
        truth = await outputs(roomy, some)
        assert roomy.stats().preemptions == 0
    config = await small(directory, {"llama": 24, "windows": 38}.get(model, 50))
    async with keeping(config, memory) as (engine, _):
        assert await outputs(engine, some) == truth
        with_pages = engine.stats()
        assert with_pages.preemptions > 0
        assert with_pages.kv_pages_loaded > 0
        assert with_pages.kv_pages_refused == 0


class Never(WorkerPrice):
    """Computing is always cheaper."""

    def is_worth(self, source: Any, positions: int, num_bytes: int) -> bool:
        return False


async def test_it_computes_less_than_one_that_computes_them_again(memory: int) -> None:
    some, config = requests(), await small(tiny("llama"))
    computed = []
    for price in (Always(), Never()):
        async with keeping(config, memory) as (engine, _):
            assert engine._exchange is not None
            engine._exchange.price = price
            await outputs(engine, some)
            stats = engine.stats()
            assert stats.preemptions > 0
            assert (stats.kv_pages_loaded > 0) == isinstance(price, Always)
            computed.append(stats.progress)
            await engine.reset_prefix_cache()
    assert computed[0] < computed[1]


async def test_pages_that_were_damaged_meanwhile_are_computed(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = requests()
    async with started(settings(tiny("llama"))) as (roomy,):
        truth = await outputs(roomy, some)
    read = PageTiers.read

    def damaged(tiers: PageTiers, store: Tier, group: int, digests: Sequence[bytes]) -> Tensor:
        host = tiers.host
        assert host is not None
        for digest in digests:
            if host.has(group, digest):
                host._slots[host._places[group, digest], 100:104] = 255
        return read(tiers, store, group, digests)

    monkeypatch.setattr(PageTiers, "read", damaged)
    async with keeping(await small(tiny("llama")), memory) as (engine, _):
        assert await outputs(engine, some) == truth
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.kv_pages_refused > 0
        assert stats.kv_pages_loaded == 0


async def test_a_sequence_that_waits_for_its_pages_may_end(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go_on = threading.Event(), threading.Event()
    read = PageTiers.read

    def slow(tiers: PageTiers, store: Tier, group: int, digests: Sequence[bytes]) -> Tensor:
        held.set()
        go_on.wait(60)
        return read(tiers, store, group, digests)

    monkeypatch.setattr(PageTiers, "read", slow)
    some = requests()
    async with started(settings(tiny("llama"))) as (roomy,):
        truth = await outputs(roomy, some)
    async with keeping(await small(tiny("llama")), memory) as (engine, _):
        receivers = [Receiver(request) for request in some]
        for request, receiver in zip(some, receivers, strict=True):
            engine.submit(request, receiver)
        await asyncio.to_thread(held.wait, 60)
        core = await engine._ask(lambda core: core)
        waiting = next(one.request.id for one in core.scheduler.waiting if PAGES_AGAIN in one.needs)
        engine.abort(waiting)
        await receivers[int(waiting)].ended()
        assert receivers[int(waiting)].last.finish_reason == "abort"
        # Nothing is read for it any more.
        for _ in range(1000):
            await asyncio.sleep(0)
        assert waiting not in engine._needs
        # The others go on without it.
        go_on.set()
        for number, receiver in enumerate(receivers):
            await receiver.ended()
            if number != int(waiting):
                assert receiver.output == truth[number]
        assert engine.stats().blocks_used == 0
        assert not any(one.needs for one in core._sequences.values())


async def test_an_engine_that_closes_waits_for_what_is_read(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory and files of a tier are let go of when nobody reads them any more."""
    held, go_on = threading.Event(), threading.Event()
    read, close = HostPages.read, HostPages.close
    order: list[str] = []

    def slow(host: HostPages, group: int, digests: Sequence[bytes]) -> Tensor:
        held.set()
        go_on.wait(5)
        order.append("read")
        return read(host, group, digests)

    def closed(host: HostPages) -> None:
        order.append("closed")
        close(host)

    async with keeping(await small(tiny("llama")), memory) as (engine, _):
        some = requests()
        await outputs(engine, some)
        monkeypatch.setattr(HostPages, "read", slow)
        monkeypatch.setattr(HostPages, "close", closed)
        receivers = [Receiver(request) for request in some]
        for request, receiver in zip(some, receivers, strict=True):
            engine.submit(request, receiver)
        await asyncio.to_thread(held.wait, 60)
        exchange = engine._exchange
        assert exchange is not None
        closing = asyncio.create_task(engine.close())
        for receiver in receivers:
            await receiver.ended()
            assert receiver.last.finish_reason == "abort"
        await asyncio.gather(*exchange._tasks, return_exceptions=True)
        assert order == []
        go_on.set()
        await closing
        assert set(order[:-1]) == {"read"}
        assert order[-1] == "closed"
        monkeypatch.undo()
