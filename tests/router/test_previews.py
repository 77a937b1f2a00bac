"""Previews of a denoiser and a decoder apart: the newest is shown, nothing waits, nothing is left."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from inlay.base.address import Address
from inlay.base.errors import EngineError, InvalidRequestError, OverloadedError
from inlay.messages.commands import ReadStats
from inlay.messages.edges import Fetch, PayloadLease
from inlay.messages.prompt import Buffer
from inlay.messages.request import FinishReason, Input, Output, Payload, Request, Task
from inlay.router import resume
from inlay_stages.cards import StageCard
from inlay_stages.feeds import NEWEST
from inlay_stages.params import Diffusion
from inlay_stages.stage_result import StageResult
from inlay_stages.walk import admitted, plan, walk
from inlay_stages.worker.payload_store import PayloadStore
from tests.router.scripted_stages import (
    GRAPH,
    SHOWN,
    ScriptedStage,
    World,
    expected,
    expected_previews,
    kept_by,
    stage_request,
)
from tests.router.test_stages import (
    BOUND,
    STAGES,
    TURNS,
    broken,
    gathered,
    nothing,
    prompt_payload,
    read,
    scripts,
    settled,
    until,
)

ADDRESS = Address("sim", 0, b"")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(resume, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(resume, "WAIT_SECONDS", 0.02)


async def ask(
    world: World, prompt: bytes = b"fox", hold: Callable[[int], None] = nothing
) -> list[tuple[str, bytes]]:
    """Ports and payloads of an answer with previews; checks that it ends once."""
    number = iter(range(1 << 20))

    def make(name: str, inputs: tuple[Input, ...]) -> Request:
        params = Diffusion(width=8, height=8, steps=SHOWN + 1, preview_every=1)
        id_ = f"{prompt.decode()}-{name}-{next(number)}"
        return replace(stage_request(name, inputs), id=id_, params=params)

    steps = plan(world.router, world.router.card("painter"), "preview")
    given_: dict[str | None, StageResult] = {None: StageResult([prompt_payload(prompt)])}
    with admitted(world.router, steps, None):
        return await read(walk(world.router, steps, given_, make, hold))


def check(answer: list[tuple[str, bytes]], prompt: bytes = b"fox") -> list[str]:
    """Check an answer; return the ports of its previews."""
    *previews, image = answer
    assert image == expected(prompt)[-1]
    possible = expected_previews(prompt)
    assert all(possible[port] == data for port, data in previews)
    ports = [port for port, _ in previews]
    assert len(set(ports)) == len(ports)
    return ports


async def test_a_preview_is_shown_while_the_denoiser_works() -> None:
    engines = [ScriptedStage(stage) for stage in STAGES]
    # Between two steps there is time for the decoder.
    engines[1] = ScriptedStage("denoiser", [60])
    async with asyncio.timeout(BOUND), World.around(*engines) as world:
        ports = check(await ask(world))
        assert ports == [f"preview.{at}" for at in range(1, SHOWN + 1)]
        # Two tensors of the prompt, and all latents.
        assert world.fetched == 2 + SHOWN + 1
        await settled(world)


async def test_a_slow_decoder_does_not_keep_the_denoiser_and_gets_the_newest() -> None:
    async with asyncio.timeout(BOUND), World.around(*map(ScriptedStage, STAGES)) as world:
        reader, denoiser, _ = world.hosts
        decoder = world.engines[2]
        decoder.held.clear()
        asking = asyncio.create_task(ask(world))
        # What latents were made of is free once they are made.
        await until(
            lambda: decoder.running and kept_by(denoiser).num_made and not len(kept_by(reader))
        )
        stats = await denoiser.call(ReadStats())
        assert (stats.leases, stats.held_payloads, stats.held_bytes) == (1, 1, 64)
        assert not world.engines[1].running
        decoder.held.set()
        assert len(check(await asking)) <= 1
        await settled(world)


@pytest.mark.parametrize("moment", ["denoising", "denoised"])
async def test_a_decoder_that_is_lost_costs_previews_and_no_latents(moment: str) -> None:
    engines = [ScriptedStage(stage) for stage in (*STAGES, "decoder")]
    if moment == "denoising":
        engines[1] = ScriptedStage("denoiser", [60])
    async with asyncio.timeout(BOUND), World.around(*engines) as world:
        decoders = [world.engines[2], world.engines[3]]
        for decoder in decoders:
            decoder.held.clear()
        asking = asyncio.create_task(ask(world))
        await until(lambda: any(decoder.running for decoder in decoders))
        if moment == "denoised":
            await until(lambda: kept_by(world.hosts[1]).num_made)
        (lost,) = [at for at in (2, 3) if world.engines[at].running]
        world.kill(lost)
        for decoder in decoders:
            decoder.held.set()
        check(await asking)
        # Nothing was denoised twice.
        assert engines[1]._at == SHOWN + 1
        await settled(world)


async def test_a_denoiser_that_is_lost_is_begun_anew_and_nothing_is_shown_twice() -> None:
    engines = [ScriptedStage(stage) for stage in (*STAGES, "denoiser")]
    for at in (1, 3):
        engines[at] = ScriptedStage("denoiser", [60])
    async with asyncio.timeout(BOUND), World.around(*engines) as world:
        asking = asyncio.create_task(ask(world))
        await until(lambda: world.engines[2]._at >= 2)
        (lost,) = [at for at in (1, 3) if world.engines[at].running]
        world.kill(lost)
        assert len(check(await asking)) >= 2
        await settled(world)


@settings(deadline=None)
@given(
    scripts=st.lists(st.one_of(scripts, scripts, broken), min_size=6, max_size=6),
    aborts=st.lists(st.one_of(st.none(), st.integers(0, TURNS)), min_size=1, max_size=10),
    deaths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, TURNS)), max_size=3),
)
def test_nothing_is_left_or_wrong_under_aborts_and_deaths(
    scripts: list[list[int]], aborts: list[int | None], deaths: list[tuple[int, int]]
) -> None:
    async def run() -> None:
        engines = [ScriptedStage(STAGES[at % 3], script) for at, script in enumerate(scripts)]
        async with asyncio.timeout(BOUND), World.around(*engines) as world:
            asking = [asyncio.create_task(ask(world, b"%d" % at)) for at in range(len(aborts))]

            def in_bounds() -> None:
                # The tensors of a prompt are two; of latents the newest is kept.
                assert world.most_kept <= 2
                assert not any(engine.paused for engine in engines)

            answers = await gathered(world, asking, aborts, deaths, in_bounds)
            for number, (answer, at) in enumerate(zip(answers, aborts, strict=True)):
                if isinstance(answer, asyncio.CancelledError):
                    assert at is not None
                elif isinstance(answer, BaseException):
                    assert isinstance(answer, (OverloadedError, EngineError)), answer
                    assert deaths or any(-1 in script for script in scripts)
                else:
                    check(answer, b"%d" % number)
            await settled(world)

    asyncio.run(run())


async def test_workers_that_cannot_be_reached_give_no_previews_and_keep_one() -> None:
    reserved: list[int] = []
    async with (
        asyncio.timeout(BOUND),
        World.around(*map(ScriptedStage, STAGES), reachable=False) as world,
    ):
        assert check(await ask(world, hold=reserved.append)) == []
        # Two tensors of the prompt, and one at a time of the latents.
        assert sum(reserved) == 3 * 64
        await settled(world)


def latents(step: int | None) -> Payload:
    port = "latents" if step is None else f"latents.{step}"
    return Payload(port, "uint8", (3,), Buffer(b"%3d" % (step or 0)), last=step is None)


class Holding:
    """What is kept of one request, and the answers to those who read it."""

    def __init__(self) -> None:
        self.held = PayloadStore(lambda _: None, lambda _, __: self.paused.append(1))
        self.paused: list[int] = []
        self.said: list[Output] = []
        self.request = stage_request("denoiser", ())
        self._take = self.held.keep(self.request, NEWEST, self.said.append, ADDRESS)

    def make(self, step: int | None) -> None:
        reason: FinishReason | None = "stop" if step is None else None
        self._take(Output("r", 0, 0, finish_reason=reason, payloads=(latents(step),)))

    @property
    def lease(self) -> PayloadLease:
        (found,) = [output.lease for output in self.said if output.lease is not None]
        return found

    def read(self, name: str) -> list[Output]:
        found: list[Output] = []
        params = Fetch(key=self.lease.key)
        self.held.answer(Request(id=name, task=Task.FETCH, prompts=(), params=params), found.append)
        return found


def steps(answer: list[Output]) -> list[str]:
    return [payload.port for output in answer for payload in output.payloads]


def test_one_that_is_not_read_gives_way_and_the_last_is_kept_for_who_reads_again() -> None:
    made = Holding()
    for step in (1, 2, 3):
        made.make(step)
        assert (len(made.held), made.held.num_bytes) == (1, 3)
    assert steps(made.read("a")) == ["latents.3"]
    assert (len(made.held), made.held.num_bytes) == (0, 0)
    waiting = made.read("b")
    assert not waiting
    made.make(4)
    assert steps(waiting) == ["latents.4"]
    made.make(5)
    made.make(None)
    for name in "cde":
        assert steps(made.read(name)) == ["latents"]
        assert (len(made.held), made.held.num_bytes, made.held.num_made) == (1, 3, 1)
    assert made.said[-1].held == "stop"
    assert not made.paused
    made.held.release("r")
    assert (len(made.held), made.held.num_bytes, made.held.num_leases) == (0, 0, 0)


def test_who_reads_in_the_place_of_another_ends_its_wait() -> None:
    made = Holding()
    made.make(1)
    made.read("a")
    frozen, other = made.read("b"), made.read("c")
    (refused,) = frozen
    assert refused.error is not None
    made.make(2)
    assert steps(other) == ["latents.2"]
    # The one that was frozen ends without harm to the other.
    made.held.release("b")
    made.make(None)
    assert steps(made.read("c")) == ["latents"]


async def test_previews_are_planned_where_the_graph_gives_them() -> None:
    async with World.around(*map(ScriptedStage, STAGES)) as world:
        card = world.router.card("painter")
        for output, window in (("image", None), ("preview", NEWEST)):
            *_, last = plan(world.router, card, output)
            assert [edge.window for edge in last.edges] == [window]
        graph = replace(GRAPH, outputs={"image": "decoder.image"})
        without = replace(card, stage=StageCard(graph, "denoiser"))
        with pytest.raises(
            InvalidRequestError, match="makes no preview; it makes image"
        ) as refused:
            plan(world.router, without, "preview")
        assert refused.value.param == "partial_images"
