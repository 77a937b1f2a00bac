"""Harm by embeddings, shown on vLLM alone, that cannot be done through inlay.

What is not here because inlay never hands it on, and its frontend's own tests show: archives that
inflate, the placeholder's text in a chat, a part without rows.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from inlay.base.errors import EmbeddingsError, EngineError, InvalidRequestError
from inlay.engine.api import AdapterEngine, GenerateEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Adapter, Feature
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Grammar, Output, Request, ThinkingBudget
from inlay.tensors.reader import read
from tests import adapters
from tests.deepseek import plain_r1
from tests.engine import reference
from tests.engine.conformance import Receiver, ids, make_request, run
from tests.engines.starting import started
from tests.engines.vllm import bare
from tests.engines.vllm.alone import Alone, alone
from tests.engines.vllm.serving import FLAGS, loud_model
from tests.equality.reference import model_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def unguarded(directory: Path) -> Alone:
    """vLLM alone, in the end dead."""
    return alone("penalties,named_logprobs,not_finite,prompt_logprobs", directory, "float32")


@pytest.fixture(scope="module")
def unguarded_half() -> Alone:
    """vLLM alone with a model in float16, in the end dead."""
    return alone("overflow,unknown_ids", loud_model(), "float16")


def noise(engine: GenerateEngine, count: int = bare.ROWS) -> Rows:
    return reference.rows_of(bare.rows(engine.card.hidden_size, count))


def filled(engine: GenerateEngine, count: int, value: float, dtype: str = "float32") -> Rows:
    """Rows that are all `value`, its sign in turn."""
    values = value * torch.sign(bare.rows(engine.card.hidden_size, count))
    data = values.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().tobytes()
    return Rows(Buffer(data), dtype, (count, engine.card.hidden_size))


async def admitted(engine: GenerateEngine, asked: Request) -> None:
    """Run a request; raises whatever it was refused with, before or after it was admitted."""
    (found,) = await run(engine, asked)
    if found.last.error is not None:
        raise found.last.error.to_error()


@torch.no_grad()
def penalised(directory: Path, prompt: Prompt, penalty: float, max_tokens: int) -> list[int]:
    """Greedy ids of transformers under a repetition penalty of the prompt's tokens and output."""
    plain = model_of(directory)
    embeds = reference.embedded(directory, prompt)
    seen, output = list(prompt.token_ids()), list[int]()
    for _ in range(max_tokens):
        logits = plain(inputs_embeds=embeds).logits[0, -1]
        for id_ in {*seen, *output}:
            logits[id_] = logits[id_] / penalty if logits[id_] > 0 else logits[id_] * penalty
        output.append(int(logits.argmax()))
        embeds = torch.cat(
            (embeds, plain.get_input_embeddings()(torch.tensor([[output[-1]]]))), dim=1
        )
    return output


async def test_ids_whose_logprobs_one_asks_for_are_not_told_to_others(
    shared: GenerateEngine, unguarded: Alone
) -> None:
    assert unguarded.told["logprobs alone"] != unguarded.told["logprobs beside"]
    named = make_request(
        "named", Prompt.of(Tokens(bare.TEXT_B)), 4, logprobs=0, logprob_token_ids=(1, 2)
    )
    with pytest.raises(InvalidRequestError, match=r"logprob_token_ids .* first model runner"):
        await admitted(shared, named)


async def test_penalties_of_rows_do_not_see_what_another_client_said(
    shared: GenerateEngine, directory: Path, unguarded: Alone
) -> None:
    assert unguarded.told["after a"] != unguarded.told["after b"]
    for prompt in (Prompt.of(noise(shared)), Prompt.of(Tokens(bare.TEXT_A), noise(shared))):
        expected = penalised(directory, prompt, 5.0, 6)
        for before in (bare.TEXT_A, bare.TEXT_B):
            await run(shared, make_request("before", Prompt.of(Tokens(before))))
            (found,) = await run(shared, make_request("rows", prompt, 6, repetition_penalty=5.0))
            assert found.output == expected


async def test_presence_and_frequency_penalties_with_rows_see_the_output_alone(
    shared: GenerateEngine, directory: Path
) -> None:
    prompt = Prompt.of(noise(shared))
    requests = [
        make_request(name, prompt, 12, presence_penalty=presence, frequency_penalty=frequency)
        for name, presence, frequency in (("both", 2.0, 2.0), ("none", 0.0, 0.0))
    ]
    both, none = await run(shared, *requests)
    assert none.output == reference.greedy(directory, prompt, 12)
    assert len(set(both.output)) == 12


async def test_rows_that_are_not_numbers_end_their_own_request_and_touch_no_other(
    shared: GenerateEngine, directory: Path, unguarded: Alone
) -> None:
    assert unguarded.told["after"] == [[0] * 6] * 3 != [unguarded.told["before"]] * 3
    beside = make_request("beside", Prompt.of(Tokens(ids(3, 20))), max_tokens=200)
    under_way = Receiver(beside)
    shared.submit(beside, under_way)
    for number in range(3):
        poison = Prompt.of(filled(shared, 480, float("nan")))
        (poisoned,) = await run(shared, make_request(f"poison-{number}", poison))
        assert poisoned.output == []
        assert poisoned.last.error is not None
        assert isinstance(poisoned.last.error.to_error(), EngineError)
        assert "not finite" in poisoned.last.error.message
    text = Prompt.of(Tokens(bare.TEXT_A[:5]))
    for number in range(24):
        (found,) = await run(shared, make_request(f"after-{number}", text, 6, salt=str(number)))
        assert found.output == unguarded.told["before"] == reference.greedy(directory, text, 6)
    await under_way.ended()
    assert under_way.output == reference.greedy(directory, beside.prompt, 200)


async def none_left(engine: Any) -> None:
    """Return once vLLM knows of no request."""
    async with asyncio.timeout(60):
        while engine._running.llm.output_processor.request_states:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_request_whose_output_cannot_be_handed_on_is_not_left_in_vllm(
    shared: GenerateEngine, directory: Path
) -> None:
    asked = make_request("lost", Prompt.of(Tokens(ids(3, 20))), max_tokens=400)
    last: list[Output] = []

    def emit(output: Output) -> None:
        if output.finish_reason is None:
            raise RuntimeError("nobody takes it")
        last.append(output)

    shared.submit(asked, emit)
    async with asyncio.timeout(60):
        while not last:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await none_left(shared)
    (ended,) = last
    assert ended.finish_reason == "error"
    (found,) = await run(shared, make_request("lives", asked.prompt))
    assert found.output == reference.greedy(directory, asked.prompt, 8)


async def test_nan_that_is_seen_in_logprobs_alone_is_cleaned_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay.engine.vllm.loading import LoadedVllm

    # As where vLLM's own count misses them.
    monkeypatch.setattr(LoadedVllm, "watch_logits", lambda loaded, corrupted: None)
    async with started(EngineSettings.of(model=str(directory), **FLAGS)) as engine:
        for number in range(2):
            poison = Prompt.of(filled(engine, 480, float("nan")))
            (poisoned,) = await run(
                engine, make_request(f"poison-{number}", poison, 30, logprobs=1)
            )
            assert poisoned.output == []
            assert poisoned.last.error is not None
            assert "not finite" in poisoned.last.error.message
            await none_left(engine)
        text = Prompt.of(Tokens(bare.TEXT_A[:5]))
        for number in range(12):
            (found,) = await run(engine, make_request(f"after-{number}", text, 6, salt=str(number)))
            assert found.output == reference.greedy(directory, text, 6)


DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def drafting(directory: Path) -> AsyncIterator[GenerateEngine]:
    """VLLM that verifies drafts, and gives a block that is free to the next request at once."""
    words = [*FLAGS["engine_arguments"], "--speculative-config", json.dumps(DRAFTS)]
    more = FLAGS | {"engine_arguments": words, "enable_prefix_caching": False}
    async with started(EngineSettings.of(model=str(directory), **more)) as engine:
        yield engine


async def test_nan_ends_its_own_request_where_others_have_drafts_verified(
    drafting: GenerateEngine, directory: Path
) -> None:
    # What repeats itself is drafted from the first.
    requests = [
        make_request(f"beside-{n}", Prompt.of(Tokens([5 + n, 6, 7] * 20)), max_tokens=400)
        for n in range(3)
    ]
    beside = [Receiver(each) for each in requests]
    for each, receiver in zip(requests, beside, strict=True):
        drafting.submit(each, receiver)
    for receiver in beside:
        await receiver.begun()
    for number in range(4):
        poison = Prompt.of(filled(drafting, 400, float("nan")))
        (poisoned,) = await run(drafting, make_request(f"poison-{number}", poison))
        assert poisoned.output == []
        assert poisoned.last.error is not None
        assert "not finite" in poisoned.last.error.message
    for each, receiver in zip(requests, beside, strict=True):
        drafting.abort(each.id)
        assert (await receiver.ended()).error is None
        assert (
            receiver.output == reference.greedy(directory, each.prompt, 400)[: len(receiver.output)]
        )


async def test_who_gets_the_memory_of_nan_in_the_next_step_is_not_harmed(
    drafting: GenerateEngine, directory: Path
) -> None:
    prompts = [Prompt.of(Tokens([5 + n, 6, 7] * 3)) for n in range(4)]
    expected = [reference.greedy(directory, prompt, 12) for prompt in prompts]
    poison = Prompt.of(filled(drafting, 40, float("nan")))
    for turn in range(12):
        # They end with the step that makes their first token, and others wait for their blocks.
        poisoned = [make_request(f"poison-{turn}-{n}", poison, max_tokens=1) for n in range(8)]
        texts = [make_request(f"text-{turn}-{n}", prompt, 12) for n, prompt in enumerate(prompts)]
        found = await run(drafting, *poisoned, *texts)
        assert all(each.last.error is not None for each in found[: len(poisoned)])
        assert [each.output for each in found[len(poisoned) :]] == expected


async def test_prompt_logprobs_of_rows_are_refused_and_the_engine_lives(
    shared: GenerateEngine, directory: Path, unguarded: Alone
) -> None:
    assert unguarded.died
    assert "answer" not in unguarded.told
    assert "out of bounds" in unguarded.output
    prompt = Prompt.of(Tokens(bare.TEXT_A), noise(shared))
    with pytest.raises(InvalidRequestError, match="rows have no token ids"):
        shared.submit(
            make_request("asked", prompt, prompt_logprobs=1),
            Receiver(make_request("asked", prompt)),
        )
    (found,) = await run(shared, make_request("lives", Prompt.of(Tokens(bare.TEXT_A))))
    assert found.output == reference.greedy(directory, Prompt.of(Tokens(bare.TEXT_A)), 8)


async def test_ids_the_model_does_not_have_are_refused_beside_rows_too(
    shared: GenerateEngine, unguarded_half: Alone
) -> None:
    assert unguarded_half.died
    assert "alive" in unguarded_half.told
    assert "unknown" not in unguarded_half.told
    for id_ in (shared.card.vocab_size, 10**6, -1):
        prompt = Prompt.of(Tokens([5, id_]), noise(shared))
        with pytest.raises(InvalidRequestError, match=f"token id {id_} is not in the vocabulary"):
            shared.submit(make_request("asked", prompt), Receiver(make_request("asked", prompt)))
    await run(shared, make_request("lives", Prompt.of(Tokens([5]))))


ASKED: dict[Feature, dict[str, Any]] = {
    "temperature_above_2": {"temperature": 2.5},
    "prior_output_with_grammar": {"grammar": Grammar("json_object"), "prior_output": (5,)},
    "prior_output_with_penalties": {"presence_penalty": 1.0, "prior_output": (5,)},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "logprob_token_ids": {"logprobs": 1, "logprob_token_ids": (5,)},
    "thinking_token_budget": {"thinking": ThinkingBudget(4, (5,), (6,))},
}


async def test_the_engine_holds_every_request_against_the_table_its_card_shows(
    shared: GenerateEngine,
) -> None:
    assert {refusal.feature for refusal in shared.card.refusals} == set(ASKED)
    for refusal in shared.card.refusals:
        rows = Prompt.of(noise(shared)) if refusal.prompts == "rows" else Prompt.of(Tokens([5]))
        asked = make_request("asked", rows, **ASKED[refusal.feature])
        with pytest.raises(InvalidRequestError) as raised:
            shared.submit(asked, Receiver(asked))
        if refusal.feature != "prompt_logprobs":  # which no engine does
            assert refusal.reason in raised.value.message
            assert f"vllm {shared.card.engine_version}" in raised.value.message


async def test_grammars_hold_the_output_of_rows_and_text_and_a_bad_one_is_refused_alone(
    shared: GenerateEngine,
) -> None:
    choice = Grammar("choice", json.dumps(["lantern", "harbour"]))
    for prompt in (Prompt.of(Tokens(ids(3, 9))), Prompt.of(noise(shared), Tokens(ids(3, 9)))):
        (found,) = await run(
            shared, make_request("held", prompt, 12, grammar=choice, ignore_eos=False)
        )
        assert found.last.finish_reason == "stop"
        assert len(found.output) > 1
    bad = (
        Grammar("regex", "(unclosed"),
        Grammar("regex", "(a{1000}){1000}"),
        Grammar("json_schema", "{"),
        Grammar("grammar", "this is no grammar"),
    )
    for grammar in bad:
        asked = make_request("bad", Prompt.of(Tokens([5])), grammar=grammar)
        with pytest.raises(InvalidRequestError):
            await admitted(shared, asked)
    await run(shared, make_request("lives", Prompt.of(Tokens([5]))))


@pytest.fixture(scope="module")
def lora(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapters.make_lora(tmp_path_factory.mktemp("lora"), directory)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapting(directory: Path, lora: Path) -> AsyncIterator[GenerateEngine]:
    more: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    async with started(EngineSettings.of(model=str(directory), **FLAGS, **more)) as engine:
        assert isinstance(engine, AdapterEngine)
        adapter = Adapter(name="a", content_id="0" * 32, path=str(lora), rank=4)
        await engine.load_adapter(adapter, str(lora))
        yield engine


async def test_rows_and_adapters_go_together_in_one_batch(
    adapting: GenerateEngine, directory: Path, lora: Path
) -> None:
    unguarded = alone("adapters", directory, "float32", lora)
    assert unguarded.died
    assert "alive" in unguarded.told
    assert "answer" not in unguarded.told
    prompts = [Prompt.of(Tokens(bare.TEXT_A[: 3 + n]), noise(adapting, 9)) for n in range(6)]
    prompts += [Prompt.of(Tokens(bare.TEXT_A[: 5 + n])) for n in range(6)]
    requests = [
        make_request(f"{name}-{n}", prompt, adapter=name)
        for n, prompt in enumerate(prompts)
        for name in ("a", None)
    ]
    for one, found in zip(requests, await run(adapting, *requests), strict=True):
        if one.adapter is None:
            assert found.output == reference.greedy(directory, one.prompt, 8)
        else:
            assert found.output == adapters.greedy(directory, lora, one.prompt, 8)


async def test_an_adapter_that_does_not_fit_is_refused_and_one_that_was_unloaded_is_gone(
    adapting: GenerateEngine, directory: Path, lora: Path, tmp_path: Path
) -> None:
    assert isinstance(adapting, AdapterEngine)
    large = adapters.make_lora(tmp_path / "large", directory, rank=16)
    with pytest.raises(InvalidRequestError, match="rank is 16; --max-lora-rank is 8"):
        await adapting.load_adapter(
            Adapter(name="l", content_id="1" * 32, path="", rank=16), str(large)
        )
    with pytest.raises(InvalidRequestError, match="vLLM does not take the adapter"):
        await adapting.load_adapter(
            Adapter(name="n", content_id="2" * 32, path="", rank=4), str(tmp_path)
        )
    await adapting.load_adapter(Adapter(name="b", content_id="3" * 32, path="", rank=4), str(lora))
    prompt = Prompt.of(Tokens(bare.TEXT_A))
    (found,) = await run(adapting, make_request("b", prompt, adapter="b"))
    assert found.output == adapters.greedy(directory, lora, prompt, 8)
    await adapting.unload_adapter("b")
    with pytest.raises(Exception, match="does not exist"):
        adapting.submit(make_request("b", prompt, adapter="b"), Receiver(make_request("b", prompt)))


async def test_finite_rows_that_a_float16_model_cannot_add_up_are_bounded_and_harm_nobody(
    unguarded_half: Alone,
) -> None:
    directory = loud_model()
    assert unguarded_half.told["answer"] == [0]
    assert math.isnan(unguarded_half.told["logprob"])
    half: dict[str, Any] = {"dtype": "float16"}
    async with started(EngineSettings.of(model=str(directory), **FLAGS, **half)) as engine:
        bound = engine.card.limits.max_prompt_embeds_abs
        assert bound is not None
        assert bound <= 1024
        text = Prompt.of(Tokens(bare.TEXT_A[:5]))
        (before,) = await run(engine, make_request("before", text, 6))
        # The frontend refuses such rows by the card's bound; an operator may have raised it.
        (poisoned,) = await run(
            engine, make_request("poison", Prompt.of(filled(engine, 480, 65504, "float16")))
        )
        assert poisoned.last.error is not None
        for number in range(24):
            (found,) = await run(engine, make_request(f"after-{number}", text, 6, salt=str(number)))
            assert found.output == before.output
        (bounded,) = await run(
            engine, make_request("bounded", Prompt.of(filled(engine, 480, bound, "float16")))
        )
        assert bounded.last.error is None


async def test_files_that_are_small_and_tensors_that_are_large_are_refused_unread() -> None:
    hidden, count, parts = 96, 100_000, 8
    unguarded = alone("containers", hidden, count, parts)
    for name, container in bare.containers(hidden, count).items():
        sent, taken = unguarded.told[name]
        assert sent < 20_000
        # With more rows in the header it is 8 GiB.
        assert taken > 0.9 * 4 * parts * count * hidden
        with pytest.raises(EmbeddingsError, match=r"sparse|stride"):
            read(container)


async def test_what_drafts_by_a_layer_of_the_model_ends_with_ids_that_no_token_has() -> None:
    unguarded = alone("drafts", plain_r1(), "float32")
    assert unguarded.died
    assert "alive" in unguarded.told
    assert "answer" not in unguarded.told
    # That the same through inlay is exact: `test_deepseek.py`.
