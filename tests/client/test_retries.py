"""Uploads in an event loop, and tries after the first: over real HTTP, with the real client."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from inlay.base.errors import InlayError, NotFoundError, OverloadedError, RateLimitedError
from inlay.client import AsyncUploader, EmbeddedPrompt, Uploader
from inlay.client.connection import Question, asked, wait_after
from inlay.store import PromptStore
from tests.live import SECRET, Fleet, fleet
from tests.models import tiny

ROWS = EmbeddedPrompt(np.random.default_rng(3).standard_normal((20, 48)).astype(np.float32))


@pytest.fixture(scope="module")
def servers() -> Iterator[Fleet]:
    with fleet(tiny("llama")) as running:
        yield running


class Clock:
    """A clock that is set by hand."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def test_an_event_loop_sends_rows_once_and_again_when_they_are_gone(servers: Fleet) -> None:
    clock = Clock()
    store = PromptStore(SECRET, memory_bytes=1 << 26, ttl=100.0, clock=clock)
    url = servers.serve(enable_prompt_embeds=True, store=store) + "/v1"
    uploader = AsyncUploader(url, upload_from=1000)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def answer() -> str:
            arguments: dict[str, Any] = await ROWS.completion_args_async(uploader)
            assert set(arguments["extra_body"]["prompt_embeds"]) == {"ref"}
            found = await client.completions.create(
                model="tiny", temperature=0, max_tokens=12, **arguments
            )
            return str(found.choices[0].text)

        want = await client.completions.create(
            model="tiny", temperature=0, max_tokens=12, **ROWS.completion_args()
        )
        assert await answer() == want.choices[0].text
        clock.now += 101
        with pytest.raises(openai.NotFoundError):
            await answer()
        assert await uploader.retrying(answer) == want.choices[0].text
        part = await ROWS.chat_part_async(uploader)
    stored = await uploader.get(part["ref"])
    assert stored == await asyncio.to_thread(Uploader(url).get, part["ref"])
    assert (await uploader.pin(part["ref"])).pinned
    await uploader.delete(part["ref"])
    with pytest.raises(NotFoundError):
        await uploader.get(part["ref"])


async def test_a_server_that_is_full_is_asked_again_after_the_time_it_says(
    servers: Fleet,
) -> None:
    url = servers.serve(enable_prompt_embeds=True, max_inflight_requests=1)
    metrics = 'inlay:http_requests_total{route="/v1/prompt_embeds",status="503"}'
    uploader = AsyncUploader(url + "/v1", max_retries=5)
    with servers.apps[url].server.inflight:
        upload = asyncio.create_task(uploader.upload(ROWS.to_bytes()))
        async with httpx.AsyncClient() as client:
            while metrics not in (await client.get(url + "/metrics")).text:
                assert not upload.done()
                await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError) as full:
            await AsyncUploader(url + "/v1", max_retries=0).upload(ROWS.to_bytes())
        assert full.value.retry_after == 1
    assert (await upload).num_tokens == 20


@pytest.mark.parametrize(
    "error", [OverloadedError("full"), RateLimitedError("a"), OverloadedError("b", retry_after=7.0)]
)
def test_a_question_is_asked_as_often_as_it_may_be(error: InlayError) -> None:
    question = Question("GET", "/a")
    steps = asked(question, 2)
    assert next(steps) == question
    for least, most in ((0.375, 0.5), (0.75, 1.0)):
        wait = steps.throw(error)
        assert isinstance(wait, float)
        assert wait == error.retry_after or least <= wait <= most
        assert next(steps) == question
    with pytest.raises(type(error)):
        steps.throw(error)


def test_a_long_wait_is_the_callers_and_other_refusals_are_final() -> None:
    for error in (OverloadedError("full", retry_after=61), NotFoundError("gone")):
        steps = asked(Question("GET", "/a"), 2)
        next(steps)
        with pytest.raises(type(error)):
            steps.throw(error)
    assert 6.0 <= wait_after(OverloadedError("full"), 30) <= 8.0


def test_a_deletion_whose_answer_was_lost_is_done() -> None:
    steps = asked(Question("DELETE", "/a"), 2)
    next(steps)
    steps.throw(OverloadedError("lost"))
    next(steps)
    with pytest.raises(StopIteration):
        steps.throw(NotFoundError("gone"))
    first = asked(Question("DELETE", "/a"), 2)
    next(first)
    with pytest.raises(NotFoundError):
        first.throw(NotFoundError("gone"))
