"""Whatever is asked in whatever order, and whatever fails, an adapter is in the card exactly when it can be used, and nothing is left behind."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inlay.adapter.library import AdapterLibrary
from inlay.base.errors import InlayError
from inlay.engine.settings import EngineSettings
from inlay.messages.card import ModelCard
from inlay.messages.commands import LoadAdapter
from inlay.messages.digest import Secret
from inlay.messages.request import Output
from inlay.worker.adapters import AdapterRegistry
from inlay.worker.host import EngineHost
from tests.worker.echoing import AdaptingEcho
from tests.worker.test_adapters import Client, write_lora, write_prompt

T = TypeVar("T")
NAMES = strategies.sampled_from(["a", "b", "c", "m"])
PATHS = strategies.sampled_from(["one", "two", "rows", "corrupt", "missing"])
FAILURES = strategies.sampled_from(["load_adapter", "unload_adapter", "refuses"])
MOST = 2


class InlineExecutor(ThreadPoolExecutor):
    """Does at once what it is given, so that the same steps always have the same outcome."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class AdaptersMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(InlineExecutor())
        self.root = Path(tempfile.mkdtemp())
        (self.root / "config.json").write_text(
            '{"vocab_size": 99, "hidden_size": 8, "max_position_embeddings": 100000}'
        )
        write_lora(self.root / "one", 1)
        write_lora(self.root / "two", 2)
        write_prompt(self.root / "rows")
        write_lora(self.root / "corrupt")
        (self.root / "corrupt" / "adapter_model.safetensors").write_bytes(b"\xff" * 300)
        engine = EngineSettings.of(
            model=str(self.root), engine="echo", served_model_name=["m"], max_cpu_loras=MOST
        )
        self.engine = AdaptingEcho(engine, Secret(bytes(32)))
        self.run(self.engine.start())
        library = AdapterLibrary(
            ["file:///"], cache_dir=None, cache_bytes=1 << 20, max_bytes=1 << 20
        )
        self.adapters = AdapterRegistry(
            self.engine, library, Secret(bytes(32)), most=MOST, drain_seconds=60
        )
        self.host = EngineHost(self.engine, self.adapters)
        self.card: ModelCard
        self.host.watch(self.heard)
        self.clients: list[Client] = []
        self.under_way: list[asyncio.Task[Any]] = []

    def heard(self, card: ModelCard) -> None:
        self.card = card

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    async def some_turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    @rule(name=NAMES, path=PATHS, in_place=strategies.booleans(), waits=strategies.booleans())
    def load(self, name: str, path: str, in_place: bool, waits: bool) -> None:
        order = LoadAdapter(name, str(self.root / path), in_place=in_place)
        task = self.loop.create_task(self.adapters.load(order))
        self.under_way.append(task)
        if waits:
            self.run(asyncio.wait([task]))
            if task.exception() is None:
                assert name in [adapter.name for adapter in self.card.adapters]

    @rule(name=NAMES, seconds=strategies.sampled_from([0.0, None]))
    def unload(self, name: str, seconds: float | None) -> None:
        self.under_way.append(self.loop.create_task(self.adapters.unload(name, seconds)))
        self.run(self.some_turns(2))

    @rule(name=NAMES, max_tokens=strategies.sampled_from([1, 20, 50_000]))
    def ask(self, name: str, max_tokens: int) -> None:
        known = name == "m" or name in [adapter.name for adapter in self.card.adapters]
        self.run(self.send(None if name == "m" else name, max_tokens))
        client = self.clients[-1]
        refused = bool(client.deltas) and client.deltas[0].error is not None
        assert refused is not known

    async def send(self, adapter: str | None, max_tokens: int) -> None:
        self.clients.append(Client(self.host, f"work-{len(self.clients)}", adapter, max_tokens))

    @rule(failure=FAILURES)
    def fail_next(self, failure: str) -> None:
        self.engine.failing.add(failure)

    @rule(count=strategies.integers(1, 30))
    def go_on(self, count: int) -> None:
        self.run(self.some_turns(count))

    @invariant()
    def the_card_lists_what_is_ready_and_nothing_else(self) -> None:
        if not hasattr(self, "card"):
            return
        statuses = self.adapters.statuses()
        ready = [status for status in statuses if status.state == "ready"]
        assert sorted(adapter.name for adapter in self.card.adapters) == sorted(
            s.name for s in ready
        )
        assert len({status.name for status in ready}) == len(ready)
        assert len(self.engine.held) <= MOST + 1

    @invariant()
    def what_is_ready_is_in_the_engine(self) -> None:
        if not hasattr(self, "card"):
            return
        for adapter in self.card.adapters:
            held = f"{adapter.name}@{adapter.content_id}" in self.engine.held
            assert held == (adapter.kind == "lora")

    async def end(self) -> None:
        await asyncio.gather(*self.under_way, return_exceptions=True)
        self.engine.failing.clear()
        for status in self.adapters.statuses():
            try:
                await self.adapters.unload(status.name, 0)
            except InlayError as error:
                raise AssertionError(f"{status} cannot be unloaded") from error
        assert not self.adapters.statuses()
        assert not self.engine.held

    def teardown(self) -> None:
        try:
            if hasattr(self, "card"):
                self.leave()
        finally:
            if hasattr(self, "root"):
                shutil.rmtree(self.root)

    def leave(self) -> None:
        for client in self.clients:
            self.host.abort(f"work-{self.clients.index(client)}")
        try:
            self.run(asyncio.wait_for(self.end(), 60))
            for client in self.clients:
                last: Output = client.deltas[-1]
                assert last.finish_reason is not None
            for task in self.under_way:
                error = task.exception()
                assert error is None or isinstance(error, InlayError)
        finally:
            self.run(self.adapters.close())
            self.run(self.engine.close())
            self.run(self.loop.shutdown_default_executor())
            self.loop.close()


AdaptersMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAdapters = AdaptersMachine.TestCase
