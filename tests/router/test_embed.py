"""Which worker makes vectors."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from inlay.digest import Secret
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.errors import NotFoundError, OverloadedError
from inlay.prompt import Prompt, Tokens
from inlay.request import EmbedRequest, EmitEmbedOutput
from inlay.router import Router
from tests.transport.conftest import echo_settings
from tests.transport.direct import DirectPlane

__all__ = ["echo_settings"]

SECRET = Secret(bytes(32))


class Counting(EchoEngine):
    """Says how many requests it was given, and may be full."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings, SECRET)
        self.taken: list[int] = []
        self.full = False

    def embed(self, request: EmbedRequest, emit: EmitEmbedOutput) -> None:
        if self.full:
            raise OverloadedError("too much is waiting", retry_after=1)
        self.taken.append(request.attempt)
        asyncio.get_running_loop().call_later(0.05, super().embed, request, emit)


@pytest.fixture
async def engines(
    echo_settings: EngineSettings,
) -> AsyncIterator[tuple[Router, Counting, Counting]]:
    one, two = Counting(echo_settings), Counting(echo_settings)
    plane = await DirectPlane.around(one, two)
    yield Router(plane), one, two
    await plane.close()


def make_request(id_: str, length: int = 3) -> EmbedRequest:
    return EmbedRequest(id=id_, prompts=(Prompt.of(Tokens([5] * length)),))


async def test_requests_go_where_fewest_positions_are_under_way(
    engines: tuple[Router, Counting, Counting],
) -> None:
    router, one, two = engines
    await asyncio.gather(
        router.embed("echo", make_request("long", 100)),
        *(router.embed("mirror", make_request(str(n))) for n in range(4)),
    )
    assert sorted((len(one.taken), len(two.taken))) == [1, 4]


async def test_a_worker_that_is_full_is_passed_over(
    engines: tuple[Router, Counting, Counting],
) -> None:
    router, one, two = engines
    one.full = True
    await asyncio.gather(*(router.embed("echo", make_request(str(n))) for n in range(4)))
    assert len(two.taken) == 4
    assert 1 in two.taken
    two.full = True
    with pytest.raises(OverloadedError, match="too much is waiting"):
        await router.embed("echo", make_request("no"))


async def test_an_unknown_model_makes_no_vectors(
    engines: tuple[Router, Counting, Counting],
) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        await engines[0].embed("other", make_request("x"))
