"""Pages flow while the rest of their prompt is computed elsewhere: output is that of one engine."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from inlay.base.errors import OverloadedError
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.pages import fetching
from inlay.engine.torch.step import Core
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output, Payload, Request
from tests.engine.conformance import Receiver, ids, make_request, run
from tests.engine.torch.test_page_exchange import (
    FROM_PEER,
    PEER,
    WINDOWED,
    answers,
    one_page_at_a_time,
    pair,
)
from tests.models import make, tiny

# Seven chunks of 64, and an end where a page ends.
PROMPT = Prompt.of(Tokens(ids(1, 448)))
PAGES_OF_IT = 28


async def core_of(engine: TorchEngine) -> Core:
    return await engine._ask(lambda core: core)


async def in_step(computing: TorchEngine, fetching: TorchEngine) -> list[int]:
    """Have an engine compute nothing more until the other has the pages that it has computed.

    If pages do not flow meanwhile, it waits for ever. Returns the pages there were after each step.
    """
    core, other = await core_of(computing), await core_of(fetching)
    step, steps = core.step, [0]

    def held() -> list[Output]:
        if len(other.scheduler.cache) < steps[-1]:
            time.sleep(0.001)
            return []
        outputs = step()
        if core.scheduler.running:
            steps.append(len(core.scheduler.cache))
        return outputs

    core.step = held  # type: ignore[method-assign]
    return steps


def prefetch(prompt: Prompt, name: str = "prefetch", **changes: Any) -> Request:
    return replace(
        make_request(name, prompt, 1, **changes), prefetch=True, sources=FROM_PEER, trace=None
    )


def submit(engine: TorchEngine, request: Request) -> "asyncio.Future[Output]":
    """The last output of a request."""
    ended: asyncio.Future[Output] = asyncio.get_running_loop().create_future()

    def emit(output: Output) -> None:
        if output.finish_reason is not None:
            ended.set_result(output)

    engine.submit(request, emit)
    return ended


async def test_pages_come_while_the_rest_of_the_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_page_at_a_time(monkeypatch)
    async with pair(tiny("llama")) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        alone, _ = await answers(giving, make_request("alone", PROMPT, salt="alone"))
        await giving.reset_prefix_cache()
        steps = await in_step(giving, asking)
        # It asks before there is anything, or anybody who computes it.
        ahead = submit(asking, prefetch(PROMPT))
        first = await submit(giving, make_request("one", PROMPT, 1))
        assert (await ahead).finish_reason == "stop"
        assert len(set(steps)) >= 7
        assert asking.stats().kv_pages_fetched == giving.stats().kv_pages_given == PAGES_OF_IT
        # Who goes on computes one position.
        before = asking.stats()
        rest = make_request("one", PROMPT, prior_output=first.token_ids, sources=FROM_PEER)
        (receiver,) = await run(asking, rest)
        assert [*first.token_ids, *receiver.output] == alone
        after = asking.stats()
        assert after.kv_pages_fetched == before.kv_pages_fetched
        assert after.progress - before.progress == len(receiver.output)


@pytest.mark.parametrize("model", ["all windows", "windows among full", "latent", "bfloat16"])
async def test_so_do_those_of_other_models(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = {
        "all windows": lambda: tiny("mistral"),
        "windows among full": lambda: make("qwen3", tmp_path, **WINDOWED),
        "latent": lambda: tiny("deepseek_v3"),
        "bfloat16": lambda: tiny("llama", "bfloat16"),
    }[model]()
    one_page_at_a_time(monkeypatch)
    prompt = Prompt.of(Tokens(ids(1, 200)))
    async with pair(directory) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        alone, _ = await answers(giving, make_request("alone", prompt, salt="alone"))
        ahead = submit(asking, prefetch(prompt))
        first = await submit(giving, make_request("one", prompt, 1))
        assert (await ahead).finish_reason == "stop"
        rest = make_request("one", prompt, prior_output=first.token_ids)
        assert await answers(asking, rest) == (alone[len(first.token_ids) :], 192)


async def test_a_request_joins_the_prefetch_that_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_page_at_a_time(monkeypatch)
    async with pair(tiny("llama")) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        alone, _ = await answers(giving, make_request("alone", PROMPT, salt="alone"))
        ahead = submit(asking, prefetch(PROMPT))
        # Nobody computes yet; the request waits for the same pages.
        rest = make_request("one", PROMPT, prior_output=tuple(alone[:1]), sources=FROM_PEER)
        receiver = Receiver(rest)
        asking.submit(rest, receiver)
        await submit(giving, make_request("one", PROMPT, 1))
        await receiver.ended()
        assert (await ahead).finish_reason == "stop"
        assert receiver.output == alone[1:]
        assert asking.stats().kv_pages_fetched == giving.stats().kv_pages_given == PAGES_OF_IT


async def test_a_prefetch_ends_when_it_is_stopped_or_its_peer_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "WAIT_SECONDS", 0.05)
    async with pair(tiny("llama")) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        stopped = submit(asking, prefetch(PROMPT))
        while len(direct.asked) < 3:  # noqa: ASYNC110  # it asks again
            await asyncio.sleep(0)
        asking.abort("prefetch")
        assert (await stopped).finish_reason == "abort"
        late = submit(asking, prefetch(PROMPT, deadline=0.2))
        assert (await late).finish_reason == "stop"

        def cut(number: int, found: list[Payload]) -> list[Payload]:
            raise OverloadedError("the connection was cut")

        direct.tamper = cut
        assert (await submit(asking, prefetch(PROMPT))).finish_reason == "stop"
        assert asking.stats().kv_pages_fetched == 0
        # Nobody waits at the peer for ever.
        while giving._exchange is None or giving._exchange._num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        closed = submit(asking, prefetch(PROMPT))
        await asking.close()
        assert (await closed).finish_reason == "abort"


async def test_without_peers_a_prefetch_ends_at_once() -> None:
    async with pair(tiny("llama")) as (direct, _):
        giving = direct.engines[PEER]
        assert giving is not None
        assert (await submit(giving, prefetch(PROMPT))).finish_reason == "stop"
        assert giving.stats().prompt_tokens == 0
