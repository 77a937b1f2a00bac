"""The walk through a pipeline, with scripted stages: nothing is left, lost, doubled or unbounded."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from inlay.base.address import Address
from inlay.base.errors import (
    LOST,
    BodyTooLargeError,
    EngineError,
    OverloadedError,
    RateLimitedError,
)
from inlay.http.bodies.accounting import ByteBudget, Reservation
from inlay.messages.commands import Drain, ReadStats
from inlay.messages.edges import PayloadLease, Window
from inlay.messages.prompt import Buffer
from inlay.messages.request import Emit, Input, Output, Payload, Request
from inlay.router import resume
from inlay.router.settings import RouterSettings
from inlay_stages import walk as stages
from inlay_stages.feeds import Feed
from inlay_stages.kinds import STREAMS
from inlay_stages.stage_result import RunningStage, StageResult
from inlay_stages.walk import StageOutput, admitted, plan, walk
from inlay_stages.worker import payload_store
from inlay_stages.worker.input_fetcher import InputFetcher
from inlay_stages.worker.input_stream import InputStream
from inlay_stages.worker.payload_store import PayloadStore
from tests.router.scripted_stages import (
    FILED,
    ITEMS,
    SEQS,
    ScriptedStage,
    World,
    expected,
    expected_file,
    expected_sound,
    kept_by,
    stage_request,
)

T = TypeVar("T")

BOUND = 120
"""Seconds within which everything must have come to an end: nothing hangs."""
STAGES = ("reader", "denoiser", "decoder")
SPEAKING = ("thinker", "talker", "vocoder")
WINDOW = 3
TURNS = 200
"""Of the event loop, within which requests are aborted and workers lost."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(resume, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(resume, "WAIT_SECONDS", 0.02)
    # What is small is kept as what is large.
    monkeypatch.setattr(payload_store, "SMALL_BYTES", -1)
    monkeypatch.setattr(stages, "STREAMS", {type_: Window(WINDOW) for type_ in STREAMS})


def nothing(_: int) -> None:
    """Reserve nothing."""


async def ask(
    world: World,
    prompt: bytes,
    client: str | None = None,
    hold: Callable[[int], None] = nothing,
) -> list[tuple[str, bytes]]:
    """Ports and payloads of an answer; checks that it ends once."""
    number = iter(range(1 << 20))

    def make(name: str, inputs: tuple[Input, ...]) -> Request:
        request = stage_request(name, inputs)
        return replace(request, id=f"{prompt.decode()}-{name}-{next(number)}", client=client)

    card = world.router.card("painter")
    steps = plan(world.router, card, "image")
    given_: dict[str | None, StageResult] = {None: StageResult([prompt_payload(prompt)])}
    with admitted(world.router, steps, client):
        return await read(walk(world.router, steps, given_, make, hold))


async def ask_aloud(
    world: World, prompt: bytes, hold: Callable[[int], None] = nothing
) -> list[tuple[str, bytes]]:
    """The same of `SPEAKER`, whose first stage is not of the walk."""
    number = iter(range(1 << 20))

    def make(name: str, inputs: tuple[Input, ...]) -> Request:
        request = stage_request(name, inputs)
        return replace(request, id=f"{prompt.decode()}-{name}-{next(number)}")

    steps = plan(world.router, world.router.card("speaker"), "audio", text=True)
    with world.router.admit({"speaker": 1} | {step.model: 1 for step in steps}, None):
        first = make("speaker", (Input("prompt", prompt_payload(prompt)),))
        first = replace(first, hold=steps[0].edges[0].window)
        (stream,) = await world.router.send("speaker", [first], admitted=True)
        thinker = RunningStage(stream, StageResult(again=stream.restart, hold=hold), lambda _: None)
        try:
            return await read(walk(world.router, steps, {"speaker": thinker.making}, make, hold))
        finally:
            await thinker.release()


def prompt_payload(prompt: bytes) -> Payload:
    return Payload("prompt", "uint8", (len(prompt),), Buffer(prompt))


async def read(walking: AsyncGenerator[StageOutput, None]) -> list[tuple[str, bytes]]:
    """Ports and payloads of a walk; checks that it ends once."""
    found: list[tuple[str, bytes]] = []
    ends = 0
    async with aclosing(walking) as outputs:
        async for output in outputs:
            assert not ends
            ends += output.output.finish_reason is not None
            found += [(one.port, bytes(one.data.view)) for one in output.payloads]
    assert ends == 1
    return found


async def until(done: Callable[[], Any]) -> None:
    async with asyncio.timeout(BOUND):
        while not done():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)


async def settled(world: World) -> None:
    await until(lambda: not any(world.left.values()))


async def test_payloads_go_from_worker_to_worker_and_are_freed_when_used() -> None:
    async with World.around(*map(ScriptedStage, STAGES)) as world:
        decoder = world.engines[2]
        decoder.held.clear()
        asking = asyncio.create_task(ask(world, b"fox"))
        await until(lambda: decoder.running)
        reader, denoiser, _ = world.hosts
        # Those of the denoiser alone are kept: the decoder's worker may be lost yet.
        freed = await reader.call(ReadStats())
        assert (freed.leases, freed.held_payloads) == (0, 0)
        stats = await denoiser.call(ReadStats())
        assert (stats.leases, stats.held_payloads, stats.held_bytes) == (1, 1, 64)
        assert (await denoiser.call(Drain())).requests == 1
        decoder.held.set()
        assert await asking == expected(b"fox")
        assert world.fetched == 3
        await settled(world)


async def test_what_is_small_goes_with_the_end_of_its_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with World.around(*map(ScriptedStage, STAGES)) as world:
        for most, fetched in ((64, 2), (63, 3)):
            monkeypatch.setattr(payload_store, "SMALL_BYTES", most)
            before = world.fetched
            assert await ask(world, b"fox") == expected(b"fox")
            # The two tensors of a prompt come one after the other, the latents at once.
            assert world.fetched - before == fetched
        await settled(world)


async def test_inputs_that_are_lost_are_made_again_before_the_stage_goes_on() -> None:
    engines = [ScriptedStage(stage) for stage in (*STAGES, "denoiser", "decoder")]
    async with asyncio.timeout(BOUND), World.around(*engines) as world:
        decoders = [world.engines[2], world.engines[4]]
        for decoder in decoders:
            decoder.held.clear()
        asking = asyncio.create_task(ask(world, b"fox"))
        await until(lambda: any(decoder.running for decoder in decoders))
        (owner,) = [number for number in (1, 3) if len(kept_by(world.hosts[number]))]
        world.kill(owner)
        (begun,) = [decoder for decoder in decoders if decoder.running]
        # It goes on at the other, which finds no inputs any more.
        begun.abort(next(iter(begun.running)))
        for decoder in decoders:
            decoder.held.set()
        assert await asking == expected(b"fox")
        assert world.fetched == 6
        await settled(world)


async def test_an_abort_before_the_first_step_of_a_fetch_ends_the_request() -> None:
    outputs: list[Output] = []
    async with World.around(*map(ScriptedStage, STAGES)) as world:
        host = world.hosts[1]
        feed = Feed(PayloadLease(Address("sim", 0, b""), b"k" * 16), (("embeds", "embeds"),))
        request = replace(stage_request("painter/denoiser", ()), feeds=(feed,))
        host.submit(request, outputs.append)
        host.abort(request.id)
        assert [output.finish_reason for output in outputs] == ["abort"]
        await settled(world)
    assert len(outputs) == 1


class _Held:
    """Peers of which one worker keeps everything."""

    def __init__(self, held: PayloadStore) -> None:
        self.held = held

    async def payloads(self, _: Address, ask: Request) -> Sequence[Payload]:
        done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self.held.answer(ask, done.set_result)
        output = await done
        if output.error is not None:
            raise output.error.to_error()
        return output.payloads


async def test_two_streams_of_one_worker_come_side_by_side() -> None:
    kept = PayloadStore(lambda _: None, lambda _, __: None)
    address = Address("sim", 0, b"")
    leases: list[PayloadLease] = []

    def told(output: Output) -> None:
        leases.extend([output.lease] if output.lease is not None else [])

    emits = {}
    for port in ("embeds", "latents"):
        request = replace(stage_request("m", ()), id=port)
        emits[port] = kept.keep(request, Window(), told, address)
        emits[port](Output(port, 0, 0, payloads=(_sound(port, b"a"),)))
    feeds = tuple(
        Feed(lease, ((port, port),), Window(1)) for lease, port in zip(leases, emits, strict=True)
    )
    came: list[InputStream] = []

    def admit(_: Request, __: Emit, inflow: InputStream | None = None, /) -> None:
        assert inflow is not None
        came.append(inflow)

    inputs: Any = _Held(kept)
    InputFetcher(inputs, admit).fetch(replace(stage_request("m", ()), feeds=feeds), lambda _: None)
    await until(lambda: came)
    found: list[Input] = []

    def taken() -> bool:
        found.extend(came[0].take())
        return came[0].ended and len(found) == 4

    def both_wait() -> bool:
        found.extend(came[0].take())
        return len(found) == 2 and len(kept._asking) == 2

    await until(both_wait)
    for port, emit in emits.items():
        emit(Output(port, 0, 0, finish_reason="stop", payloads=(_sound(port, b"b"),)))
    await until(taken)
    assert sorted((one.port, bytes(one.value.data.view)) for one in found) == [
        (port, data) for port in ("embeds", "latents") for data in (b"a", b"b")
    ]


def _sound(port: str, data: bytes) -> Payload:
    return Payload(port, "uint8", (1,), Buffer(data))


async def test_a_deadline_frees_what_is_kept() -> None:
    said: list[Output] = []
    aborted: list[str] = []
    kept = PayloadStore(aborted.append, lambda _, __: None)
    request = replace(stage_request("m", ()), deadline=0.01)
    emit = kept.keep(request, Window(), said.append, Address("sim", 0, b""))
    payload = Payload("latents", "uint8", (3,), Buffer(b"abc"))
    emit(Output(request.id, 0, 0, finish_reason="stop", payloads=(payload,)))
    late = kept.keep(replace(request, id="late"), Window(), said.append, Address("sim", 0, b""))
    await until(lambda: len(said) == 3)
    late(Output("late", 0, 0, finish_reason="stop", payloads=(payload,)))
    assert (len(kept), kept.num_bytes, aborted) == (0, 0, ["late"])
    assert [one.held for one in said] == ["stop", None, None]
    assert all(one.error and one.error.kind == "DeadlineExceededError" for one in said[1:])


async def test_more_than_may_be_kept_is_an_error_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with World.around(*map(ScriptedStage, STAGES)) as world:
        monkeypatch.setattr(kept_by(world.hosts[0]), "_max_bytes", 100)
        with pytest.raises(OverloadedError, match="kept for other stages"):
            await ask(world, b"fox")
        await settled(world)


async def test_a_worker_takes_no_more_than_it_may_keep_until_the_next_stage_has_room() -> None:
    async with World.around(*map(ScriptedStage, STAGES)) as world:
        decoder = world.engines[2]
        decoder.held.clear()
        asking = [asyncio.create_task(ask(world, b"%d" % number)) for number in range(24)]
        most = 2 * SEQS
        kept = kept_by(world.hosts[1])
        await until(lambda: len(decoder.running) == most and kept.num_made == most)
        for _ in range(200):
            await asyncio.sleep(0)
            assert all(kept_by(host).num_made <= most for host in world.hosts)
            assert all(engine.most <= most for engine in world.engines)
        decoder.held.set()
        for number, one in enumerate(asking):
            assert await one == expected(b"%d" % number)
        await settled(world)


async def test_a_request_that_a_later_stage_has_no_room_for_is_refused_before_the_first() -> None:
    settings = RouterSettings(router_queue_size=2)
    async with World.around(*map(ScriptedStage, STAGES), settings=settings) as world:
        for engine in world.engines:
            engine.held.clear()
        room = 2 * SEQS + 2
        asking = [asyncio.create_task(ask(world, b"%d" % n, "a")) for n in range(room - 1)]
        await until(lambda: world.engines[0].running)
        with pytest.raises(
            RateLimitedError, match="1 more would come; allowed: 6, and 5 of one"
        ) as refused:
            await ask(world, b"more", "a")
        assert refused.value.retry_after is not None
        asking.append(asyncio.create_task(ask(world, b"%d" % (room - 1), "b")))
        await asyncio.sleep(0)
        with pytest.raises(RateLimitedError, match="the stage `painter/reader` has 6 requests"):
            await ask(world, b"more", "c")
        for engine in world.engines:
            engine.held.set()
        assert [await one for one in asking] == [expected(b"%d" % n) for n in range(room)]
        assert await ask(world, b"later", "c") == expected(b"later")
        await settled(world)


async def test_a_client_that_leaves_while_a_failed_answer_is_cleared_away_leaves_nothing() -> None:
    async with World.around(
        ScriptedStage("reader"), ScriptedStage("denoiser", [-1]), ScriptedStage("decoder")
    ) as world:
        for turns in range(60):
            asking = asyncio.create_task(ask(world, b"%d" % turns))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await settled(world)


async def gathered(
    world: World,
    asking: Sequence[asyncio.Task[T]],
    aborts: Sequence[int | None],
    deaths: Sequence[tuple[int, int]],
    each_turn: Callable[[], None],
) -> list[T | BaseException]:
    """What was asked, where turns of the event loop abort some and kill workers by number."""
    for turn in range(TURNS + 1):
        for one, at in zip(asking, aborts, strict=True):
            if at == turn:
                one.cancel()
        for number, at in deaths:
            if at == turn:
                world.kill(number)
        await asyncio.sleep(0)
        each_turn()
    return await asyncio.gather(*asking, return_exceptions=True)


scripts = st.lists(st.sampled_from([0, 1, 2, 5, 9]), min_size=1, max_size=5)
broken = st.lists(st.sampled_from([0, 1, 3, 9, 9, 9, -1]), min_size=1, max_size=9)


@settings(deadline=None)
@given(
    scripts=st.lists(st.one_of(scripts, scripts, broken), min_size=6, max_size=6),
    aborts=st.lists(st.one_of(st.none(), st.integers(0, TURNS)), min_size=1, max_size=10),
    deaths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, TURNS)), max_size=3),
    asking_for=st.sampled_from(["image", "audio", "file"]),
    small=st.sampled_from([-1, 64]),
)
def test_nothing_is_left_lost_or_doubled_under_aborts_and_deaths(
    scripts: list[list[int]],
    aborts: list[int | None],
    deaths: list[tuple[int, int]],
    asking_for: str,
    small: int,
) -> None:
    aloud, filed = asking_for != "image", asking_for == "file"
    names, asked, answered = (
        (SPEAKING, ask_aloud, expected_sound) if aloud else (STAGES, ask, expected)
    )
    answered = expected_file if filed else answered
    graph = FILED if filed else None

    async def run() -> None:
        engines = [ScriptedStage(names[at % 3], one, graph) for at, one in enumerate(scripts)]
        async with asyncio.timeout(BOUND), World.around(*engines) as world:
            asking = [
                asyncio.create_task(asked(world, b"%d" % number)) for number in range(len(aborts))
            ]

            def in_bounds() -> None:
                assert world.most_kept <= WINDOW + 1 or not aloud

            answers = await gathered(world, asking, aborts, deaths, in_bounds)
            for number, (answer, at) in enumerate(zip(answers, aborts, strict=True)):
                if isinstance(answer, asyncio.CancelledError):
                    assert at is not None
                elif isinstance(answer, BaseException):
                    assert isinstance(answer, (OverloadedError, EngineError)), answer
                    assert isinstance(answer, OverloadedError) <= bool(deaths)
                    assert deaths or any(-1 in script for script in scripts)
                else:
                    assert answer == answered(b"%d" % number)
            await settled(world)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(payload_store, "SMALL_BYTES", small)
        asyncio.run(run())


async def test_a_stage_begins_while_the_one_before_works_which_waits_for_credit() -> None:
    async with World.around(*map(ScriptedStage, SPEAKING)) as world:
        thinker, talker, vocoder = world.engines
        vocoder.held.clear()
        asking = asyncio.create_task(ask_aloud(world, b"fox"))
        await until(lambda: thinker.paused and talker.paused and vocoder.running)
        # What is on its way between two stages: with the first, and taken by the second.
        assert (kept_by(world.hosts[0]).num_paused, kept_by(world.hosts[1]).num_paused) == (1, 1)
        assert world.most_kept == WINDOW
        for _ in range(100):
            await asyncio.sleep(0)
        assert not asking.done()
        assert world.most_kept == WINDOW
        vocoder.held.set()
        assert await asking == expected_sound(b"fox")
        await settled(world)


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_stream_is_made_again_where_the_worker_of_a_stage_is_lost(lost: int) -> None:
    engines = [ScriptedStage(stage) for stage in (*SPEAKING, *SPEAKING)]
    async with asyncio.timeout(BOUND), World.around(*engines) as world:
        for vocoder in (engines[2], engines[5]):
            vocoder.held.clear()
        asking = asyncio.create_task(ask_aloud(world, b"fox"))
        await until(lambda: all(any(one.running for one in engines[at::3]) for at in range(3)))
        await until(lambda: any(one.paused for one in engines[0::3]))
        (at,) = [number for number in (lost, lost + 3) if engines[number].running]
        world.kill(at)
        for vocoder in (engines[2], engines[5]):
            vocoder.held.set()
        assert await asking == expected_sound(b"fox")
        await settled(world)


@pytest.mark.parametrize("early", [False, True])
async def test_what_waits_for_a_reader_that_has_failed_ends_with_its_error(early: bool) -> None:
    async with asyncio.timeout(BOUND), World.around(ScriptedStage("thinker")) as world:
        request = stage_request("speaker", (Input("prompt", prompt_payload(b"fox")),))
        (stream,) = await world.router.send("speaker", [replace(request, hold=Window(WINDOW))])
        making = StageResult()
        if early:
            making.give_up(EngineError("no reader"))
        making.made_by(stream)
        if not early:
            await until(lambda: world.engines[0].paused)
            making.give_up(EngineError("no reader"))

        async def follow() -> None:
            async for outputs in stream:
                for output in outputs:
                    making.on_output(output)

        with pytest.raises(EngineError, match="no reader"):
            await follow()
        await settled(world)


@pytest.mark.parametrize("lost_first", [True, False])
async def test_what_is_made_again_after_its_reader_has_ended_waits_for_nobody(
    lost_first: bool,
) -> None:
    engines = [ScriptedStage("thinker") for _ in range(3)]
    async with asyncio.timeout(BOUND), World.around(*engines) as world:

        def paused() -> int | None:
            return next((at for at, one in enumerate(engines) if one.paused), None)

        request = stage_request("speaker", (Input("prompt", prompt_payload(b"fox")),))
        (stream,) = await world.router.send("speaker", [replace(request, hold=Window(WINDOW))])
        making = StageResult()
        making.made_by(stream)

        async def follow() -> None:
            async for outputs in stream:
                for output in outputs:
                    making.on_output(output)

        following = asyncio.create_task(follow())
        await making.inputs(streamed=True)
        await until(lambda: paused() is not None)
        first = paused()
        assert first is not None
        if not lost_first:
            making.detach()
        world.kill(first)
        if lost_first:
            await until(lambda: paused() not in (None, first))
            making.detach()
        await following
        assert making.complete
        await settled(world)


async def test_what_is_under_way_when_its_reader_has_ended_goes_on_where_it_is() -> None:
    engines = [ScriptedStage("thinker") for _ in range(2)]
    async with asyncio.timeout(BOUND), World.around(*engines) as world:
        request = stage_request("speaker", (Input("prompt", prompt_payload(b"fox")),))
        (stream,) = await world.router.send("speaker", [replace(request, hold=Window(WINDOW))])
        making = StageResult()
        making.made_by(stream)
        ends: list[str | None] = []

        async def follow() -> None:
            async for outputs in stream:
                ends.extend(making.on_output(output).finish_reason for output in outputs)

        following = asyncio.create_task(follow())
        await until(lambda: any(one.paused for one in engines))
        making.detach()
        await following
        assert making.complete
        assert [end for end in ends if end] == ["stop"]
        # Nothing was made twice.
        assert sum(one._at for one in engines) == ITEMS
        await settled(world)


async def test_a_talker_that_is_lost_after_the_end_of_the_text_ends_the_answer() -> None:
    engines = [ScriptedStage(stage) for stage in (*SPEAKING, "talker")]
    async with asyncio.timeout(BOUND), World.around(*engines) as world:
        asking = asyncio.create_task(ask_aloud(world, b"fox"))
        await until(lambda: kept_by(world.hosts[0]).num_made)
        (at,) = [number for number in (1, 3) if engines[number].running]
        world.kill(at)
        with pytest.raises(OverloadedError, match="what a stage has made is lost") as lost:
            await asking
        # What counts the tries of a batch's line knows that a worker had it.
        assert lost.value.reason == LOST
        await settled(world)


@pytest.mark.parametrize(("asks", "stages_"), [(ask, STAGES), (ask_aloud, SPEAKING)])
async def test_what_gathers_here_of_workers_that_cannot_be_reached_is_reserved(
    asks: Callable[..., Any], stages_: Sequence[str]
) -> None:
    async with (
        asyncio.timeout(BOUND),
        World.around(*map(ScriptedStage, stages_), reachable=False) as world,
    ):
        budget = ByteBudget(1 << 20)
        with Reservation(budget) as reservation:
            whole = await asks(world, b"fox", hold=reservation.grow)
            assert whole == (expected(b"fox") if asks is ask else expected_sound(b"fox"))
            used = budget.used
        assert not world.fetched
        assert used
        with (
            Reservation(ByteBudget(used - 1)) as reservation,
            pytest.raises(BodyTooLargeError, match="one client may hold"),
        ):
            await asks(world, b"fox", hold=reservation.grow)
        await settled(world)


@pytest.mark.parametrize("continues", [False, True])
async def test_a_further_attempt_goes_on_or_gives_everything_anew(continues: bool) -> None:
    reserved: list[int] = []
    making = StageResult(continues=continues, hold=reserved.append)
    for attempt, name in enumerate((b"one", b"two")):
        making.take(Output("r", attempt, 0, payloads=(prompt_payload(name),)))
    making.take(Output("r", 1, 0, finish_reason="stop"))
    found = await making.inputs(streamed=True)
    assert not isinstance(found, PayloadLease)
    assert [bytes(one.data.view) for one in found] == ([b"one", b"two"] if continues else [b"two"])
    assert sum(reserved) == (6 if continues else 3)


async def test_a_text_that_is_read_is_read_again_where_a_talker_is_lost_after_its_end() -> None:
    number = iter(range(1 << 20))

    def make(name: str, inputs: tuple[Input, ...]) -> Request:
        given_ = inputs if name != "speaker" else (Input("prompt", prompt_payload(b"fox")),)
        return replace(stage_request(name, given_), id=f"{name}-{next(number)}")

    engines = [ScriptedStage(stage) for stage in (*SPEAKING, "talker")]
    async with asyncio.timeout(BOUND), World.around(*engines) as world:
        steps = plan(world.router, world.router.card("speaker"), "audio", reader="thinker")
        assert [step.stage for step in steps] == [*SPEAKING]
        with admitted(world.router, steps, None):
            asking = asyncio.create_task(read(walk(world.router, steps, {}, make, nothing)))
            await until(lambda: kept_by(world.hosts[0]).num_made)
            (at,) = [number for number in (1, 3) if engines[number].running]
            world.kill(at)
            assert await asking == expected_sound(b"fox")
        await settled(world)


async def test_a_request_whose_end_crosses_its_abort_leaves_nothing() -> None:
    kept = PayloadStore(abort=lambda _: None, pause=lambda *_: None)
    outputs: list[Output] = []
    request = stage_request("thinker", ())
    take = kept.keep(request, Window(), outputs.append, Address("sim", 0, b""))
    take(Output("r", 0, 0, payloads=(prompt_payload(b"one"),)))
    kept.release("r")
    take(Output("r", 0, 0, finish_reason="stop", payloads=(prompt_payload(b"two"),)))
    assert (len(kept), kept.num_bytes, kept.num_leases, kept.num_made) == (0, 0, 0, 0)
    assert [one.finish_reason for one in outputs] == [None, "abort"]


async def test_a_fault_in_reading_a_stage_ends_what_waits_for_it() -> None:
    async def broken() -> AsyncIterator[Sequence[Output]]:
        for fault in (ValueError("as the test says"),):
            raise fault
        yield ()

    making = StageResult()
    running = RunningStage(cast("Any", broken()), making, lambda _: None)
    await running.ended()
    with pytest.raises(ValueError, match="as the test says"):
        await making.inputs(streamed=False)


async def test_the_name_of_a_pipeline_whose_front_is_not_there_says_so() -> None:
    async with World.around(ScriptedStage("reader")) as world:
        with pytest.raises(OverloadedError, match="stage decoder of the pipeline `painter` is not"):
            world.router.card("painter")
