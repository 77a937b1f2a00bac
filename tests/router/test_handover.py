"""What happens to both workers of a request while it goes from one to the other."""

import asyncio

import pytest
from msgspec.structs import replace

from inlay.base.address import Address
from inlay.base.errors import EngineError
from inlay.messages.card import Exactness, Phase
from inlay.messages.request import PAGES, Output, Source
from inlay.router import Router
from inlay.router.settings import RouterSettings
from tests.router.scripted_plane import SMALL, Answering, ScriptedPlane, quiet, request
from tests.router.sending import First, send

EAGER = RouterSettings(router_interference_weight=1000)
LONG = 4096


def worker(phase: Phase) -> Answering:
    limits = replace(SMALL.limits, max_num_seqs=4)
    card = replace(
        SMALL,
        phase=phase,
        limits=limits,
        kv_layout="l",
        address=Address("here", 1, b"id"),
        resuming={"sampling": Exactness.EXACT},
    )
    return Answering(phase, card)


async def pair() -> tuple[Router, Answering, Answering]:
    """A prefill worker, and a decode worker that runs something."""
    prefill, decode = worker("prefill"), worker("decode")
    router = Router(ScriptedPlane(prefill, decode), EAGER, random=First())
    await send(router, request("busy"))
    assert [one.request.id for one in decode.answers] == ["busy"]
    return router, prefill, decode


async def test_a_cancelled_request_stops_the_pages_that_were_being_fetched_for_it() -> None:
    router, prefill, decode = await pair()
    stream = await send(router, request("r", length=LONG))
    assert [one.request.id for one in prefill.live] == ["r"]
    assert [one.request.id for one in decode.live] == ["busy", "r/prefetch"]
    stream.cancel()
    assert [one.request.id for one in decode.live] == ["busy"]
    assert prefill.live == []


async def test_pages_go_on_to_come_once_the_first_token_is_there() -> None:
    router, prefill, decode = await pair()
    stream = await send(router, request("r", length=LONG))
    first = prefill.answers[0].request
    prefill.answers[0].tell(7)
    (shown,) = await anext(stream)  # type: ignore[call-overload]
    assert (shown.token_ids, first.sampling.max_tokens) == ((7,), 1)
    assert "r/prefetch" in [one.request.id for one in decode.live]


async def test_tokens_that_a_worker_left_out_end_the_answer() -> None:
    alone = Answering("alone")
    router = Router(ScriptedPlane(alone), random=First())
    stream = await send(router, request("r"))
    (answer,) = alone.answers
    answer.tell(1, 2)
    (shown,) = await anext(stream)  # type: ignore[call-overload]
    assert shown.token_ids == (1, 2)
    answer.say(Output("r", 0, 4, (5,)))
    with pytest.raises(EngineError, match="the worker left out 2 tokens"):
        await anext(stream)  # type: ignore[call-overload]
    await quiet()
    assert len(alone.answers) == 1


@pytest.mark.parametrize("lost", [False, True])
async def test_pages_come_from_a_worker_that_gave_up_and_from_none_that_is_lost(
    lost: bool,
) -> None:
    addresses = [Address(name, 1, b"id") for name in ("one", "two")]
    card = replace(SMALL, kv_layout="l", resuming={"sampling": Exactness.EXACT})
    one, two = (Answering(each.host, replace(card, address=each)) for each in addresses)
    stream = await send(Router(ScriptedPlane(one, two), random=First()), request("r"))
    (answer,) = one.answers
    answer.tell(7)
    await anext(stream)  # type: ignore[call-overload]
    if lost:
        answer.lose()
    else:
        answer.cancel()
    reading = asyncio.ensure_future(anext(stream))  # type: ignore[call-overload]
    await quiet()
    (again,) = two.answers
    assert again.request.prior_output == (7,)
    assert again.request.sources == (() if lost else (Source(PAGES, (addresses[0],)),))
    stream.cancel()
    await reading
