"""The thinking budget: a function of the ids alone, and the end that is chosen when it is spent."""

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.sampling.sampler import SampledToken, Sampler
from inlay.engine.torch.sampling.thinking import ThinkingProgress
from inlay.engine.torch.sequence import Sequence
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Sampling, ThinkingBudget
from tests.engine.conformance import ids, make_request, run
from tests.engine.torch.sequences import sequence_of
from tests.models import tiny

START, END = 7, 8
VOCAB = 40


def budget(
    tokens: int,
    spent: int | None = 0,
    *,
    start: tuple[int, ...] = (START,),
    end: tuple[int, ...] = (END,),
) -> ThinkingBudget:
    return ThinkingBudget(tokens, start, end, spent)


def sequence(thinking: ThinkingBudget, output: tuple[int, ...] = (), **more: Any) -> Sequence:
    return sequence_of(Sampling(max_tokens=1000, thinking=thinking, **more), output=output)


def forced(thinking: ThinkingBudget, *output: int) -> int | None:
    return ThinkingProgress(sequence(thinking, output), thinking).forced()


def test_the_end_is_forced_when_the_budget_is_spent_and_not_before() -> None:
    assert forced(budget(2), 1) is None
    assert forced(budget(2), 1, 1) == END
    assert forced(budget(2, spent=1), 1) == END
    assert forced(budget(0)) == END
    assert forced(budget(2, spent=9)) == END


def test_a_thinking_that_ends_by_itself_is_not_ended_again() -> None:
    assert forced(budget(2), 1, END, 1, 1, 1) is None
    assert forced(budget(2), 1, 1, END) is None


def test_what_is_no_thinking_is_not_counted() -> None:
    assert forced(budget(0, spent=None), 1, 1, 1) is None
    assert forced(budget(2, spent=None), 1, 1, START, 1) is None
    assert forced(budget(2, spent=None), 1, 1, START, 1, 1) == END
    assert forced(budget(0, spent=None), START) == END


def test_a_thinking_that_begins_anew_has_a_budget_of_its_own() -> None:
    assert forced(budget(2), 1, 1, END, START, 1) is None
    assert forced(budget(2), 1, 1, END, START, 1, 1) == END


def test_tags_of_several_ids_are_forced_one_by_one() -> None:
    tags = budget(2, start=(5, 6), end=(20, 21, 22))
    assert [forced(tags, 1, 1), forced(tags, 1, 1, 20), forced(tags, 1, 1, 20, 21)] == [20, 21, 22]
    assert forced(tags, 1, 1, 20, 21, 22) is None
    assert forced(tags, 20, 21) == 22, "what the model has begun is gone on with"
    again = budget(2, spent=None, start=(5, 6), end=(20, 21, 22))
    assert forced(again, 5, 1, 1, 1) is None
    assert forced(again, 5, 6, 1, 1) == 20


@given(
    st.lists(st.sampled_from([1, 2, START, END]), max_size=40),
    st.integers(0, 6),
    st.one_of(st.none(), st.integers(0, 8)),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_it_does_not_matter_how_the_ids_come(
    output: list[int], tokens: int, spent: int | None, looks: list[int]
) -> None:
    own = budget(tokens, spent)
    growing = sequence(own)
    kept = ThinkingProgress(growing, own)
    for stop in sorted(min(look, len(output)) for look in looks):
        growing.output[:] = output[:stop]
        assert kept.forced() == forced(own, *output[:stop])
    growing.output[:] = output
    assert kept.forced() == forced(own, *output)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.0},
        {"temperature": 5.0, "seed": 3},
        {"temperature": 0.0, "allowed_token_ids": (1, 2)},
        {"temperature": 0.0, "bad_words": ((END,),)},
        {"temperature": 0.0, "logit_bias": {END: -100.0}, "repetition_penalty": 3.0},
        {"temperature": 1.0, "top_k": 1, "frequency_penalty": 2.0},
    ],
)
def test_nothing_goes_before_the_end_of_a_spent_budget(more: dict[str, Any]) -> None:
    sampler = Sampler(VOCAB, (2,), torch.device("cpu"))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    before = logits.clone()
    neighbours = [sequence(budget(5), (1, 1), temperature=0.0) for _ in range(2)]
    batch = [neighbours[0], sequence(budget(2), (1, 1), logprobs=3, **more), neighbours[1]]
    found = [choice for choice in sampler.sample(logits, batch) if isinstance(choice, SampledToken)]
    plain = logits.argmax(dim=-1).tolist()
    assert [choice.token_id for choice in found] == [plain[0], END, plain[2]]
    assert torch.equal(logits, before)
    told = found[1].logprobs
    assert told is not None
    assert told.logprob == pytest.approx(float(logits[1].log_softmax(-1)[END]), abs=1e-5)
    for one in batch:
        sampler.forget(one)
    assert len(sampler) == 0


async def test_outputs_are_the_same_alone_resumed_anywhere_and_preempted() -> None:
    settings = EngineSettings.of(
        model=str(tiny("llama")),
        device="cpu",
        num_threads=1,
        max_model_len=64,
        kv_cache_memory_bytes=48 << 10,
    )
    engine = TorchEngine(settings, Secret(bytes(32)))
    await engine.start()
    try:
        requests = [
            make_request(
                str(number),
                Prompt.of(Tokens(ids(number, 20))),
                max_tokens=40,
                temperature=0.8,
                seed=number,
                ignore_eos=True,
                thinking=budget(9 + number),
            )
            for number in range(8)
        ]
        alone = [(await run(engine, one))[0].output for one in requests]
        for number, found in enumerate(alone):
            assert found.index(END) <= 9 + number, "by itself or by force, never later"
        assert any(found.index(END) == 9 + number for number, found in enumerate(alone))
        before = engine.stats().preemptions
        assert [found.output for found in await run(engine, *requests)] == alone
        assert engine.stats().preemptions > before
        for done in (1, 8, 9, 10, 11, 30):
            again = msgspec.structs.replace(requests[0], prior_output=tuple(alone[0][:done]))
            (rest,) = await run(engine, again)
            assert alone[0][:done] + rest.output == alone[0]
    finally:
        await engine.close()
