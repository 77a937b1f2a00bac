"""Outputs that no message can carry end their requests with an error, and harm no others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Emit, Output, Pooling, Request, Sampling, Task
from inlay.transport import ReceiveMemory, TcpPeer, dial
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.link import PeerLink
from inlay.transport.local import LocalPlane
from inlay.transport.messages import FromWorker
from inlay.worker.host import EngineHost
from tests.transport.conftest import echo_settings
from tests.transport.fleet import SECRET, identity

__all__ = ["echo_settings"]

MOST = 4000
"""Bytes that the worker's end sends as one message."""


@asynccontextmanager
async def narrow(engine: EchoEngine) -> AsyncIterator[PeerLink]:
    """The connection to a worker that can send small messages only."""
    await engine.start()
    endpoint = Endpoint(EngineHost(engine), SECRET, identity(), EmbedsCache(0))
    address = await endpoint.open("127.0.0.1", "127.0.0.1", 0)
    connection: TcpPeer[FromWorker] = await dial(
        address, SECRET, FromWorker, ReceiveMemory(1 << 28)
    )
    plane = LocalPlane([connection])
    await plane.start()
    await plane.wait_ready()
    for end in endpoint._serving.values():
        end._writer._max_bytes = MOST
    yield plane.workers()[0]
    await plane.close()
    await endpoint.close()
    await engine.close()
    await asyncio.sleep(0.05)


def make_request(id_: str, length: int, max_tokens: int, **sampling: Any) -> Request:
    return Request(
        id=id_,
        prompts=(Prompt.of(Tokens(range(length))),),
        params=Sampling(max_tokens=max_tokens, **sampling),
    )


async def outputs_of(link: PeerLink, request: Request) -> list[Output]:
    async with asyncio.timeout(90):
        return [output async for outputs in link.send(request) for output in outputs]


async def test_an_output_that_is_too_large_ends_its_request_alone(
    echo_settings: EngineSettings,
) -> None:
    engine = EchoEngine(echo_settings, SECRET)
    async with narrow(engine) as link:
        large = make_request("large", 1000, 100_000, prompt_logprobs=0)
        answers = await asyncio.gather(
            outputs_of(link, large),
            *(outputs_of(link, make_request(str(n), 5, 50)) for n in range(20)),
            return_exceptions=True,
        )
        assert isinstance(answers[0], InvalidRequestError)
        assert f"at most {MOST}" in str(answers[0])
        for answer in answers[1:]:
            assert isinstance(answer, list)
            assert sum(len(output.token_ids) for output in answer) == 50
        assert not engine.stats().running, "nobody reads what it says"


async def test_many_outputs_that_are_too_large_together_all_come(
    echo_settings: EngineSettings,
) -> None:
    async with narrow(EchoEngine(echo_settings, SECRET)) as link:
        answers = await asyncio.gather(
            *(outputs_of(link, make_request(str(n), 5, 30)) for n in range(300))
        )
    assert [sum(len(each.token_ids) for each in answer) for answer in answers] == [30] * 300


async def test_embeddings_that_are_too_large_end_their_request_alone(
    echo_settings: EngineSettings,
) -> None:
    async with narrow(EchoEngine(echo_settings, SECRET)) as link:
        answers = await asyncio.gather(
            *(
                outputs_of(
                    link,
                    Request(
                        id=str(count),
                        task=Task.EMBED,
                        prompts=(Prompt.of(Tokens([7])),) * count,
                        params=Pooling(),
                    ),
                )
                for count in (3, 100, 4)
            ),
            return_exceptions=True,
        )
    assert isinstance(answers[1], InvalidRequestError)
    for answer, count in ((answers[0], 3), (answers[2], 4)):
        assert isinstance(answer, list)
        assert answer[0].payloads[0].shape == (count, 64)


class Unreadable(EchoEngine):
    """Says once what no encoder knows."""

    def submit(self, request: Request, emit: Emit) -> None:
        emit(Output(request.id, request.attempt, 0, (2**70,), finish_reason="length"))


async def test_an_output_that_cannot_be_encoded_is_an_error_of_the_engine(
    echo_settings: EngineSettings,
) -> None:
    async with narrow(Unreadable(echo_settings, SECRET)) as link:
        with pytest.raises(EngineError, match="could not be sent: OverflowError"):
            await outputs_of(link, make_request("a", 3, 1))
