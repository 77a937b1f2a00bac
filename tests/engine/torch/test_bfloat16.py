"""Outputs in bfloat16 over hundreds of tokens, against the same prompt alone.

Numbers of 16 bits depend on what is computed together. So an output may part from the one that it
would have been alone, but only where the two most likely tokens were nearly equally likely there:
within `NEAR` of each other's logits.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inlay import demo
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.loading import card_of
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.messages.card import Exactness
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Output, Request, Sampling, TokenLogprobs
from inlay.render import Renderer

NEAR = 0.25
"""Logits: four steps of bfloat16 from 8 to 16, where the largest of this model's are."""

LENGTH, CUT = 250, 130
SETTINGS = EngineSettings.of(
    model=str(demo.model_dir()), device="cpu", num_threads=1, batch_invariant=False
)

Continuation = tuple[list[int], list[TokenLogprobs]]


@cache
def model() -> CausalModel:
    return CausalModel.load(SETTINGS)


@cache
def prompts() -> list[list[int]]:
    renderer = Renderer.load(demo.model_dir())
    examples = demo.examples().completions
    return [list(renderer.encode(each.prompt, add_special_tokens=False)) for each in examples]


def core(**changes: int) -> Core:
    values: dict[str, Any] = {
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "page_size": 16,
        "num_pages": 400,
    }
    return Core(model(), EngineLimits(**(values | changes)), Secret(bytes(32)))


def make_request(
    name: str,
    prompt: Prompt,
    max_tokens: int = LENGTH,
    prior: Sequence[int] = (),
    client: str | None = None,
) -> Request:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    return Request(
        id=name, prompts=(prompt,), params=sampling, prior_output=tuple(prior), client=client
    )


def outputs(engine: Core, *requests: Request) -> dict[str, Continuation]:
    """Tokens and logprobs of requests, which came without a gap and without a repetition."""
    found: dict[str, Continuation] = {one.id: ([], []) for one in requests}
    outputs: list[Output] = []
    for one in requests:
        outputs += engine.admit(one)
    while len(engine):
        outputs += engine.step()
    prior = {one.id: len(one.prior_output) for one in requests}
    for output in outputs:
        ids, logprobs = found[output.request_id]
        assert output.offset == prior[output.request_id] + len(ids)
        ids += output.token_ids
        logprobs += output.logprobs
    for one in requests:
        assert len(found[one.id][0]) == one.sampling.max_tokens - prior[one.id]
    return found


@cache
def alone(number: int) -> Continuation:
    """The output of a prompt that nothing was computed beside."""
    return outputs(core(), make_request("alone", Prompt.of(Tokens(prompts()[number]))))["alone"]


def check(number: int, output: Sequence[int], start: int = 0) -> None:
    """Hold an output from index `start` on against the one alone."""
    ids, logprobs = alone(number)
    for index, (expected, got) in enumerate(zip(ids[start:], output, strict=True), start):
        if expected != got:
            (first, best), (second, next_best) = logprobs[index].top
            assert {expected, got} == {first, second}
            assert best - next_best < NEAR, f"token {index} of prompt {number}"
            return


NUMBERS = (0, 5)
"""Prompts whose outputs a batch of these does change."""


def test_without_batch_invariance_the_card_says_that_sixteen_bits_are_rounded() -> None:
    card = card_of(SETTINGS, core(), Secret(bytes(32)))
    assert card.dtype == "bfloat16"
    assert set(card.resuming.values()) == {Exactness.ROUNDED}


def test_embeddings_of_the_table_are_the_text_itself() -> None:
    (weights,) = demo.model_dir().glob("*.safetensors")
    table = load_file(weights)["model.embed_tokens.weight"]
    for number in NUMBERS:
        ids = prompts()[number]
        data = table[ids].view(torch.int16).numpy().tobytes()
        rows = Rows(Buffer(data), "bfloat16", (len(ids), model().hidden_size))
        found = outputs(core(), make_request("rows", Prompt.of(rows)))["rows"]
        assert found[0] == alone(number)[0]


def test_a_batch_changes_an_output_only_where_two_tokens_are_nearly_equally_likely() -> None:
    requests = [
        make_request(str(number), Prompt.of(Tokens(ids))) for number, ids in enumerate(prompts())
    ]
    requests += [
        make_request(f"{number} more", Prompt.of(Tokens(ids * 2)), 100)
        for number, ids in enumerate(prompts())
    ]
    found = outputs(core(), *requests)
    for number in NUMBERS:
        check(number, found[str(number)][0])


@pytest.mark.parametrize("as_prompt", [False, True], ids=["prior output", "prompt"])
def test_an_output_that_is_cut_goes_on_as_it_was_but_for_rounding(as_prompt: bool) -> None:
    requests = []
    for number in NUMBERS:
        prior = alone(number)[0][:CUT]
        if as_prompt:
            prompt = Prompt.of(Tokens([*prompts()[number], *prior]))
            requests.append(make_request(str(number), prompt, LENGTH - CUT))
        else:
            requests.append(
                make_request(str(number), Prompt.of(Tokens(prompts()[number])), LENGTH, prior)
            )
    for number, one in zip(NUMBERS, requests, strict=True):
        check(number, outputs(core(), one)[one.id][0], CUT)


def test_an_output_that_yields_to_another_client_goes_on_as_it_was_but_for_rounding() -> None:
    engine = core(max_num_seqs=2)
    for number in NUMBERS:
        prompt = Prompt.of(Tokens(prompts()[number]))
        assert engine.admit(make_request(str(number), prompt, client="greedy")) == []
    found: dict[str, list[int]] = {str(number): [] for number in NUMBERS}
    for step in range(3 * LENGTH):
        if step in (60, 120):
            new = make_request(f"new {step}", Prompt.of(Tokens(prompts()[4])), 20, client="new")
            assert engine.admit(new) == []
        for engine_output in engine.step():
            output = found.setdefault(engine_output.request_id, [])
            assert engine_output.offset == len(output)
            output += engine_output.token_ids
        if not len(engine):
            break
    assert engine.stats().preemptions == 2
    for number in NUMBERS:
        check(number, found[str(number)])
