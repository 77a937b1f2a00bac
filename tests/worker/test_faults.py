"""A fault in what a worker does for one request ends that request alone."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from inlay.base.address import Address
from inlay.base.errors import EngineError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret
from inlay.messages.edges import Fetch, Window
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Emit, Input, Output, PageQuery, Request, Sampling, Task
from inlay.transport.api import Stream
from inlay.worker.host import EngineHost
from inlay_stages.cards import StageCard
from tests.router.scripted_stages import ScriptedStage, kept_by, stage_request
from tests.router.test_stages import prompt_payload
from tests.transport.conftest import echo_settings
from tests.transport.direct import DirectPlane

__all__ = ["echo_settings"]

SECRET = Secret(bytes(32))


class Faulty(EchoEngine):
    """One that has a fault wherever it is asked for more than an answer."""

    def give_pages(self, request: Request, emit: Emit) -> None:
        raise ZeroDivisionError

    def submit(self, request: Request, emit: Emit) -> None:
        if request.id == "bad":
            raise ZeroDivisionError
        super().submit(request, emit)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        if request_id == "stubborn":
            raise ZeroDivisionError


def request(id_: str, max_tokens: int) -> Request:
    prompts = (Prompt.of(Tokens([1, 2, 3])),)
    return Request(id=id_, prompts=prompts, params=Sampling(max_tokens=max_tokens))


BAD = request("bad", 9)
PAGES = PageQuery(layout="l", group=0, digests=b"d" * 16)
FAULTS = {
    "submitting": BAD,
    "giving pages": replace(BAD, task=Task.PAGES, prompts=(), params=PAGES),
    "finding a payload": replace(BAD, id="f", task=Task.FETCH, prompts=(), params=Fetch(key=b"k")),
    "keeping": replace(BAD, id="k", hold=Window()),
    "submitting what is kept": replace(BAD, hold=Window()),
}


@pytest.fixture
async def plane(echo_settings: EngineSettings) -> AsyncIterator[DirectPlane]:
    plane = await DirectPlane.around(Faulty(echo_settings, SECRET))
    plane.hosts[0].connects(Address("here", 1, b"f"))
    yield plane
    await plane.close()


async def outputs(stream: Stream) -> list[Output]:
    async with asyncio.timeout(30):
        return [output async for some in stream for output in some]


async def ends_well(stream: Stream) -> None:
    found = await outputs(stream)
    assert sum(len(output.token_ids) for output in found) == 3000
    assert found[-1].finish_reason == "length"


@pytest.mark.extensions("stages")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_of_one_request_is_its_own_error_and_another_goes_on(
    plane: DirectPlane, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault in ("finding a payload", "keeping"):
        monkeypatch.setattr(kept_by(plane.hosts[0]), "_by_key", None)
    (worker,) = plane.workers()
    other = worker.send(request("other", 3000))
    with pytest.raises(EngineError, match="failed to admit"):
        await outputs(worker.send(FAULTS[fault]))
    monkeypatch.undo()
    await ends_well(other)
    assert not plane.hosts[0]._requests.ids
    await ends_well(worker.send(request("next", 3000)))


async def test_a_fault_while_a_request_is_stopped_ends_no_other(plane: DirectPlane) -> None:
    (worker,) = plane.workers()
    other = worker.send(request("other", 3000))
    bad = worker.send(request("stubborn", 3000))
    bad.cancel()
    await outputs(bad)
    await ends_well(other)
    await ends_well(worker.send(request("next", 3000)))


@pytest.mark.extensions("stages")
async def test_what_cannot_be_held_up_is_ended() -> None:
    class Unstoppable(ScriptedStage):
        def pause(self, request_id: str, paused: bool) -> None:
            raise ZeroDivisionError

    engine = Unstoppable("thinker")
    host = EngineHost(engine, stage=StageCard(engine.graph, "thinker"))
    host.connects(Address("here", 1, b"f"))
    found: dict[str, list[Output]] = {}

    def submit(id_: str, hold: Window | None) -> None:
        asked = stage_request("speaker/thinker", (Input("prompt", prompt_payload(b"fox")),))
        host.submit(replace(asked, id=id_, hold=hold), found.setdefault(id_, []).append)

    submit("kept", Window(items=2))
    submit("other", None)
    async with asyncio.timeout(10):
        while host._requests.ids:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
    assert found["kept"][-1].finish_reason == "abort"
    assert found["other"][-1].finish_reason == "stop"
    assert not len(kept_by(host))


async def test_a_probe_that_fails_unforeseen_is_told_of_and_tried_again() -> None:
    class Odd(ScriptedStage):
        tried = 0

        async def probe(self) -> float:
            self.tried += 1
            if self.tried == 1:
                raise ZeroDivisionError
            return 0.0

    host = EngineHost(Odd("reader"), probe_interval=0.01)
    cards: asyncio.Queue[ModelCard] = asyncio.Queue()
    host.watch(cards.put_nowait)
    assert cards.get_nowait().probe is None
    probing = asyncio.create_task(host.probe())
    async with asyncio.timeout(10):
        errors = [probe.error for probe in [(await cards.get()).probe for _ in range(2)] if probe]
    probing.cancel()
    await asyncio.wait([probing])
    assert errors == ["the engine failed at a probe: ZeroDivisionError", None]
