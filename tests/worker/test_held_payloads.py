"""Payloads that a worker keeps are freed in time, however their request ends."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from inlay.base.address import Address
from inlay.messages.edges import Window
from inlay.messages.request import Input, Output
from inlay.transport.connection import FREED_SECONDS, TcpPeer
from inlay.transport.listener import Listener, dial
from inlay.transport.memory import ReceiveMemory
from inlay.transport.messages import Cancel, FromWorker, Outputs, Submit, ToWorker
from inlay.transport.serve import serve
from inlay.worker.host import EngineHost
from inlay_stages.cards import StageCard
from inlay_stages.worker import payload_store
from tests import virtual_time
from tests.live import SECRET
from tests.router.scripted_stages import ScriptedStage, kept_by, stage_request
from tests.router.test_stages import prompt_payload

pytestmark = pytest.mark.extensions("stages")

BOUND = 1 << 28


def cancels(frontend: TcpPeer[Any]) -> None:
    frontend.send(Cancel("r"))


def ends(frontend: TcpPeer[Any]) -> None:
    frontend.abort()


def falls_silent(frontend: TcpPeer[Any]) -> None:
    """Without a word, as a process that is frozen or whose machine is lost."""
    assert frontend._transport is not None
    frontend._transport.pause_reading()
    assert frontend._timer is not None
    frontend._timer.cancel()
    frontend._writable = False


def reaches_its_deadline(_: TcpPeer[Any]) -> None:
    """In the same moment."""


async def seconds_until_freed(end: Callable[[TcpPeer[Any]], None]) -> float:
    """How long after the end of a request its payloads are kept."""
    loop = asyncio.get_running_loop()
    engine = ScriptedStage("denoiser")
    host = EngineHost(engine, stage=StageCard(engine.graph, "denoiser"))
    host.connects(Address("sim", 0, b""))
    serving: list[asyncio.Task[None]] = []
    listener = Listener(
        SECRET,
        ToWorker,
        ReceiveMemory(BOUND),
        lambda one: serving.append(asyncio.create_task(serve(one, host))),
    )
    address = Address("127.0.0.1", await listener.listen("127.0.0.1", 0), b"")
    frontend = await dial(address, SECRET, FromWorker, ReceiveMemory(BOUND))
    outputs: list[Output] = []

    def take(message: Any) -> None:
        outputs.extend(message.outputs if isinstance(message, Outputs) else ())

    async def listen() -> None:
        with suppress(EOFError):
            await frontend.deliver(take)

    listening = asyncio.create_task(listen())
    deadline = 2 * FREED_SECONDS
    request = stage_request("painter/denoiser", (Input("embeds", prompt_payload(b"fox")),))
    request = replace(request, id="r", hold=Window(), deadline=deadline)
    began = loop.time()
    frontend.send(Submit(request))
    while not (outputs and outputs[-1].held):  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.05)
    # It is kept for as long as the request is open.
    await asyncio.sleep(1.1 * FREED_SECONDS)
    assert kept_by(host).num_bytes
    end(frontend)
    ended = began + deadline if end is reaches_its_deadline else loop.time()

    def keeps() -> bool:
        return bool(len(kept_by(host)) or kept_by(host).num_bytes or host._requests.ids)

    while keeps():  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.05)
    passed = loop.time() - ended
    listener.close()
    frontend.abort()
    await asyncio.gather(listening, *serving)
    return passed


@pytest.mark.parametrize("end", [cancels, ends, falls_silent, reaches_its_deadline])
def test_what_is_kept_of_a_request_is_freed_in_time(
    end: Callable[[TcpPeer[Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is small is kept as what is large.
    monkeypatch.setattr(payload_store, "SMALL_BYTES", -1)
    passed = virtual_time.run(seconds_until_freed(end))
    assert passed <= FREED_SECONDS
    # Silence alone is waited for.
    assert (passed > 1) is (end is falls_silent)
