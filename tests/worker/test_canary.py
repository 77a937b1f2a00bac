"""A worker asks itself again for what it answered first, and tells when that has changed."""

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from msgspec.structs import replace

from inlay import demo
from inlay.adapter.library import AdapterLibrary
from inlay.engine.api import Engine
from inlay.engine.check_text import text_ids
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.lora import AdaptedLinear
from inlay.engine.torch.native import kernels
from inlay.http.metrics.engine_health import health_of
from inlay.messages.card import Adapter, CanaryResult, Exactness, ModelCard, SelfCheck, Stats
from inlay.messages.commands import LoadAdapter
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Emit, Output, Request, Sampling, TokenLogprobs
from inlay.worker.adapters import AdapterRegistry
from inlay.worker.canary import LAST, Canary, CanaryAnswer, bound_of, distance
from inlay.worker.host import EngineHost
from tests.adapters import make_lora
from tests.live import fleet
from tests.models import VOCAB_SIZE, tiny

SECRET = Secret(bytes(32))


def echo() -> EngineSettings:
    return EngineSettings.of(model=str(tiny("llama")), engine="echo")


class Changing(EchoEngine):
    """One whose logprobs can change, and which can be busy."""

    def __init__(self, settings: EngineSettings | None = None) -> None:
        super().__init__(settings or echo(), SECRET)
        self.logprob = 0.0
        self.waiting = 0
        self.looked: asyncio.Queue[int] = asyncio.Queue()
        self.asked: list[Request] = []

    def submit(self, request: Request, emit: Emit) -> None:
        self.asked.append(request)

        def changed(output: Output) -> None:
            logprobs = (TokenLogprobs(self.logprob, ((7, self.logprob),)),) * len(output.token_ids)
            emit(replace(output, logprobs=logprobs))

        super().submit(request, changed)

    def stats(self) -> Stats:
        self.looked.put_nowait(self.waiting)
        return replace(super().stats(), waiting=self.waiting)


@asynccontextmanager
async def watched(
    engine: Engine, *loras: Path, **given: bool
) -> AsyncIterator["asyncio.Queue[ModelCard]"]:
    """The cards of a worker that sends canaries all the time, with adapters of these names."""
    await engine.start()
    library = AdapterLibrary(["file:///"], cache_dir=None, cache_bytes=1 << 20, max_bytes=1 << 23)
    adapters = AdapterRegistry(engine, library, SECRET, most=3, drain_seconds=5)
    for lora in loras:
        await adapters.load(LoadAdapter(lora.name, str(lora)))
    host = EngineHost(engine, adapters, canary_interval=0.01, **given)  # type: ignore[arg-type]
    cards: asyncio.Queue[ModelCard] = asyncio.Queue()
    host.watch(cards.put_nowait)
    task = asyncio.create_task(host.watch_numbers())
    try:
        yield cards
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await adapters.close()
        await engine.close()


async def seen(
    cards: "asyncio.Queue[ModelCard]", judge: Callable[[CanaryResult], bool]
) -> ModelCard:
    """The next card with a result that `judge` finds so."""
    async with asyncio.timeout(60):
        while True:
            card = await cards.get()
            if card.canary is not None and judge(card.canary):
                return card


class Seen:
    """A worker as a frontend sees it."""

    def __init__(self, card: ModelCard) -> None:
        self.id = "w"
        self.card = card


async def test_its_prompt_is_made_before_anybody_is_told_of_the_worker(tmp_path: Path) -> None:
    """To read a large tokenizer, all else in Python waits."""
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    engine = Changing(EngineSettings.of(model=str(model), engine="echo"))
    ids = text_ids(model, VOCAB_SIZE, 20)
    await engine.start()
    host = EngineHost(engine, None, canary_interval=0.01)
    await host.first_probe()
    (model / "tokenizer.json").unlink()
    task = asyncio.create_task(host.watch_numbers())
    while not (asked := [each for each in engine.asked if each.id.startswith("canary")]):
        await engine.looked.get()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.close()
    assert ids
    assert asked[0].prompts[0].segments == (Tokens(ids),)


async def test_an_answer_that_changes_shows_after_two_and_goes_when_it_is_right_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Changing()
    async with watched(engine) as cards:
        card = await seen(cards, lambda canary: True)
        assert card.canary is not None
        assert (card.canary.distance, card.canary.failures) == (0.0, 0)
        engine.logprob = -3.0
        once = await seen(cards, lambda canary: canary.in_a_row == 1)
        assert health_of(Seen(once)).well  # type: ignore[arg-type]
        twice = await seen(cards, lambda canary: canary.in_a_row == 2)
        health = health_of(Seen(twice))  # type: ignore[arg-type]
        assert (health.state, health.well) == ("failing", False)
        assert "differs from its first one by 3 " in health.reason
        await seen(cards, lambda canary: canary.in_a_row == 5)
        engine.logprob = 0.0
        card = await seen(cards, lambda canary: canary.in_a_row == 0)
        assert card.canary is not None
        assert card.canary.failures >= 5
        assert health_of(Seen(card)).well  # type: ignore[arg-type]
    # At each change, and when it is not well: not at each wrong answer.
    assert sum("canary" in record.message for record in caplog.records) == 3


async def test_it_comes_behind_all_others_with_a_salt_of_its_own() -> None:
    engine = Changing()
    async with watched(engine) as cards:
        for _ in range(3):
            await seen(cards, lambda canary: True)
    first, second = engine.asked[:2]
    assert first.priority == LAST > 2**31 - 1
    assert first.prompt == second.prompt
    assert len(first.prompt) == 20
    assert first.salt != second.salt
    assert first.sampling.temperature == 0
    assert first.deadline is not None


async def test_none_is_sent_while_requests_wait() -> None:
    engine = Changing()
    async with watched(engine) as cards:
        await seen(cards, lambda canary: True)
        engine.waiting, asked = 1, len(engine.asked)
        for _ in range(3):
            while not await engine.looked.get():
                pass
        assert len(engine.asked) == asked
        engine.waiting = 0
        while not cards.empty():
            cards.get_nowait()
        await seen(cards, lambda canary: True)
        assert len(engine.asked) > asked


def torch_settings(**changes: Any) -> EngineSettings:
    given: dict[str, Any] = {"model": str(tiny("llama")), "num_threads": 1}
    return EngineSettings.of(device="cpu", **given | changes)


@pytest.mark.skipif(
    (native := kernels()) is None or not native.products.pairs,
    reason="no products of pairs of bfloat16 here",
)
async def test_it_is_the_same_bit_for_bit_beside_other_requests() -> None:
    engine = TorchEngine(torch_settings(model=str(demo.model_dir()), batch_invariant=True), SECRET)
    async with watched(engine, batch_invariant=True) as cards:
        first = await seen(cards, lambda canary: True)
        assert first.canary is not None
        assert first.canary.bound == 0.0
        done = asyncio.Event()

        def emit(output: Output) -> None:
            if output.finish_reason is not None:
                running.discard(output.request_id)
                if not running:
                    done.set()

        running = {f"client-{number}" for number in range(4)}
        for number, id_ in enumerate(sorted(running)):
            prompt = Prompt.of(Tokens(tuple(range(5 + number, 30 + 3 * number))))
            params = Sampling(max_tokens=100, temperature=1.0, seed=number, ignore_eos=True)
            engine.submit(Request(id=id_, prompts=(prompt,), params=params), emit)
        await done.wait()
        found = await seen(cards, lambda canary: canary.at > 0)
        assert found.canary is not None
        assert (found.canary.distance, found.canary.failures) == (0.0, 0)
        # What it computed is found by nobody, itself included.
        assert engine.stats().cached_tokens == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weights_that_are_damaged_while_it_serves_are_seen(dtype: str) -> None:
    engine = TorchEngine(torch_settings(dtype=dtype, batch_invariant=False), SECRET)
    async with watched(engine) as cards:
        card = await seen(cards, lambda canary: True)
        assert card.canary is not None
        assert card.canary.bound > 0
        assert engine._model is not None
        norm = next(module for module in engine._model.modules() if "Norm" in type(module).__name__)
        with torch.inference_mode():
            norm.weight.mul_(-1)  # type: ignore[operator]
        card = await seen(cards, lambda canary: canary.wrong)
        assert card.canary is not None
        assert card.canary.distance > card.canary.bound


async def test_adapters_take_turns_and_one_that_is_damaged_is_named(tmp_path: Path) -> None:
    loras = [make_lora(tmp_path / name, tiny("llama"), seed=seed) for seed, name in enumerate("ab")]
    engine = TorchEngine(
        torch_settings(enable_lora=True, max_lora_rank=8, batch_invariant=False), SECRET
    )
    async with watched(engine, *loras) as cards:
        for _ in range(6):
            card = await seen(cards, lambda canary: True)
            assert card.canary is not None
            assert card.canary.failures == 0
        assert engine._model is not None
        with torch.inference_mode():
            for module in engine._model.modules():
                if isinstance(module, AdaptedLinear):
                    for up in module._up:
                        up[1].mul_(-1)
        # Asked again at once, whoever's turn it is.
        card = await seen(cards, lambda canary: canary.wrong)
        assert card.canary is not None
        assert card.canary.adapter == "b"
        assert "the worker's own request of the adapter b differs" in card.canary.reason


async def test_an_adapter_that_was_wrong_and_then_gives_no_answer_stays_accused() -> None:
    engine = Changing()
    await engine.start()
    script = chain([0.0, -3.0, None, None, -3.0], repeat(0.0))

    def submit(request: Request, emit: Emit) -> None:
        engine.logprob = 0.0
        if request.adapter is None:
            engine.submit(request, emit)
        elif (logprob := next(script)) is None:
            emit(Output(request.id, request.attempt, 0, finish_reason="abort"))
        else:
            engine.logprob = logprob
            engine.submit(request, emit)

    told: asyncio.Queue[CanaryResult | None] = asyncio.Queue()
    canary = Canary(
        engine, submit, engine.abort, lambda: [Adapter(name="a", content_id="1", path="")],
        interval=0.01, invariant=False, tell=lambda: told.put_nowait(canary.last),
    )  # fmt: skip
    task = asyncio.create_task(canary.run())
    async with asyncio.timeout(60):
        found = [await told.get() for _ in range(4)]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.close()
    assert [(each.in_a_row, each.adapter) for each in found if each] == [
        (0, ""), (1, "a"), (2, "a"), (0, ""),
    ]  # fmt: skip


def test_a_worker_asks_itself_after_it_wakes_and_after_adapters_come_and_go(
    tmp_path: Path,
) -> None:
    lora = {"lora_name": "a", "lora_path": str(make_lora(tmp_path / "lora", tiny("llama")))}
    with fleet(
        tiny("llama"),
        num_threads=1,
        self_check_interval=600,
        enable_sleep_mode=True,
        enable_lora=True,
        max_lora_rank=8,
    ) as running:
        url = running.serve(admin_api_key=["chief"])
        (worker,) = running.plane.workers()

        async def came(after: float) -> float:
            async with asyncio.timeout(120):
                while True:
                    (worker,) = running.plane.workers()
                    if worker.card.canary is not None and worker.card.canary.at > after:
                        assert worker.card.canary.failures == 0
                        return worker.card.canary.at
                    await asyncio.sleep(0.02)

        last = running.run(came(0))
        for changes in (
            (("/sleep", None), ("/wake_up", None)),
            (("/v1/load_lora_adapter", lora),),
            (("/v1/unload_lora_adapter", {"lora_name": "a"}),),
        ):
            for path, body in changes:
                headers = {"authorization": "Bearer chief"}
                httpx.post(url + path, json=body, headers=headers, timeout=180).raise_for_status()
            last = running.run(came(last))
        labels = f'{{engine="{worker.id}",model_name="tiny"}}'
        metrics = httpx.get(url + "/metrics").text
        assert f"inlay:self_check_canary_failures_total{labels} 0.0" in metrics
        assert f"inlay:self_check_canary_distance{labels} " in metrics


def answer(*tokens: tuple[int, dict[int, float]]) -> CanaryAnswer:
    return CanaryAnswer(
        tuple(id_ for id_, _ in tokens),
        tuple(TokenLogprobs(named[id_], tuple(named.items())) for id_, named in tokens),
    )


def test_distance_is_relative_and_ends_where_another_token_was_chosen() -> None:
    first = answer((1, {1: -1.0, 2: -2.0}), (3, {3: -2.0, 4: -4.0}), (5, {5: -1.0}))
    assert distance(first, first) == 0.0
    near = answer((1, {1: -1.1, 2: -2.2}), (3, {3: -2.2, 4: -4.4}), (5, {5: -1.1}))
    assert distance(first, near) == pytest.approx(0.1)
    # A near tie: beyond it the answers are to other prompts.
    other = answer((2, {2: -1.0, 1: -2.0}), (9, {9: -70.0}), (9, {9: -70.0}))
    assert distance(first, other) == pytest.approx(1 / math.sqrt(2.5))
    # What only one of them names is no lower than is known.
    cut = answer((1, {1: -1.0, 7: -2.0}))
    assert distance(answer((1, {1: -1.0, 2: -2.0})), cut) == 0.0


def test_what_is_no_number_or_missing_is_infinitely_far() -> None:
    first = answer((1, {1: -1.0}), (2, {2: -1.0}))
    assert distance(first, answer((1, {1: math.nan}), (2, {2: -1.0}))) == math.inf
    assert distance(first, answer((1, {1: -1.0}))) == math.inf


async def test_the_bound_is_what_the_start_measured() -> None:
    engine = EchoEngine(echo(), SECRET)
    await engine.start()
    card = replace(engine.card, resuming={"greedy": Exactness.ROUNDED}, dtype="bfloat16")
    checked = SelfCheck(result="passed", reference="", noise=0.02)
    assert bound_of(replace(card, self_check=checked)) == pytest.approx(0.06)
    assert bound_of(card) == pytest.approx(0.15)
    assert bound_of(card, invariant=True) == 0.0
    assert bound_of(engine.card) == pytest.approx(3e-4)
    assert bound_of(replace(card, resuming={"greedy": Exactness.EXACT})) == 0.0
