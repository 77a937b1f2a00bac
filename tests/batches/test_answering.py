"""Lines that fail: what is tried again, how often, and what their output says."""

import json
from collections.abc import Callable

import msgspec
import pytest

from inlay.api.openai.schema.completions import CompletionRequest
from inlay.base.errors import (
    LOST,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RateLimitedError,
)
from inlay.http.callers.auth import ANYONE
from inlay.http.server import Call
from inlay.messages.priority import BACKGROUND
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Sampling
from inlay.store.settings import BatchSettings
from inlay_batches import answering
from inlay_batches.answering import TRIES, LineRoute, ServerWork
from inlay_batches.lines import LineRequest, Outcome
from inlay_batches.records import BatchRecord, new_id
from tests.live import Fleet

LINE = LineRequest("a", "/v1/completions", b'{"model":"tiny","prompt":"one"}')


@pytest.fixture(scope="module")
def url(llama: Fleet) -> str:
    return llama.serve(batches=BatchSettings(batch_store="memory"))


Answer = Callable[[Call, int], None]


def answer(llama: Fleet, url: str, act: Answer) -> tuple[Outcome, int]:
    """A line's outcome where its route does `act` with the call and the number of the try."""
    server = llama.apps[url].server
    part = server.parts["batches"]
    tries = 0

    async def handler(call: Call) -> None:
        nonlocal tries
        tries += 1
        act(call, tries)
        prompt = Prompt.of(Tokens([1]))
        assert call.engine_request("x", Sampling(max_tokens=1), (prompt,)).priority == BACKGROUND
        assert call.client is not None
        assert call.client.endswith("/batch")
        await call.json({"tries": tries})

    record = BatchRecord(
        id=new_id("batch_"), endpoint="/v1/completions", input_file_id="file-a", window="24h",
        created_at=0, expires_at=1,
    )  # fmt: skip
    endpoint = LineRoute(
        "/v1/completions", handler, msgspec.json.Decoder(CompletionRequest), seeded=True
    )
    work = ServerWork(
        server, endpoint, record, "owner", lambda _: ANYONE, part.files, part._budget, 10
    )
    return llama.run(work.answer(0, LINE)), tries


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_WAIT_SECONDS", 0.001)


def test_a_line_that_kills_its_worker_fails_alone_after_a_few_tries(llama: Fleet, url: str) -> None:
    def act(call: Call, tries: int) -> None:
        raise OverloadedError("the worker is gone", retry_after=1, reason=LOST)

    outcome, tries = answer(llama, url, act)
    assert (outcome.status, tries) == (503, TRIES)
    found = json.loads(outcome.text)
    assert found["error"] is None
    assert found["response"]["body"]["error"]["message"] == "the worker is gone"


def test_what_has_no_room_yet_is_waited_out(llama: Fleet, url: str) -> None:
    def act(call: Call, tries: int) -> None:
        if tries <= 2 * TRIES:
            error = OverloadedError if tries % 2 else RateLimitedError
            raise error("full", retry_after=0.001)

    outcome, tries = answer(llama, url, act)
    assert (outcome.status, tries) == (200, 2 * TRIES + 1)


def test_a_fault_of_the_engine_is_tried_again_and_a_bad_line_is_not(llama: Fleet, url: str) -> None:
    def once(call: Call, tries: int) -> None:
        if tries == 1:
            raise EngineError("it failed")

    assert answer(llama, url, once)[1] == 2

    def always(call: Call, tries: int) -> None:
        raise EngineError("it failed")

    outcome, tries = answer(llama, url, always)
    assert (outcome.status, tries) == (500, TRIES)

    def bad(call: Call, tries: int) -> None:
        raise InvalidRequestError("no", param="prompt")

    outcome, tries = answer(llama, url, bad)
    assert (outcome.status, tries) == (400, 1)

    def fault(call: Call, tries: int) -> None:
        raise RuntimeError("a fault of ours")

    outcome, tries = answer(llama, url, fault)
    assert (outcome.status, tries) == (500, TRIES)
    assert b"a fault of ours" not in outcome.text
