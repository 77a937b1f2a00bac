"""The thread around the engine: hand-over, failure, starting and closing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from inlay.base.errors import EngineError, InvalidRequestError, OverloadedError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output
from tests.engine.conformance import Receiver, ids, make_request, run
from tests.models import tiny


def settings(**changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model": str(tiny("llama")),
        "device": "cpu",
        "num_threads": 1,
        "kv_cache_memory_bytes": 8 << 20,
    }
    return EngineSettings.of(**(values | changes))


def create(**changes: Any) -> TorchEngine:
    return TorchEngine(settings(**changes), Secret(bytes(32)))


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    engine = create()
    await engine.start()
    yield engine
    await engine.close()


def prompt(seed: int = 1, count: int = 20) -> Prompt:
    return Prompt.of(Tokens(ids(seed, count)))


async def test_each_step_wakes_the_loop_once_however_many_requests_it_served(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    calls: list[Callable[..., object]] = []
    call = loop.call_soon_threadsafe

    def counting(callback: Callable[..., object], *arguments: Any) -> asyncio.Handle:
        calls.append(callback)
        return call(callback, *arguments)

    before = engine.stats().steps
    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    receivers = await run(
        engine, *(make_request(str(n), prompt(n), max_tokens=20) for n in range(4))
    )
    assert (
        len(calls) == engine.stats().steps - before < sum(len(found.deltas) for found in receivers)
    )


async def test_a_receiver_that_raises_harms_no_other(
    engine: TorchEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(output: Output) -> None:
        raise ValueError(f"cannot take {output.offset}")

    engine.submit(make_request("broken", prompt(1)), broken)
    (found,) = await run(engine, make_request("whole", prompt(2)))
    assert len(found.output) == 8
    assert "the receiver of request broken failed" in caplog.text


async def test_a_receiver_that_cannot_take_the_end_gets_an_error(engine: TorchEngine) -> None:
    last = asyncio.get_running_loop().create_future()

    def emit(output: Output) -> None:
        if output.finish_reason == "error":
            last.set_result(output)
        elif output.finish_reason is not None:
            raise RuntimeError("too large to be encoded")

    engine.submit(make_request("cut", prompt()), emit)
    async with asyncio.timeout(60):
        ended = await last
    assert ended.error is not None
    assert "was not sent" in ended.error.message


async def test_nothing_more_is_computed_for_a_receiver_that_has_missed_something(
    engine: TorchEngine,
) -> None:
    last = asyncio.get_running_loop().create_future()

    def emit(output: Output) -> None:
        if output.finish_reason is None:
            raise RuntimeError("nobody takes it")
        last.set_result(output)

    engine.submit(make_request("lost", prompt(), 400), emit)
    async with asyncio.timeout(60):
        ended = await last
    assert ended.finish_reason == "abort"
    assert ended.usage.completion_tokens < 400
    (found,) = await run(engine, make_request("lives", prompt()))
    assert len(found.output) == 8


def failing_after(steps: int) -> Callable[..., Any]:
    """`CausalModel.hidden` that fails after a number of calls."""
    hidden = CausalModel.hidden
    left = steps

    def fail(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("the device fell off the bus")
        return hidden(*arguments)

    return fail


async def test_a_step_that_fails_ends_all_requests_with_an_error_and_the_engine_says_so(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CausalModel, "hidden", failing_after(12))
    assert await engine.probe() > 0
    requests = [make_request(str(n), prompt(n), max_tokens=20, attempt=3) for n in range(3)]
    for one, receiver in zip(requests, await run(engine, *requests), strict=True):
        assert receiver.last.error is not None, one
        assert isinstance(receiver.last.error.to_error(), EngineError)
        assert "the device fell off the bus" in receiver.last.error.message
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="fell off the bus"):
        await engine.probe()
    with pytest.raises(EngineError, match="fell off the bus"):
        await engine.reset_prefix_cache()
    with pytest.raises(EngineError, match="fell off the bus"):
        engine.submit(requests[0], Receiver(requests[0]))
    assert "the engine failed" in caplog.text
    assert "fell off the bus" in (await engine.failed()).message


async def test_requests_of_an_engine_without_memory_may_go_on_elsewhere(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = CausalModel.hidden

    def fail(model: CausalModel, *arguments: Any) -> Any:
        torch.empty(1 << 62, dtype=torch.uint8)
        return hidden(model, *arguments)

    monkeypatch.setattr(CausalModel, "hidden", fail)
    requests = [make_request(str(n), prompt(n), max_tokens=20) for n in range(3)]
    for receiver in await run(engine, *requests):
        assert receiver.last.error is not None
        assert isinstance(receiver.last.error.to_error(), OverloadedError)
    assert "out of memory" in (await engine.failed()).message
    with pytest.raises(OverloadedError, match="out of memory"):
        engine.submit(requests[0], Receiver(requests[0]))


async def test_a_probe_during_the_failure_raises(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalModel, "hidden", failing_after(0))
    with pytest.raises(EngineError, match="fell off the bus"):
        await engine.probe()


async def test_a_request_that_cannot_be_admitted_fails_alone(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = Core.admit

    def picky(core: Core, one: Any, *more: Any, **named: Any) -> list[Output]:
        if one.id == "bad":
            raise ValueError("bad")
        return admit(core, one, *more, **named)

    monkeypatch.setattr(Core, "admit", picky)
    bad = make_request("bad", prompt(1))
    told: list[Output] = []
    engine.submit(bad, told.append)
    (found,) = await run(engine, make_request("good", prompt(2)))
    assert found.last.finish_reason == "length"
    assert [(output.finish_reason, output.offset) for output in told] == [("error", 0)]


async def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    engine = create(model=str(tmp_path))
    with pytest.raises(InvalidRequestError):
        await engine.start()
    with pytest.raises(EngineError, match="not started"):
        engine.submit(make_request("x", prompt()), lambda output: None)
    await engine.close()


async def test_a_cache_too_small_for_one_context_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="kv_cache_memory_bytes is 1000"):
        await create(kv_cache_memory_bytes=1000).start()


async def test_before_it_starts_it_serves_nothing_and_closes() -> None:
    engine = create()
    with pytest.raises(EngineError, match="not started"):
        _ = engine.card
    with pytest.raises(EngineError, match="not started"):
        await engine.probe()
    with pytest.raises(EngineError, match="not running"):
        await engine.reset_prefix_cache()
    await engine.close()


async def test_a_closed_engine_refuses_request_and_cannot_start_again() -> None:
    engine = create()
    await engine.start()
    await engine.close()
    with pytest.raises(OverloadedError, match="closing"):
        engine.submit(make_request("x", prompt()), lambda output: None)
    with pytest.raises(EngineError, match="started before"):
        await engine.start()


async def test_the_card_carries_names_limits_and_defaults() -> None:
    engine = create(served_model_name=["mine", "also"], max_model_len=128, max_logprobs=7)
    await engine.start()
    card = engine.card
    await engine.close()
    assert (card.name, card.aliases) == ("mine", ("also",))
    assert (card.limits.max_model_len, card.limits.max_logprobs) == (128, 7)
    assert card.limits.max_prompt_embeds_abs == pytest.approx(100 * card.embedding_abs_max)
    assert card.num_blocks * card.block_size >= 128


async def test_a_probe_goes_before_all_that_waits() -> None:
    engine = create(max_num_seqs=1)
    await engine.start()
    requests = [make_request(str(n), prompt(n), max_tokens=100) for n in range(4)]
    receivers = [Receiver(one) for one in requests]
    for one, receiver in zip(requests, receivers, strict=True):
        engine.submit(one, receiver)
    await receivers[0].begun()
    await engine.probe()
    assert not receivers[-1].deltas
    for receiver in receivers:
        await receiver.ended()
    await engine.close()
    assert engine.stats().running == 0
