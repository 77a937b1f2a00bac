"""Harm that a client cannot do to SGLang, and the death of its processes."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.api import FailingEngine, GenerateEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Feature
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import ThinkingBudget
from tests.engine import reference
from tests.engine.conformance import Receiver, ids, make_request, run
from tests.engines.starting import started

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED: dict[Feature, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "bad_words": {"bad_words": ((5,),)},
    "allowed_token_ids": {"allowed_token_ids": (5,)},
    "min_tokens": {"min_tokens": 2},
    "logprob_token_ids": {"logprobs": 1, "logprob_token_ids": (5,)},
    "thinking_token_budget": {"thinking": ThinkingBudget(4, (5,), (6,))},
    "prior_output_with_penalties": {"presence_penalty": 1.0, "prior_output": (5,)},
}


async def test_the_engine_holds_every_request_against_the_table_its_card_shows(
    shared: GenerateEngine,
) -> None:
    assert {refusal.feature for refusal in shared.card.refusals} == set(ASKED)
    for refusal in shared.card.refusals:
        asked = make_request("asked", Prompt.of(Tokens([5])), **ASKED[refusal.feature])
        with pytest.raises(InvalidRequestError) as raised:
            shared.submit(asked, Receiver(asked))
        assert refusal.reason in raised.value.message
        assert f"sglang {shared.card.engine_version}" in raised.value.message


async def test_ids_the_model_does_not_have_are_refused_and_the_engine_lives(
    shared: GenerateEngine, directory: Path
) -> None:
    rows = reference.rows_of(torch.zeros(2, shared.card.hidden_size))
    for id_ in (shared.card.vocab_size, 10**6, -1):
        for prompt in (Prompt.of(Tokens([5, id_])), Prompt.of(Tokens([5, id_]), rows)):
            with pytest.raises(
                InvalidRequestError, match=f"token id {id_} is not in the vocabulary"
            ):
                shared.submit(
                    make_request("asked", prompt), Receiver(make_request("asked", prompt))
                )
    (found,) = await run(shared, make_request("lives", Prompt.of(Tokens([5, 6, 7]))))
    assert found.output == reference.greedy(directory, Prompt.of(Tokens([5, 6, 7])), 8)


async def test_rows_that_are_not_numbers_end_their_own_request_and_touch_no_other(
    shared: GenerateEngine, directory: Path
) -> None:
    beside = make_request("beside", Prompt.of(Tokens(ids(3, 20))), max_tokens=60)
    under_way = Receiver(beside)
    shared.submit(beside, under_way)
    nan = reference.rows_of(torch.full((40, shared.card.hidden_size), float("nan")))
    for number in range(3):
        (poisoned,) = await run(shared, make_request(f"poison-{number}", Prompt.of(nan)))
        assert poisoned.output == []
        assert poisoned.last.error is not None
        assert "not finite" in poisoned.last.error.message
        text = Prompt.of(Tokens(ids(number, 30)))
        (after,) = await run(shared, make_request("after", text, salt=str(number)))
        assert after.output == reference.greedy(directory, text, 8)
    await under_way.ended()
    assert under_way.output == reference.greedy(directory, beside.prompt, 60)


async def test_text_and_rows_in_one_batch_keep_their_own_embeddings(
    shared: GenerateEngine, directory: Path
) -> None:
    prompts = []
    for number in range(1, 9):
        tokens = ids(number, 5 * number)
        rows = reference.rows_of(reference.look_up(directory, tokens))
        prompts += [
            Prompt.of(Tokens(tokens)),
            Prompt.of(Tokens(tokens[:3]), rows, Tokens(tokens[2:])),
        ]
    requests = [make_request(str(number), prompt) for number, prompt in enumerate(prompts)]
    for one, found in zip(requests, await run(shared, *requests), strict=True):
        assert found.output == reference.greedy(directory, one.prompt, 8)


async def test_when_sglang_dies_requests_end_with_an_error_and_the_engine_says_so(
    settings: EngineSettings,
) -> None:
    async with started(settings) as engine:
        assert isinstance(engine, FailingEngine)
        children = {child.pid for child in psutil.Process().children(recursive=True)}
        one = make_request("one", Prompt.of(Tokens(ids(8, 20))), max_tokens=400)
        receiver = Receiver(one)
        engine.submit(one, receiver)
        await receiver.begun()
        for pid in engine._process.process_ids & children:  # type: ignore[attr-defined]
            psutil.Process(pid).kill()
        last = await receiver.ended()
        assert last.error is not None
        assert isinstance(last.error.to_error(), EngineError)
        assert "died" in (await asyncio.wait_for(engine.failed(), 60)).message
        with pytest.raises(EngineError, match="died"):
            engine.submit(one, Receiver(one))
