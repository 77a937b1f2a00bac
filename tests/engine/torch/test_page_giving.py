"""Bounds on what peers may ask an engine for at a time."""

import asyncio
import gc

import pytest
from msgspec.structs import replace

from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.pages import exchange
from inlay.engine.torch.pages.exchange import MAX_ASKED
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output, PageQuery, Request, Task
from tests.engine.conformance import ids, make_request
from tests.engine.torch.test_page_exchange import FROM_PEER, Direct, answers, pair
from tests.models import tiny


def asking(name: str, query: PageQuery) -> Request:
    return Request(id=name, task=Task.PAGES, prompts=(), params=query)


async def given(engine: TorchEngine, request: Request) -> Output:
    answer: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
    engine.give_pages(request, answer.set_result)
    return await answer


async def asked(direct: Direct, asker: TorchEngine) -> tuple[TorchEngine, PageQuery]:
    """An engine that gives pages, and what `asker` has asked it."""
    giver = direct.engines[next(iter(direct.engines))]
    assert giver is not None
    request = make_request("first", Prompt.of(Tokens(ids(5, 80))), max_tokens=2)
    await answers(giver, request)
    await answers(asker, replace(request, sources=FROM_PEER))
    return giver, direct.asked[0]


async def test_answers_that_nobody_has_read_take_places() -> None:
    async with pair(tiny("llama")) as (direct, asker):
        giver, query = await asked(direct, asker)
        unread = [await given(giver, asking(str(n), query)) for n in range(MAX_ASKED)]
        assert all(output.payloads[0].data for output in unread)
        with pytest.raises(OverloadedError, match=f"{MAX_ASKED} others ask for pages"):
            giver.give_pages(asking("more", query), lambda output: None)
        # Another prompt goes on meanwhile.
        await answers(giver, make_request("b", Prompt.of(Tokens(ids(6, 40))), max_tokens=2))
        unread.pop()
        gc.collect()
        assert (await given(giver, asking("more", query))).error is None


async def test_an_answer_that_cannot_be_sent_is_an_error_for_its_peer() -> None:
    async with pair(tiny("llama")) as (direct, asker):
        giver, query = await asked(direct, asker)
        last: asyncio.Future[Output] = asyncio.get_running_loop().create_future()

        def emit(output: Output) -> None:
            if output.payloads:
                raise ValueError("too large")
            last.set_result(output)

        giver.give_pages(asking("cut", query), emit)
        assert (await last).error is not None


@pytest.mark.thorough
async def test_answers_that_nobody_has_read_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tiny("llama")) as (direct, asker):
        giver, query = await asked(direct, asker)
        size = len((await given(giver, asking("0", query))).payloads[0].data)
        gc.collect()
        # Nobody is refused where nothing else is held.
        for most, places in ((3 * size, 3), (3 * size - 1, 2), (1, 1)):
            monkeypatch.setattr(exchange, "MAX_ASKED_BYTES", most)
            unread = [await given(giver, asking(str(n), query)) for n in range(places)]
            said = f"{places} others ask for pages, {places * size} bytes"
            with pytest.raises(OverloadedError, match=said):
                giver.give_pages(asking("more", query), lambda output: None)
            del unread
            # The loop has the last of its own a turn longer.
            await asyncio.sleep(0)
            gc.collect()


async def test_an_id_that_is_under_way_is_refused() -> None:
    async with pair(tiny("llama")) as (direct, asker):
        giver = direct.engines[next(iter(direct.engines))]
        assert giver is not None
        request = make_request("first", Prompt.of(Tokens(ids(5, 80))), max_tokens=2)
        await answers(giver, request)
        await answers(asker, replace(request, sources=FROM_PEER))
        first: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        giver.give_pages(asking("q", direct.asked[0]), first.set_result)
        with pytest.raises(InvalidRequestError, match="a request with id 'q' is under way"):
            giver.give_pages(asking("q", direct.asked[0]), lambda output: None)
        assert (await first).payloads


async def test_an_answer_is_made_in_memory_that_the_peer_lends_and_not_once_it_is_stopped() -> None:
    async with pair(tiny("llama")) as (direct, asker):
        giver, query = await asked(direct, asker)
        (truth,) = (await given(giver, asking("own", query))).payloads
        memory = memoryview(bytearray(query.answer_bytes))
        assert len(truth.data) == len(memory)
        (payload,) = (await given(giver, asking("lent", replace(query, into=memory)))).payloads
        assert payload.data.view.obj is memory.obj
        assert payload.data == truth.data
        # Memory of another size is none for this answer.
        (payload,) = (await given(giver, asking("s", replace(query, into=memory[1:])))).payloads
        assert payload.data.view.obj is not memory.obj
        assert payload.data == truth.data
        for turns in range(6):
            memory[:] = bytes(len(memory))
            outputs: list[Output] = []
            giver.give_pages(asking("stopped", replace(query, into=memory)), outputs.append)
            for _ in range(turns):
                await asyncio.sleep(0)
            giver.abort("stopped")
            (output,) = outputs
            if output.finish_reason == "abort":
                before = bytes(memory)
                # A question after it has its turn later.
                await given(giver, asking("next", query))
                assert bytes(memory) == before
