"""Pairs of vLLMs: one computes a prompt, the other makes the tokens.

Harm that a pair takes from `kv_transfer_params` is shown on vLLM alone, and does not happen through
inlay.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from inlay import engine as engines
from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.vllm.connectors import CONNECTORS
from inlay.messages.card import Phase
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Grammar, Output, Request
from inlay.router import Router, decide
from inlay.router.resume import ResumingStream
from inlay.router.settings import RouterSettings
from inlay.transport.api import Stream, Worker
from tests.engine import reference
from tests.engine.conformance import Receiver, ids, make_request, run
from tests.engines.starting import SECRET
from tests.engines.vllm import bare
from tests.engines.vllm.alone import Alone, alone
from tests.engines.vllm.serving import FLAGS, frozen
from tests.router.sending import First
from tests.transport.direct import DirectPlane

pytestmark = pytest.mark.asyncio(loop_scope="session")

COUNT = 12
EAGER = RouterSettings(router_interference_weight=1000)
INHERITED = dict(os.environ)


def in_worker(directory: Path, role: Phase, **changes: Any) -> Any:
    """A vLLM that starts in the environment of a worker of its own."""
    config = EngineSettings.of(
        model=str(directory), served_model_name=["m"], role=role, **{**FLAGS, **changes}
    )
    engine: Any = engines.create(config, SECRET)
    start = engine.start

    async def started() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_HUB_OFFLINE", "1")
            for name, value in engines.environment(config, INHERITED).items():
                patch.setenv(name, value)
            await start()

    engine.start = started
    return engine


async def holds_nothing(engine: Any) -> bool:
    """Whether no block is in use. Empties the prefix cache."""
    return bool(await engine._running.llm.reset_prefix_cache())


async def free(engine: Any) -> None:
    """Return once no block is in use."""
    async with asyncio.timeout(20):
        while not await holds_nothing(engine):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.1)


async def ticket_of(engine: Any, name: str, prompt: Prompt, **options: Any) -> bytes:
    """What a prefill worker gives for a prompt."""
    asked = make_request(name, prompt, 1, gives_ticket=True, **options)
    (found,) = await run(engine, asked)
    (payload,) = found.last.payloads
    return bytes(payload.data.view)


class Pair:
    """A prefill worker, a decode worker that is busy, and a frontend."""

    def __init__(self, prefill: Any, decode: Any, plane: DirectPlane) -> None:
        self.prefill, self.decode, self.plane = prefill, decode, plane
        self.router = Router(plane, EAGER, secret=SECRET, random=First())
        self.busy: ResumingStream | None = None

    def worker(self, phase: Phase) -> Worker:
        (found,) = [one for one in self.plane.workers() if one.card.phase == phase]
        return found

    @property
    def fetched(self) -> int:
        """Prompts whose blocks the decode worker has fetched."""
        return int(self.decode._running.counters.transfers)

    async def occupy(self) -> None:
        """Keep the decode worker busy: a client that does not read."""
        begun = make_request("busy", Prompt.of(Tokens(ids(9, 1))), 4)
        (self.busy,) = await self.router.send("m", [begun])
        assert self.busy.worker == self.worker("decode").id

    async def alone(self, request: Request) -> list[Output]:
        """What one worker answers; its pages are another tenant's."""
        return await read(self.worker("decode").send(replace(request, salt="alone")))

    async def apart(self, request: Request) -> list[Output]:
        """What the two answer."""
        (stream,) = await self.router.send("m", [request])
        assert stream.worker == self.worker("prefill").id
        answer = await read(stream)
        assert stream.worker == self.worker("decode").id
        return answer

    async def ticket(self, name: str, prompt: Prompt, **options: Any) -> bytes:
        """What the prefill worker gives for a prompt."""
        return await ticket_of(self.prefill, name, prompt, **options)

    async def nothing_is_held(self) -> None:
        """Return once neither vLLM has a block in use: long before any lease ends."""
        for one in (self.prefill, self.decode):
            await free(one)


async def read(stream: "Stream | ResumingStream") -> list[Output]:
    async with asyncio.timeout(240):
        return [output async for outputs in stream for output in outputs]


def shown(answer: Sequence[Output]) -> tuple[Any, ...]:
    """All that a client can see."""
    last = answer[-1]
    assert last.usage is not None, last
    tokens = [id_ for output in answer for id_ in output.token_ids]
    scores = [
        (pytest.approx(scored.logprob, abs=1e-4), [id_ for id_, _ in scored.top])
        for output in answer
        for scored in output.logprobs
    ]
    assert [output for output in answer[:-1] if output.finish_reason] == []
    return tokens, scores, last.finish_reason, last.usage.completion_tokens


@asynccontextmanager
async def started_pair(directory: Path) -> AsyncIterator[Pair]:
    prefill, decode = in_worker(directory, "prefill"), in_worker(directory, "decode")
    plane = await DirectPlane.around(prefill, decode)
    pair = Pair(prefill, decode, plane)
    try:
        await pair.occupy()
        yield pair
    finally:
        await plane.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(directory: Path) -> AsyncIterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide, "LEAST_HANDOVER", 32)
        async with started_pair(directory) as found:
            yield found


@pytest.fixture(scope="module")
def unguarded(directory: Path) -> Alone:
    """Three vLLMs alone, two of them dead in the end."""
    return alone(directory, module="bare_pair")


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "seed": 3, "presence_penalty": 1.3, "min_tokens": 9},
    "logprobs": {"logprobs": 3},
    "grammar": {"grammar": Grammar("regex", "[a-z]{3,40}"), "temperature": 1.0, "seed": 2},
}


def prompts(directory: Path) -> dict[str, Prompt]:
    """Of 150 positions, of 128, which fill their blocks, and rows with and without tokens."""
    tokens = ids(1, 150)
    rows = reference.rows_of(reference.look_up(directory, tokens[30:90]))
    noise = reference.rows_of(bare.rows(96, 70))
    return {
        "ids": Prompt.of(Tokens(tokens)),
        "full blocks": Prompt.of(Tokens(ids(2, 128))),
        "mixed": Prompt.of(Tokens(tokens[:30]), rows, Tokens(tokens[90:])),
        "rows": Prompt.of(noise),
    }


async def test_layouts_differ_where_blocks_do_not_fit(directory: Path) -> None:
    from inlay.engine.vllm.arguments import engine_args
    from inlay.engine.vllm.connectors import block_layout, check_hand_over

    def config(**changes: Any) -> Any:
        settings = EngineSettings.of(model=str(directory), role="decode", **{**FLAGS, **changes})
        return engine_args(settings, directory).create_engine_config()

    plain = config()
    check_hand_over(plain)
    assert plain.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert plain.scheduler_config.disable_hybrid_kv_cache_manager
    layouts = {
        block_layout(plain, "1"),
        block_layout(plain, "2"),
        block_layout(config(block_size=64), "1"),
        block_layout(config(dtype="bfloat16"), "1"),
    }
    assert len(layouts) == 4
    assert block_layout(config(max_num_seqs=3), "1") in layouts
    plain.speculative_config = type("Drafts", (), {"method": "mtp"})
    with pytest.raises(InvalidRequestError, match="drafts of the method 'mtp'"):
        check_hand_over(plain)


async def test_answers_of_a_pair_are_those_of_one_worker(pair: Pair, directory: Path) -> None:
    handed = 0
    for kind, options in KINDS.items():
        for name, prompt in prompts(directory).items():
            request = make_request(f"{kind}-{name}", prompt, COUNT, **options)
            # The pair is to compute each prompt, not to find it.
            request = replace(request, salt=kind)
            truth = shown(await pair.alone(request))
            fetched = pair.fetched
            assert shown(await pair.apart(request)) == truth, (kind, name)
            handed += 1
            assert pair.router.stats.handovers == {"m": handed}
            assert pair.fetched == fetched + 1
            if kind == "greedy":
                assert truth[0] == reference.greedy(directory, prompt, COUNT)
    await pair.nothing_is_held()


async def test_what_is_no_ticket_for_this_prompt_changes_nothing(
    pair: Pair, directory: Path, unguarded: Alone
) -> None:
    """Bare vLLM takes the blocks of another prompt, and keeps them for everybody."""
    told = unguarded.told
    assert told["with the blocks of another prompt"] != told["alone"]
    assert told["of everybody after that"] == told["with the blocks of another prompt"]
    prompt, other = Prompt.of(Tokens(ids(31, 96))), Prompt.of(Tokens(ids(32, 96)))
    expected = reference.greedy(directory, prompt, COUNT)
    of_another = await pair.ticket("a", other)
    of_a_tenant = await pair.ticket("b", prompt, salt="tenant")
    fetched = pair.fetched
    for name, ticket in (("another prompt's", of_another), ("a tenant's", of_a_tenant)):
        for number in range(2):
            given = b"" if number else ticket
            asked = make_request(name, prompt, COUNT, ticket=given, salt=name)
            (found,) = await run(pair.decode, asked)
            assert found.output == expected, name
    assert pair.fetched == fetched
    await pair.nothing_is_held()


async def test_a_ticket_that_was_changed_is_refused_and_ends_nothing(
    pair: Pair, directory: Path, unguarded: Alone
) -> None:
    """Bare vLLM ends where a word lacks, and never asks a peer again after a wrong number."""
    assert unguarded.died
    assert "answer" not in unguarded.told
    assert 0 < unguarded.told["failed wrong"] < unguarded.told["failed right"]
    prompt = Prompt.of(Tokens(ids(33, 96)))
    ticket = await pair.ticket("a", prompt)
    flipped = [bytes([*ticket[:at], ticket[at] ^ 1, *ticket[at + 1 :]]) for at in (0, 40, -1 % 90)]
    for wrong in (*flipped, ticket[:-1], ticket + b"x", b"x", msgspec.msgpack.encode([1, 2])):
        with pytest.raises(InvalidRequestError, match="not made in this fleet"):
            pair.decode.submit(make_request("r", prompt, COUNT, ticket=wrong), Receiver)
    (found,) = await run(pair.decode, make_request("r", prompt, COUNT, ticket=ticket))
    assert found.output == reference.greedy(directory, prompt, COUNT)
    assert found.cached == len(prompt)
    await pair.nothing_is_held()


async def test_a_ticket_with_a_block_too_few_is_not_used(
    pair: Pair, directory: Path, unguarded: Alone
) -> None:
    """Bare vLLM ends, with blocks of its own size too."""
    assert unguarded.told["of too few blocks"] == "EngineDeadError"
    prompt = Prompt.of(Tokens(ids(40, 96)))
    prefill, decode = pair.prefill._handovers._office, pair.decode._handovers._office
    ticket = prefill.opened(await pair.ticket("a", prompt))
    body = msgspec.msgpack.encode(replace(ticket, block_ids=ticket.block_ids[:-1]))
    sealed = decode._mac(body) + body
    fetched = pair.fetched
    (found,) = await run(pair.decode, make_request("r", prompt, COUNT, ticket=sealed))
    assert found.output == reference.greedy(directory, prompt, COUNT)
    assert pair.fetched == fetched
    await pair.nothing_is_held()


@pytest.mark.slow
async def test_blocks_that_were_read_after_their_lease_are_not_used(
    pair: Pair, directory: Path, unguarded: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bare vLLM takes what has been written there since, and keeps it for everybody."""
    told = unguarded.told
    for each in ("read after its lease", "of everybody after that lease"):
        assert told[each] != told["in time"]
    seconds = 2
    with monkeypatch.context() as patch:
        config = {"kv_lease_duration": seconds}
        patch.setitem(CONNECTORS["nixl"], "kv_connector_extra_config", config)
        # 31 blocks.
        small = in_worker(directory, "prefill", kv_cache_memory_bytes=512 << 10)
        await small.start()
    try:
        for number, still in enumerate((pair.decode, small)):
            prompt = Prompt.of(Tokens(ids(41 + number, 96)))
            ticket = await ticket_of(small, f"a{number}", prompt)
            asked = Receiver(make_request(f"r{number}", prompt, COUNT, ticket=ticket))
            fetched = pair.fetched
            with frozen(still._running.llm):
                pair.decode.submit(asked.request, asked)
                await asyncio.sleep(seconds + 0.5)
                if still is not small:
                    await free(small)
                    others = [Prompt.of(Tokens(ids(50 + each, 320))) for each in range(4)]
                    await run(small, *(make_request(f"o{n}", o, 1) for n, o in enumerate(others)))
            await asked.ended()
            expected = reference.greedy(directory, prompt, COUNT)
            assert (asked.output, asked.cached, pair.fetched) == (expected, 0, fetched + 1)
            (after,) = await run(pair.decode, make_request("r", prompt, COUNT))
            assert after.output == expected
    finally:
        await small.close()


async def test_a_worker_with_other_blocks_is_given_none(
    pair: Pair, directory: Path, unguarded: Alone
) -> None:
    """Bare vLLM takes blocks of another size, and gives wrong tokens."""
    assert unguarded.told["of two sizes"] != unguarded.told["of one size"]
    prompt = Prompt.of(Tokens(ids(38, 96)))
    ticket = await pair.ticket("a", prompt)
    wide = in_worker(directory, "decode", block_size=64)
    await wide.start()
    try:
        assert wide.card.kv_layout != pair.prefill.card.kv_layout
        (found,) = await run(wide, make_request("r", prompt, COUNT, ticket=ticket))
        assert found.output == reference.greedy(directory, prompt, COUNT)
        assert not wide._running.counters.transfers
        await pair.nothing_is_held()
    finally:
        await wide.close()


async def test_what_the_decode_worker_does_not_come_for_is_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt.of(Tokens(ids(34, 96)))
    # It is refused there.
    ticket = await pair.ticket("a", prompt)
    assert not await holds_nothing(pair.prefill)
    bad = make_request("bad", prompt, COUNT, ticket=ticket, logprob_token_ids=(1,), logprobs=0)
    with pytest.raises(InvalidRequestError):
        pair.decode.submit(bad, Receiver)
    await pair.nothing_is_held()
    # Its client leaves.
    ticket = await pair.ticket("b", prompt)
    left = Receiver(make_request("left", prompt, COUNT, ticket=ticket))
    pair.decode.submit(left.request, left)
    pair.decode.abort("left")
    await pair.nothing_is_held()
    # It is so old that the blocks may be another prompt's, when it comes or once it has waited.
    for waited in ((16.0,), (0.0, 16.0)):
        ticket, fetched, ages = await pair.ticket("c", prompt), pair.fetched, iter(waited)
        with monkeypatch.context() as patch:
            office = pair.decode._handovers._office
            patch.setattr(office, "_clock", lambda ages=ages: time.time() + next(ages))
            (late,) = await run(pair.decode, make_request("late", prompt, COUNT, ticket=ticket))
        assert next(ages, None) is None
        assert pair.fetched == fetched
    assert late.last.finish_reason == "length"
    await pair.nothing_is_held()
    # Nobody else is there: the prefill worker has its own ticket back.
    ticket = await pair.ticket("d", prompt)
    (own,) = await run(pair.prefill, make_request("own", prompt, COUNT, ticket=ticket))
    assert own.output == late.output
    await pair.nothing_is_held()
    # Its client leaves while the prompt is computed, or just then.
    gone = Receiver(make_request("gone", prompt, 1, gives_ticket=True))
    pair.prefill.submit(gone.request, gone)
    pair.prefill.abort("gone")
    await pair.nothing_is_held()


async def test_a_request_goes_on_without_either_worker(pair: Pair, directory: Path) -> None:
    """The last test of the pair: in the end there is none."""
    prompt, other = Prompt.of(Tokens(ids(35, 96))), Prompt.of(Tokens(ids(36, 96)))
    # The decode worker is lost in the middle of its answer.
    prefill, decode = pair.worker("prefill").id, pair.worker("decode").id
    ends = dict(zip((one.id for one in pair.plane.workers()), pair.plane.worker_ends, strict=True))
    (stream,) = await pair.router.send("m", [make_request("r", other, 200)])
    answer: list[int] = []
    async with asyncio.timeout(240):
        async for outputs in stream:
            answer += [id_ for output in outputs for id_ in output.token_ids]
            if stream.worker == decode and len(answer) < 100:
                ends[decode].close()
    assert stream.worker == prefill
    assert answer == reference.greedy(directory, other, 200)
    # The prefill worker's vLLM is gone before its blocks are fetched: found out after seconds.
    ticket = await pair.ticket("t", prompt)
    await pair.prefill.close()
    (found,) = await run(pair.decode, make_request("r", prompt, 60, ticket=ticket))
    assert found.output == reference.greedy(directory, prompt, 60)
