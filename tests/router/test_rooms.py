"""Pairs whose workers have a request at the same time, and meet in a room."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from inlay.base.errors import (
    DeadlineExceededError,
    EngineError,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.engine.api import GenerateEngine
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.messages.card import Address, ModelCard
from inlay.messages.digest import Secret, with_digests
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Request, Sampling
from inlay.messages.routing import WorkerLoad
from inlay.router import Router, resume
from inlay.router.decide import Placement, Refuse
from inlay.router.resume import ResumingStream
from inlay.router.sending import Attempt
from inlay.router.settings import RouterSettings
from inlay.transport.api import Stream
from tests.models import tiny
from tests.router.rooms import Half
from tests.router.sending import First
from tests.router.test_pool import Made, blocks, card
from tests.router.test_resume import Scripted, read
from tests.transport.direct import DirectPlane

SECRET = Secret(bytes(32))
IDS = [1, 2, 3, 4, 5]
ANSWER = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
LONG = 50_000


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    config = {"vocab_size": 999, "hidden_size": 8, "max_position_embeddings": 100000}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    return EngineSettings.of(model=str(tmp_path), engine="echo", served_model_name=["m"])


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "WAIT_SECONDS", 0.5)


class Fleet:
    """Workers, and a frontend."""

    def __init__(self, plane: DirectPlane, engines: Sequence[GenerateEngine]) -> None:
        self.plane, self.engines = plane, engines
        self.router = Router(plane, secret=SECRET, random=First())
        self._ends = dict(zip(self.ids, plane.worker_ends, strict=True))

    @property
    def ids(self) -> list[str]:
        return [one.id for one in self.plane.workers()]

    async def send(self, *requests: Request) -> list[ResumingStream]:
        return await self.router.send("m", requests or [request()])

    def kill(self, number: int) -> None:
        """Cut the connection of a worker."""
        list(self._ends.values())[number].close()

    async def is_idle(self) -> None:
        """Return once no worker has anything to do, and no load is booked."""
        async with asyncio.timeout(10):
            while any(load != WorkerLoad() for load in self.router.loads().values()) or not all(  # noqa: ASYNC110
                one.idle if isinstance(one, Half) else not one.stats().running
                for one in self.engines
            ):
                await asyncio.sleep(0.01)
        for pool in self.router._fleet._pools.values():
            assert not pool._requests_of


Around = Callable[..., Any]


@pytest.fixture
async def around() -> AsyncIterator[Around]:
    planes: list[DirectPlane] = []

    async def make(*engines: GenerateEngine) -> Fleet:
        planes.append(await DirectPlane.around(*engines))
        return Fleet(planes[-1], engines)

    yield make
    for plane in planes:
        await plane.close()


def request(name: str = "r", max_tokens: int = 12, **fields: Any) -> Request:
    sampling = Sampling(max_tokens=max_tokens, **fields.pop("sampling", {}))
    return Request(id=name, prompts=(Prompt.of(Tokens(IDS)),), params=sampling, **fields)


def halves(settings: EngineSettings, *phases: str) -> list[Half]:
    return [Half(EchoEngine(settings, SECRET), phase) for phase in phases]


# Both have it at once.


async def test_both_have_the_request_at_the_same_time_in_a_room_of_its_own(
    settings: EngineSettings, around: Around
) -> None:
    prefill, decode = halves(settings, "prefill", "decode")
    fleet = await around(prefill, decode)
    prefill.held.clear()
    streams = await fleet.send(*(request(name, deadline=60.0) for name in "abc"))
    async with asyncio.timeout(10):
        while len(decode.seen) < 3 or len(prefill.seen) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # A place at each, and the prompt at one of them, once.
    loads = fleet.router.loads()
    assert [loads[id_].requests for id_ in fleet.ids] == [3, 3]
    assert [loads[id_].prefill for id_ in fleet.ids] == [15, 0]
    prefill.held.set()
    for stream in streams:
        answer = await read(stream)
        assert answer.ids == ANSWER
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12
        assert stream.worker == fleet.ids[1]
    rooms = [one.kv_room for one in decode.seen]
    assert rooms == [one.kv_room for one in prefill.seen]
    assert {(one.host, one.port) for one in rooms if one} == {prefill.card.bootstrap}
    numbers = {one.number for one in rooms if one}
    assert len(numbers) == 3
    assert all(0 < number < 2**63 for number in numbers)
    for first, second in zip(prefill.seen, decode.seen, strict=True):
        one_token = replace(second.sampling, max_tokens=1)
        assert first == replace(second, id=f"{second.id}/prompt-0", params=one_token)
    assert fleet.router.stats.handovers == {"m": 3}
    await fleet.is_idle()


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 11},
    "penalties": {"seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.4, "min_tokens": 9},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
}


async def test_answers_of_a_pair_are_those_of_one_worker(around: Around) -> None:
    settings = EngineSettings.of(
        model=str(tiny("llama")), served_model_name=["m"], dtype="float32", num_threads=1
    )
    alone, *pair = (TorchEngine(settings, SECRET) for _ in range(3))
    one = await around(alone)
    two = await around(*map(Half, pair, ("prefill", "decode")))
    tokens = Tokens([(7 * n) % 200 + 3 for n in range(21)])
    rows = np.random.default_rng(4).standard_normal((9, 48)).astype(np.float32) * 0.3
    mixed = Prompt.of(tokens, Rows(Buffer(rows.tobytes()), "float32", (9, 48)), Tokens([9, 10]))
    for prompt in (Prompt.of(tokens), with_digests(mixed, SECRET)):
        for name, options in SAMPLINGS.items():
            sampling = Sampling(max_tokens=16, ignore_eos=True, **options)
            asked = Request(id=name, prompts=(prompt,), params=sampling)
            whole, paired = [await read((await fleet.send(asked))[0]) for fleet in (one, two)]
            assert paired.visible == whole.visible, name
            assert len(paired.ids) == 16
            assert len(paired.logprobs) == len(whole.logprobs)
            for ours, theirs in zip(paired.logprobs, whole.logprobs, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert [id_ for id_, _ in ours.top] == [id_ for id_, _ in theirs.top]
    assert two.router.stats.handovers == {"m": 8}
    await two.is_idle()


# Faults.


async def begun(fleet: Fleet, prefill: Half, **fields: Any) -> ResumingStream:
    """A long request whose room has been made, and whose prompt is not computed."""
    prefill.held.clear()
    (stream,) = await fleet.send(request(max_tokens=2000, **fields))
    async with asyncio.timeout(10):
        while not prefill.seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return stream


def expected(count: int) -> list[int]:
    return [IDS[n % 5] for n in range(count)]


@pytest.mark.parametrize("spare", ["prefill", "whole"])
async def test_a_prefill_worker_that_dies_costs_an_attempt(
    settings: EngineSettings, around: Around, spare: str
) -> None:
    prefill, decode = halves(settings, "prefill", "decode")
    another = Scripted(settings) if spare == "whole" else halves(settings, "prefill")[0]
    fleet = await around(prefill, decode, another)
    stream = await begun(fleet, prefill)
    fleet.kill(0)
    answer = await read(stream)
    assert answer.ids == expected(2000)
    assert answer.attempts == {1}
    assert another.seen[-1].attempt == 1
    assert (another.seen[-1].kv_room is None) == (spare == "whole")
    prefill.held.set()
    await fleet.is_idle()


async def test_a_prefill_worker_that_dies_and_leaves_none_ends_the_request(
    settings: EngineSettings, around: Around
) -> None:
    prefill, decode = halves(settings, "prefill", "decode")
    fleet = await around(prefill, decode)
    stream = await begun(fleet, prefill)
    fleet.kill(0)
    with pytest.raises(OverloadedError):
        await read(stream)
    await fleet.is_idle()
    with pytest.raises(OverloadedError, match="No worker of the model `m` is ready"):
        await fleet.send()


async def test_a_decode_worker_that_dies_before_it_has_anything_costs_an_attempt(
    settings: EngineSettings, around: Around
) -> None:
    prefill, decode, other = halves(settings, "prefill", "decode", "decode")
    fleet = await around(prefill, decode, other)
    stream = await begun(fleet, prefill)
    assert decode.seen
    fleet.kill(1)
    reading = asyncio.create_task(read(stream))
    async with asyncio.timeout(10):
        while not other.seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # Nobody comes to the first room any more: the prompt in it was stopped.
    first, second = (one.kv_room for one in prefill.seen)
    assert first != second
    prefill.held.set()
    answer = await reading
    assert answer.ids == expected(2000)
    await fleet.is_idle()


async def test_a_decode_worker_that_dies_in_the_middle_of_an_answer_has_it_continued(
    settings: EngineSettings, around: Around
) -> None:
    prefill, decode, other = halves(settings, "prefill", "decode", "decode")
    fleet = await around(prefill, decode, other)
    (stream,) = await fleet.send(request(max_tokens=2000))
    killing = iter([1])

    def kill(seen: int) -> None:
        if seen > 5 and next(killing, 0):
            fleet.kill(1)

    answer = await read(stream, kill)
    assert answer.ids == expected(2000)
    assert answer.attempts == {0, 1}
    prior = other.seen[0].prior_output
    assert len(prior) > 5
    # The prompt of the second attempt has the output so far, and one token more is drawn there.
    assert prefill.seen[1].prior_output == prior
    assert prefill.seen[1].sampling.max_tokens == len(prior) + 1
    await fleet.is_idle()


async def test_a_prefill_worker_that_dies_after_its_part_is_not_missed(
    settings: EngineSettings, around: Around
) -> None:
    prefill, decode = halves(settings, "prefill", "decode")
    fleet = await around(prefill, decode)
    (stream,) = await fleet.send(request(max_tokens=2000))
    killing = iter([0])

    def kill(seen: int) -> None:
        if (number := next(killing, None)) is not None:
            fleet.kill(number)

    answer = await read(stream, kill)
    assert (answer.ids, answer.attempts) == (expected(2000), {0})
    await fleet.is_idle()


async def test_a_decode_worker_that_gets_nothing_goes_on_with_another_prefill_worker(
    settings: EngineSettings, around: Around
) -> None:
    deaf, prefill, decode = halves(settings, "prefill", "prefill", "decode")
    fleet = await around(deaf, prefill, decode)
    await deaf.stop_listening()
    (stream,) = await fleet.send()
    answer = await read(stream)
    assert (answer.ids, answer.attempts) == (ANSWER, {1})
    assert [len(one.seen) for one in (deaf, prefill, decode)] == [1, 1, 2]
    await fleet.is_idle()


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (InvalidRequestError("no"), False),
        (EngineError("no"), False),
        (OverloadedError("no", retry_after=1), True),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_the_error_of_either_half_is_that_of_one_worker(
    settings: EngineSettings, around: Around, phase: str, error: InlayError, retried: bool
) -> None:
    bad, good, other = halves(settings, phase, phase, "decode" if phase == "prefill" else "prefill")
    fleet = await around(bad, good, other)
    bad.refuse = lambda request: error
    (stream,) = await fleet.send()
    if retried:
        assert (await read(stream)).ids == ANSWER
    else:
        with pytest.raises(type(error), match="no"):
            await read(stream)
        assert not good.seen
    await fleet.is_idle()


async def test_an_answer_of_a_prefill_worker_that_cannot_be_read_ends_the_request(
    settings: EngineSettings, around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = asyncio.Event()

    class Unreadable:
        def __init__(self, inner: Stream) -> None:
            self.cancel = inner.cancel

        def __aiter__(self) -> "Unreadable":
            return self

        async def __anext__(self) -> Any:
            await cut.wait()
            raise ValueError("no output")

    add = Attempt.add_prompt

    def added(self: Attempt, prompt: Attempt) -> None:
        prompt.stream = Unreadable(prompt.stream)
        add(self, prompt)

    monkeypatch.setattr(Attempt, "add_prompt", added)
    prefill, decode = halves(settings, "prefill", "decode")
    fleet = await around(prefill, decode)
    # The decode worker waits.
    stream = await begun(fleet, prefill)
    async with asyncio.timeout(10):
        while not decode.seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.05, cut.set)
        with pytest.raises(EngineError, match="could not be read"):
            await read(stream)
    await fleet.is_idle()


@pytest.mark.parametrize("started", [False, True])
async def test_a_decode_worker_that_dies_while_a_request_waits_has_no_prompt_sent_for_nothing(
    settings: EngineSettings, around: Around, started: bool
) -> None:
    settings = settings.replace(max_num_seqs=2)
    prefill, lost, left = halves(settings, "prefill", "decode", "decode")
    fleet = await around(prefill, lost, left)
    fleet.router = Router(
        fleet.plane, RouterSettings(router_worker_backlog=0), secret=SECRET, random=First()
    )
    if started:
        await fleet.router.start()
    prefill.held.clear()
    running = [await fleet.send(request(name, max_tokens=400)) for name in ("r0", "r1")]
    waiting = [asyncio.create_task(fleet.send(request(name))) for name in ("r2", "r3")]
    async with asyncio.timeout(10):
        while fleet.router.num_waiting < 2 or len(lost.seen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    fleet.kill(1)
    reading = [asyncio.create_task(read(stream)) for (stream,) in running]
    async with asyncio.timeout(10):
        while len(prefill.seen) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    prefill.held.set()
    assert [(await task).ids for task in reading] == [expected(400)] * 2
    assert [(await read((await task)[0])).ids for task in waiting] == [ANSWER] * 2
    # Each once, and once more what the lost worker had.
    sent = Counter(one.id.partition("/")[0] for one in prefill.seen)
    assert sent == {"r0": 2, "r1": 2, "r2": 1, "r3": 1}
    assert {one.id for one in left.seen} == {"r0", "r1", "r2", "r3"}
    await fleet.is_idle()
    await fleet.router.close()


@pytest.mark.parametrize("at", [0, 1, 7])
async def test_both_stop_when_a_client_leaves(
    settings: EngineSettings, around: Around, at: int
) -> None:
    prefill, decode = halves(settings, "prefill", "decode")
    fleet = await around(prefill, decode)
    if not at:
        stream = await begun(fleet, prefill)
        stream.cancel()
        assert (await read(stream)).finish == "abort"
    else:
        (stream,) = await fleet.send(request(max_tokens=LONG))
        answer = await read(stream, lambda seen: stream.cancel() if seen >= at else None)
        assert answer.finish == "abort"
    # Its prompt is still not to be computed.
    await fleet.is_idle()
    prefill.held.set()
    assert (await read((await fleet.send(request("next")))[0])).ids == ANSWER


async def test_a_deadline_ends_both(settings: EngineSettings, around: Around) -> None:
    prefill, decode = halves(settings, "prefill", "decode")
    fleet = await around(prefill, decode)
    stream = await begun(fleet, prefill, deadline=0.3)
    with pytest.raises(DeadlineExceededError):
        await read(stream)
    await fleet.is_idle()


async def test_neighbours_of_requests_that_end_badly_have_their_answers(
    settings: EngineSettings, around: Around
) -> None:
    engines = halves(settings, "prefill", "prefill", "decode", "decode")
    fleet = await around(*engines)
    streams = await asyncio.gather(
        *(fleet.send(request(f"r{number}", 400 + number)) for number in range(24))
    )
    reading = [asyncio.create_task(read(stream)) for (stream,) in streams]
    for number in range(0, 24, 3):
        await asyncio.sleep(0.002)
        streams[number][0].cancel()
        if number == 9:
            fleet.kill(0)
        if number == 15:
            fleet.kill(2)
    for number, task in enumerate(reading):
        answer = await task
        if number % 3:
            assert answer.ids == expected(400 + number)
        else:
            assert answer.ids == expected(len(answer.ids))
    await fleet.is_idle()


# Who is chosen.


def half(phase: str, number: int, form: str = "f", **changes: object) -> ModelCard:
    bootstrap = ("h", 1000 + number) if phase == "prefill" else None
    address = Address("h", number + 1, b"f")
    return card(phase=phase, kv_rooms=form, bootstrap=bootstrap, address=address, **changes)


def pair(fleet: Made, length: int = 160, **how: Any) -> tuple[str, str | None] | None:
    decision = fleet.decide(length, blocks(1, 10), **how)
    if not isinstance(decision, Placement):
        return None
    return str(fleet.id_at(decision.part)), fleet.id_at(decision.prompt)


def test_a_half_takes_no_request_without_the_other() -> None:
    for cards in ([half("prefill", 0)], [half("decode", 0)]):
        fleet = Made(*cards)
        assert pair(fleet) is None
        assert fleet.decide() == Refuse("none")
    fleet = Made(half("prefill", 0, "a"), half("decode", 1, "b"))
    assert pair(fleet) is None
    assert fleet.decide() == Refuse("none")
    fleet = Made(half("prefill", 0, "a"), half("decode", 1, "b"), half("prefill", 2, "b"))
    assert pair(fleet) == ("w1", "w2")
    assert fleet.decide() != Refuse("none")
    assert pair(fleet, avoid=["w2"]) == ("w1", "w2")  # there is no other
    assert pair(fleet, only=["w0", "w1"], full_too=True) is None
    fleet = Made(half("prefill", 0, asleep=1), half("decode", 1))
    assert pair(fleet) is None


def test_the_prompt_goes_where_it_waits_least_or_is_cached() -> None:
    fleet = Made(half("prefill", 0), half("prefill", 1), half("decode", 2), half("decode", 3))
    assert pair(fleet) == ("w2", "w0")
    fleet.pool.change(fleet.member(0), requests=1, prefill=50)
    fleet.pool.change(fleet.member(2), requests=1, decode=5000)
    assert pair(fleet) == ("w3", "w1")
    # 160 positions that need not be computed are worth more than 50 that wait.
    fleet.pool.sent(fleet.member(0), blocks(1, 10))
    part, prompt, together = fleet.placed(160, blocks(1, 10))
    assert prompt is not None
    assert fleet.id_at(prompt) == "w0"
    assert (part.cached, part.work, prompt.work, together) == (160, 0, 0, True)


def test_a_request_waits_until_both_have_room() -> None:
    fleet = Made(half("prefill", 0), half("decode", 1), router_worker_backlog=0)
    fleet.pool.change(fleet.member(0), requests=4, client="a")
    assert pair(fleet, client="a") is None
    # Another client is within its share there, and the decode worker is free.
    assert pair(fleet, client="b") == ("w1", "w0")
    fleet.pool.change(fleet.member(0), requests=-1, client="a")
    assert pair(fleet, client="a") == ("w1", "w0")
    fleet.pool.change(fleet.member(1), requests=4, client="a")
    assert pair(fleet, client="a") is None


def test_pairs_and_workers_of_both_phases_share_the_load() -> None:
    fleet = Made(half("prefill", 0), half("decode", 1), card())
    fleet.pool.change(fleet.member(0), requests=1, prefill=5000)
    assert pair(fleet) == ("w2", None)
    fleet.pool.change(fleet.member(2), requests=1, prefill=9000)
    assert pair(fleet) == ("w1", "w0")
