"""Outputs in bfloat16 that are the same, bit by bit, whatever is computed beside them.

Tokens and logprobs of the bundled model: alone, in a batch, in chunks, cut and resumed, preempted,
over pages of another engine. Logprobs are compared as the numbers they are.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from inlay import demo
from inlay.base.errors import InvalidRequestError
from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.loading import card_of
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.native import kernels
from inlay.engine.torch.sampling.sampler import Sampler
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.speculation.draft_head import HeadDrafter
from inlay.engine.torch.speculation.eagle import load_eagle
from inlay.engine.torch.speculation.ngram import NgramDrafter
from inlay.engine.torch.step import Core
from inlay.engine.torch.weights.linear import RotaryTable
from inlay.messages.card import Exactness
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import PromptLogprobs, Request, Sampling, TokenLogprobs
from tests.draft_heads import write_eagle
from tests.engine import conformance
from tests.engine.conformance import run
from tests.engine.torch.sequences import sequence_of
from tests.engine.torch.test_bfloat16 import SETTINGS, prompts
from tests.engine.torch.test_page_exchange import FROM_PEER, PEER, pair
from tests.models import tiny

INVARIANT = SETTINGS.replace(batch_invariant=True)
LENGTH, CUT = 160, 90
NUMBERS = (0, 5)

_native = kernels()
pytestmark = pytest.mark.skipif(
    _native is None or not _native.products.pairs,
    reason="no products of pairs of bfloat16 here",
)

Result = tuple[list[int], list[TokenLogprobs], list[PromptLogprobs]]


@cache
def model() -> CausalModel:
    return CausalModel.load(INVARIANT)


def core(*, speculator: Speculator | None = None, **changes: int) -> Core:
    values: dict[str, Any] = {
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "page_size": 32,
        "num_pages": 400,
    }
    bounds = EngineLimits(**(values | changes))
    return Core(model(), bounds, Secret(bytes(32)), speculator=speculator)


def make_request(name: str, prompt: Sequence[int], length: int = LENGTH, **options: Any) -> Request:
    found = Prompt.of(Tokens(list(prompt)))
    return conformance.make_request(name, found, length, **({"logprobs": 3} | options))


def outputs(
    engine: Core, *requests: Request, later: dict[int, Request] | None = None
) -> dict[str, Result]:
    """Tokens, their logprobs and prompts' of requests; those of `later` come at a step."""
    found: dict[str, Result] = {}
    for one in requests:
        assert engine.admit(one) == []
    steps = 0
    while len(engine):
        if later and steps in later:
            assert engine.admit(later[steps]) == []
        for output in engine.step():
            ids, logprobs, scores = found.setdefault(output.request_id, ([], [], []))
            ids += output.token_ids
            logprobs += output.logprobs
            scores += [] if output.prompt_logprobs is None else [output.prompt_logprobs]
        steps += 1
    return found


SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
OPTIONS = pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])


@cache
def alone(number: int, length: int = LENGTH, sampled: bool = False) -> Result:
    """The output of a prompt beside which nothing is computed."""
    asked = make_request("alone", prompts()[number], length, **(SAMPLED if sampled else {}))
    found: Result = outputs(core(max_num_batched_tokens=2048), asked)["alone"]
    assert len(found[0]) == len(found[1]) == length
    return found


def everyone(length: int, **options: Any) -> list[Request]:
    """Requests of all prompts, and of all of them twice as long."""
    requests = [
        make_request(str(number), ids, length, **options) for number, ids in enumerate(prompts())
    ]
    return requests + [
        make_request(f"{number} more", ids * 2, length // 2) for number, ids in enumerate(prompts())
    ]


@OPTIONS
@pytest.mark.parametrize(
    "budget", [33, *(pytest.param(most, marks=pytest.mark.slow) for most in (128, 2048))]
)
def test_a_batch_and_chunks_change_no_bit(budget: int, options: dict[str, Any]) -> None:
    engine = core(max_num_batched_tokens=budget)
    found = outputs(engine, *everyone(LENGTH, **options))
    for number in NUMBERS:
        assert found[str(number)] == alone(number, sampled=bool(options))


@OPTIONS
def test_an_output_that_is_cut_goes_on_as_if_it_had_not_been(options: dict[str, Any]) -> None:
    for number in NUMBERS:
        ids, logprobs, _ = alone(number, sampled=bool(options))
        rest = make_request("rest", prompts()[number], prior_output=tuple(ids[:CUT]), **options)
        beside = make_request("beside", prompts()[3] * 3, 100)
        found = outputs(core(max_num_batched_tokens=48), rest, beside)["rest"]
        assert found[:2] == (ids[CUT:], logprobs[CUT:])


@pytest.mark.thorough
def test_an_output_as_a_prompt_goes_on_as_if_it_had_not_been_cut() -> None:
    for number in NUMBERS:
        ids, logprobs, _ = alone(number)
        prompt = [*prompts()[number], *ids[:CUT]]
        found = outputs(core(), make_request("rest", prompt, LENGTH - CUT))["rest"]
        assert found[:2] == (ids[CUT:], logprobs[CUT:])


def test_logprobs_of_a_prompt_are_those_of_the_output_that_it_was() -> None:
    ids, logprobs, _ = alone(0)
    start = len(prompts()[0])
    asked = make_request("scored", [*prompts()[0], *ids], 1, prompt_logprobs=0)
    other = make_request("other", prompts()[4], 200, prompt_logprobs=2)
    pieces = outputs(core(max_num_batched_tokens=70), asked, other)["scored"][2]
    scored = torch.cat(
        [torch.frombuffer(bytearray(piece.logprobs), dtype=torch.float32) for piece in pieces]
    )
    expected = torch.tensor([one.logprob for one in logprobs])
    assert torch.equal(scored[start - 1 :][: len(expected)], expected)


def test_an_output_that_yields_to_another_client_goes_on_as_if_it_had_not() -> None:
    engine = core(max_num_seqs=2)
    new = {step: make_request(f"new {step}", prompts()[4], 20, client="new") for step in (60, 120)}
    greedy = [make_request(str(number), prompts()[number], client="greedy") for number in NUMBERS]
    found = outputs(engine, *greedy, later=new)
    assert engine.stats().preemptions == 2
    for number in NUMBERS:
        assert found[str(number)] == alone(number)


@OPTIONS
@pytest.mark.usefixtures("even_steps")
def test_guesses_that_are_verified_change_no_bit(options: dict[str, Any]) -> None:
    speculator = Speculator(NgramDrafter(SpeculativeConfig(method="ngram")), 7)
    engine = core(speculator=speculator)
    found = outputs(engine, make_request("guessed", prompts()[0], **options))["guessed"]
    assert engine.stats().num_accepted_tokens
    assert found == alone(0, sampled=bool(options))


@pytest.mark.usefixtures("even_steps")
def test_guesses_of_a_head_that_are_verified_change_no_bit(tmp_path: Path) -> None:
    said = sorted({*alone(0)[0]})
    head = write_eagle(tmp_path, demo.model_dir(), layers=(1, 2, 3), tokens=said)
    drafter = HeadDrafter(load_eagle(head, model()), model(), 400, 32)
    engine = core(speculator=Speculator(drafter, 5, drafter))
    assert outputs(engine, make_request("guessed", prompts()[0]))["guessed"] == alone(0)
    assert engine.stats().num_draft_tokens


@pytest.mark.parametrize(
    ("length", "cut"), [(LENGTH, CUT), pytest.param(2000, 1300, marks=pytest.mark.slow)]
)
async def test_pages_of_another_engine_change_no_bit(length: int, cut: int) -> None:
    ids, logprobs, _ = alone(0, length)
    changes = {"batch_invariant": True, "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
    async with pair(demo.model_dir(), **changes) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        whole = make_request("whole", prompts()[0], length)
        (receiver,) = await run(giving, whole)
        assert receiver.output == ids
        rest = replace(whole, id="rest", prior_output=tuple(ids[:cut]), sources=FROM_PEER)
        (receiver,) = await run(asking, rest)
        assert asking.stats().kv_pages_fetched == (len(prompts()[0]) + cut - 1) // 32
        assert receiver.output == ids[cut:]
        assert [one for output in receiver.deltas for one in output.logprobs] == logprobs[cut:]


@pytest.mark.slow
def test_two_thousand_tokens_are_the_same_alone_in_a_batch_resumed_and_preempted() -> None:
    length = 2048 - max(map(len, prompts()))
    engine = core(max_num_batched_tokens=64, max_num_seqs=6)
    new = {
        step: make_request(f"new {step}", prompts()[4] * 4, 90, client="new")
        for step in (300, 900, 1500)
    }
    requests = [
        make_request(str(number), ids, length, client="greedy")
        for number, ids in enumerate(prompts())
    ]
    found = outputs(engine, *requests, later=new)
    assert engine.stats().preemptions
    rests = {}
    for number in NUMBERS:
        ids, logprobs, _ = alone(number, length)
        assert found[str(number)][:2] == (ids, logprobs)
        for cut in (640, 1500):
            rests[f"{number} from {cut}"] = (
                make_request(
                    f"{number} from {cut}", prompts()[number], length, prior_output=tuple(ids[:cut])
                ),
                (ids[cut:], logprobs[cut:]),
            )
    again = outputs(core(max_num_batched_tokens=300), *(rest for rest, _ in rests.values()))
    for name, (_, expected) in rests.items():
        assert again[name][:2] == expected


def test_the_card_says_that_resuming_is_exact() -> None:
    card = card_of(INVARIANT, core(), Secret(bytes(32)))
    assert (card.dtype, set(card.resuming.values())) == ("bfloat16", {Exactness.EXACT})


@pytest.mark.parametrize(
    ("family", "dtype", "reason"),
    [
        ("llama", "float32", "products in float32 are oneDNN's"),
        ("gemma2", "bfloat16", "this is Gemma2ForCausalLM"),
        ("qwen3_moe", "bfloat16", "this is Qwen3MoeForCausalLM"),
    ],
)
def test_what_cannot_be_invariant_is_refused_with_the_reason(
    family: str, dtype: str, reason: str
) -> None:
    settings = INVARIANT.replace(model=str(tiny(family, dtype)))
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        CausalModel.load(settings)
    assert caught.value.param == "batch_invariant"
    unset = settings.replace(batch_invariant=None)
    assert not CausalModel.load(unset).batch_invariant


def test_angles_of_a_position_are_the_same_in_any_batch() -> None:
    rotary = model()._model.base_model.rotary_emb
    assert isinstance(rotary, RotaryTable)
    x = torch.zeros(1, 1, 4).bfloat16()
    positions = torch.arange(2048)
    cosine, sine = rotary(x, positions[None])
    own, _ = rotary._rotary(x, positions[None])
    torch.testing.assert_close(cosine, own, atol=0, rtol=1e-2)
    for some in ([5], [2047, 3, 1024], list(range(100, 777))):
        found = rotary(x, torch.tensor([some]))
        assert torch.equal(found[0], cosine[:, some])
        assert torch.equal(found[1], sine[:, some])


def test_draws_and_logprobs_of_a_row_do_not_depend_on_other_rows() -> None:
    """Of float32 logits, by several threads too."""
    rows, size = 37, 3001
    logits = 4 * torch.randn(rows, size, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    try:
        for options in ({}, SAMPLED, {"temperature": 1.3, "seed": 4}, {**SAMPLED, "min_p": 0.01}):
            values = {"max_tokens": 100, "temperature": 0.0, "logprobs": 3} | options
            sampling = Sampling(**values)
            sequences = [sequence_of(sampling, (1, 2), range(number)) for number in range(rows)]
            sampler = Sampler(size, (0,), torch.device("cpu"))
            torch.set_num_threads(3)
            whole = sampler.sample(logits, sequences)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                for start, stop in ((0, 1), (5, 6), (7, 12), (36, 37)):
                    part = sampler.sample(logits[start:stop], sequences[start:stop])
                    assert part == whole[start:stop]
    finally:
        torch.set_num_threads(before)
