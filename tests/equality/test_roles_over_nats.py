"""A prompt computed at a prefill worker and decoded at another gives the answer of one worker."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.messages.commands import LoadAdapter
from inlay.messages.prompt import Buffer, Prompt, Tokens
from inlay.messages.request import Emit, Grammar, Output, Request
from inlay.router import decide
from inlay.router.resume import ResumingStream
from inlay.router.settings import RouterSettings
from inlay.transport import wire
from inlay.transport.api import Stream
from inlay.transport.parts import Outgoing
from tests import adapters
from tests.engine import reference
from tests.engine.conformance import ids, make_request
from tests.engine.torch import encode_reference
from tests.engine.torch.test_page_exchange import WINDOWED, settings
from tests.engine.torch.vision_reference import Picture, prompt_of
from tests.equality.test_pages_over_nats import Pair, fleet_of
from tests.models import make, tiny
from tests.router.sending import IDLE
from tests.transport.conftest import nats_server
from tests.transport.nats_server import NatsServer

__all__ = ["nats_server"]

COUNT = 24
EAGER = RouterSettings(router_interference_weight=1000)


@pytest.fixture(autouse=True)
def short_prompts_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "LEAST_HANDOVER", 32)


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were written into another's memory at a time: small pages go as large ones do."""
    monkeypatch.setattr(wire, "CHUNK_BYTES", 512)
    found, write = [], Outgoing.write

    def noted(self: Outgoing, limit: int) -> int:
        found.append(write(self, limit))
        return found[-1]

    monkeypatch.setattr(Outgoing, "write", noted)
    return found


class Roles:
    """A prefill worker, and a decode worker that is busy."""

    def __init__(self, both: Pair, busy: Stream) -> None:
        self.both = both
        self.prefill, self.decode = both.engines.values()
        self.busy = busy

    async def alone(self, request: Request) -> list[Output]:
        """What one worker answers; its pages are another tenant's."""
        (worker,) = [one for one in self.both.plane.workers() if one.card.phase == "decode"]
        return await read(worker.send(replace(request, salt="alone")))

    async def apart(self, request: Request) -> list[Output]:
        """What the fleet answers."""
        (stream,) = await self.both.router.send("m", [request])
        assert stream.worker.startswith(next(iter(self.both.engines)))
        answer = await read(stream)
        assert stream.worker.startswith(list(self.both.engines)[1])
        return answer


async def read(stream: "Stream | ResumingStream") -> list[Output]:
    async with asyncio.timeout(120):
        return [output async for outputs in stream for output in outputs]


def shown(answer: Sequence[Output]) -> tuple[Any, ...]:
    """All that a client can see."""
    last = answer[-1]
    assert last.usage is not None
    tokens = [id_ for output in answer for id_ in output.token_ids]
    # A position is computed in other steps here and there, which differ in the last bits.
    scores = [
        (pytest.approx(scored.logprob, abs=1e-5), [id_ for id_, _ in scored.top])
        for output in answer
        for scored in output.logprobs
    ]
    assert [output for output in answer[:-1] if output.finish_reason] == []
    return tokens, scores, last.finish_reason, last.usage.completion_tokens


@asynccontextmanager
async def roles(server: NatsServer, config: EngineSettings) -> AsyncIterator[Roles]:
    config = config.replace(served_model_name=["m"])
    prefill, decode = (config.replace(role=role) for role in ("prefill", "decode"))
    async with fleet_of(server, prefill, decode, router=EAGER) as both:
        # A client that does not read keeps its worker busy for as long as it likes.
        begun = make_request("busy", Prompt.of(Tokens(ids(9, 1))), 4)
        (busy,) = await both.router.send("m", [begun])
        found = Roles(both, busy)
        yield found
        await read(busy)
        assert set(both.router.loads().values()) == {IDLE}
        # One that was killed has what it had.
        for worker in both.plane.workers():
            assert both.engines[worker.id.partition(".")[0]].stats().blocks_used == 0


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.95},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.3,
        "min_tokens": 9,
    },
    "logprobs": {"logprobs": 3},
    "grammar": {"grammar": Grammar("regex", "[a-z]{3,40}"), "temperature": 1.0, "seed": 2},
    "schema": {
        "grammar": Grammar("json_schema", SCHEMA),
        "temperature": 1.0,
        "seed": 4,
        "ignore_eos": False,
    },
    "tenant": {"salt": "tenant"},
}


@pytest.mark.thorough
async def test_answers_are_those_of_one_worker(nats_server: NatsServer, written: list[int]) -> None:
    directory, tokens = tiny("llama"), ids(1, 150)
    noise = 0.5 * torch.randn(60, 64, generator=torch.Generator().manual_seed(4))
    noise = noise[:, : reference.look_up(directory, [3]).shape[1]]
    alone = reference.rows_of(noise.repeat(3, 1) * torch.linspace(0.5, 1, 180)[:, None])
    rows = reference.rows_of(reference.look_up(directory, tokens[30:90]))
    prompts = {
        "text": Prompt.of(Tokens(tokens)),
        "mixed": Prompt.of(Tokens(tokens[:30]), rows, Tokens(tokens[90:])),
        "rows": Prompt.of(reference.rows_of(noise), Tokens(ids(2, 70))),
        "rows alone": Prompt.of(alone),
        "by reference": Prompt.of(replace(alone, data=Buffer(alone.data.view, "pe-of-a-test/0"))),
    }
    async with roles(nats_server, settings(directory)) as apart:
        handed = 0
        for name, options in KINDS.items():
            for kind, prompt in prompts.items():
                request = make_request(f"{name}-{kind}", prompt, COUNT, **options)
                # The fleet is to compute each prompt, not to find it.
                request = replace(request, salt=f"{request.salt}-{name}-{kind}")
                truth = await apart.alone(request)
                assert shown(await apart.apart(request)) == shown(truth), (name, kind)
                handed += 1
                assert apart.both.router.stats.handovers == {"m": handed}
        assert apart.decode.stats().kv_pages_fetched >= handed * (129 // 16)
        assert sum(written) > handed * 129 * 64 or sys.platform != "linux"
        # A stored prompt's bytes went to each worker once.
        for worker in apart.both.workers.values():
            kept = worker.endpoint._cache.stats
            assert kept.kept_misses == 1
            assert kept.kept_hits >= len(KINDS) - 1


async def test_the_loss_of_either_worker_is_no_outage(nats_server: NatsServer) -> None:
    first, second = (Prompt.of(Tokens(ids(seed, 150))) for seed in (5, 6))
    async with roles(nats_server, settings(tiny("llama"))) as apart:
        router, plane = apart.both.router, apart.both.plane
        prefill, decode = apart.both.workers.values()
        truths = [
            shown(await apart.alone(make_request("r", prompt, COUNT))) for prompt in (first, second)
        ]
        # The prefill worker goes on by itself.
        (stream,) = await router.send("m", [make_request("r", first, COUNT)])
        assert router.stats.handovers == {"m": 1}
        await decode.kill()
        assert shown(await read(stream)) == truths[0]
        # It serves alone, too.
        while len(plane.workers()) > 1:
            await plane.changed()
        (stream,) = await router.send("m", [make_request("r", second, COUNT)])
        assert shown(await read(stream)) == truths[1]
        assert router.stats.handovers == {"m": 1}
        assert prefill.engine.stats().kv_pages_fetched == 0


async def test_a_prompt_whose_prefill_worker_dies_is_computed_elsewhere(
    nats_server: NatsServer,
) -> None:
    prompt = Prompt.of(Tokens(ids(5, 150)))
    async with roles(nats_server, settings(tiny("llama"))) as apart:
        truth = shown(await apart.alone(make_request("r", prompt, COUNT)))
        prefill, _ = apart.both.workers.values()
        (stream,) = await apart.both.router.send("m", [make_request("r", prompt, COUNT)])
        await prefill.kill()
        assert shown(await read(stream)) == truth


@pytest.mark.parametrize("model", ["windows", "latent", "states", "images", "adapter"])
async def test_so_are_those_of_other_models(
    nats_server: NatsServer, model: str, tmp_path: Path
) -> None:
    prompt, options = Prompt.of(Tokens(ids(1, 150))), {}
    match model:
        case "windows":
            config = settings(make("qwen3", tmp_path, **WINDOWED))
        case "latent":
            config = settings(tiny("deepseek_v3"))
        case "states":
            config = settings(tiny("qwen3_5_moe_text"))
        case "images":
            config = encode_reference.settings("llava", task="generate", enable_kv_fetch=True)
            prompt = prompt_of("llava", [ids(3, 30), Picture(5, 40, 56), ids(4, 50)])
        case _:
            lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
            config, options = settings(tiny("llama"), **lora), {"adapter": "a"}
    async with roles(nats_server, config) as apart:
        if model == "adapter":
            path = adapters.make_lora(tmp_path / "a", tiny("llama"), seed=1)
            for worker in apart.both.workers.values():
                await worker.host.call(LoadAdapter("a", str(path)))
        request = make_request("r", prompt, COUNT, **options)
        truth = await apart.alone(request)
        assert shown(await apart.apart(request)) == shown(truth)
        assert apart.decode.stats().kv_pages_fetched


class Taken:
    """Requests that an engine takes, and how each ends."""

    def __init__(self, engine: TorchEngine) -> None:
        self.requests: list[Request] = []
        self.ended: dict[str, asyncio.Future[str | None]] = {}
        self._submit = engine.submit
        engine.submit = self._take  # type: ignore[method-assign]

    def _take(self, request: Request, emit: Emit) -> None:
        self.requests.append(request)
        ended = self.ended[request.id.partition("@")[0]] = asyncio.Future[str | None]()

        def heard(output: Output) -> None:
            emit(output)
            if output.finish_reason is not None:
                ended.set_result(output.finish_reason)

        self._submit(request, heard)


async def test_the_decode_worker_fetches_pages_while_they_are_computed(
    nats_server: NatsServer,
) -> None:
    prompt = Prompt.of(Tokens(ids(5, 150)))
    async with roles(nats_server, settings(tiny("llama"))) as apart:
        truth = shown(await apart.alone(make_request("r", prompt, COUNT)))
        taken = Taken(apart.decode)
        assert shown(await apart.apart(make_request("r", prompt, COUNT))) == truth
        ahead, rest = taken.requests
        assert (ahead.prefetch, rest.prefetch) == (True, False)
        assert (len(ahead.prior_output), len(rest.prior_output)) == (0, 1)
        # The prefetch is over when the answer is, or is stopped.
        assert {await ended for ended in taken.ended.values()} <= {"stop", "abort", "length"}
        # Nobody computes the prompt of a client that leaves: its pages are waited for no more.
        await apart.decode.reset_prefix_cache()
        apart.prefill.submit = lambda request, emit: emit(request.end("abort"))  # type: ignore[method-assign]
        (stream,) = await apart.both.router.send("m", [make_request("left", prompt, 4, salt="l")])
        while len(taken.requests) < 3:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
        stream.cancel()
        (name,) = [name for name in taken.ended if name.startswith("left")]
        assert await taken.ended[name] == "abort"
        await read(stream)
