"""Prompt logprobs equal those of plain transformers, however the prompt was computed."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from inlay.base.errors import EngineError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import prompt_logprobs
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request
from tests.engine import reference
from tests.engine.torch.test_step import SECRET, Outcome, core, ids, make_request, noise, run
from tests.equality.reference import model_of
from tests.models import FAMILIES, tiny

pytestmark = pytest.mark.usefixtures("overlap")

TOP = 3
TOLERANCE = 1e-4
RECURRENT_TOLERANCE = 3e-4
"""Of models with recurrent layers, which carry rounding on from each position to all later ones."""


class Told(NamedTuple):
    """All logprobs of a prompt, position 1 first; shapes [N, 1 + K], [N, 1 + K], [N]."""

    ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


def told(outcome: Outcome) -> Told:
    """Prompt logprobs of an output.

    Each position once, in order, before the first id of the output.
    """
    pieces = [
        delta.prompt_logprobs for delta in outcome.deltas if delta.prompt_logprobs is not None
    ]
    position, output = 1, False
    for delta in outcome.deltas:
        if delta.prompt_logprobs is not None:
            assert not output
            assert delta.prompt_logprobs.start == position
            position += len(delta.prompt_logprobs)
        output = output or bool(delta.token_ids)
    shape = (position - 1, -1 if pieces else 0)
    return Told(
        np.frombuffer(b"".join(piece.ids for piece in pieces), np.int32).reshape(shape),
        np.frombuffer(b"".join(piece.logprobs for piece in pieces), np.float32).reshape(shape),
        np.frombuffer(b"".join(piece.ranks for piece in pieces), np.int32),
    )


def truth(family: str, tokens: Sequence[int]) -> Tensor:
    """float32 [positions - 1, V]: what transformers says of each position but the first."""
    with torch.no_grad():
        logits: Tensor = model_of(tiny(family))(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(dim=-1)


def assert_right(found: Told, family: str, tokens: Sequence[int], top: int = TOP) -> None:
    expected = truth(family, tokens)
    bound = RECURRENT_TOLERANCE if family.startswith(("qwen3_next", "qwen3_5")) else TOLERANCE
    assert found.ids.shape == (len(tokens) - 1, 1 + top)
    assert found.ids[:, 0].tolist() == list(tokens[1:])
    by_id = expected.gather(1, torch.tensor(found.ids, dtype=torch.int64)).numpy()
    assert np.abs(found.logprobs - by_id).max() < bound
    if top:
        best = expected.topk(top, dim=-1)
        assert np.abs(found.logprobs[:, 1:] - best.values.numpy()).max() < bound
    own = expected.gather(1, torch.tensor(tokens[1:])[:, None])
    # Two logits that differ by less than rounding may be ranked either way.
    fewest = (expected > own + bound).sum(dim=-1).numpy() + 1
    most = (expected > own - bound).sum(dim=-1).numpy()
    assert (fewest <= found.ranks).all()
    assert (found.ranks <= most).all()


def scored(
    name: str, tokens: Sequence[int], max_tokens: int = 2, *, top: int = TOP, salt: str = ""
) -> Request:
    return make_request(name, Prompt.of(Tokens(tokens)), max_tokens, prompt_logprobs=top, salt=salt)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_position_is_scored_as_transformers_scores_it(family: str) -> None:
    model = CausalModel.load(
        EngineSettings.of(model=str(tiny(family)), device="cpu", num_threads=1)
    )
    bounds = EngineLimits(
        max_model_len=512, max_num_seqs=8, max_num_batched_tokens=33, page_size=16, num_pages=64
    )
    engine = Core(model, bounds, SECRET)
    tokens = ids(1, 70)
    found = run(engine, scored("one", tokens))["one"]
    assert_right(told(found), family, tokens)
    assert found.output == reference.greedy(tiny(family), Prompt.of(Tokens(tokens)), 2)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("budget", [128, 32, 5])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_neither_chunks_of_the_prompt_nor_of_its_logits_change_anything(
    budget: int, rows: int, prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = core(max_num_batched_tokens=budget, prefix_caching=prefix_caching)
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS", rows * engine.model.vocab_size)
    most = 0
    head = engine.model.logits

    def counted(hidden: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(hidden))
        return head(hidden)

    # The model is shared by all tests, so what is set on it must be taken back.
    monkeypatch.setattr(engine.model, "logits", counted)
    tokens = ids(1, 90)
    assert_right(told(run(engine, scored("one", tokens))["one"]), "llama", tokens)
    assert most <= min(rows, budget)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 33])
def test_prompts_that_end_at_a_page_or_near_one_are_scored_whole(length: int) -> None:
    engine = core()
    tokens = ids(2, length)
    for name in ("first", "again"):
        found = told(run(engine, scored(name, tokens))[name])
        if length == 1:
            assert len(found.ranks) == 0
        else:
            assert_right(found, "llama", tokens)


def test_without_alternatives_only_the_prompts_own_tokens_are_told() -> None:
    tokens = ids(3, 20)
    assert_right(told(run(core(), scored("one", tokens, top=0))["one"]), "llama", tokens, top=0)


def test_more_alternatives_than_there_are_tokens_are_all_of_them() -> None:
    tokens = ids(3, 8)
    engine = core()
    found = told(run(engine, scored("one", tokens, top=10**6))["one"])
    assert_right(found, "llama", tokens, top=engine.model.vocab_size)


def test_a_cached_prompt_is_scored_all_the_same_and_is_cached_by_being_scored() -> None:
    engine = core()
    tokens = ids(4, 70)
    plain = make_request("plain", Prompt.of(Tokens(tokens)), 2)
    run(engine, plain)
    found = run(engine, scored("scored", tokens))["scored"]
    assert_right(told(found), "llama", tokens)
    assert found.cached == 0
    assert run(engine, plain)["plain"].cached == 64
    run(engine, scored("first", tokens, salt="other"))
    assert (
        run(engine, make_request("then", Prompt.of(Tokens(tokens)), 2, salt="other"))["then"].cached
        == 64
    )


def test_two_that_score_the_same_prompt_at_once_both_score_all_of_it() -> None:
    engine = core(max_num_batched_tokens=32)
    tokens = ids(5, 70)
    requests = [
        scored("a", tokens),
        make_request("plain", Prompt.of(Tokens(tokens)), 2),
        scored("b", tokens),
    ]
    found = run(engine, *requests)
    assert_right(told(found["a"]), "llama", tokens)
    assert_right(told(found["b"]), "llama", tokens)
    assert len({tuple(outcome.output) for outcome in found.values()}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_neighbours_of_all_kinds_and_preemption_change_no_score(seed: int) -> None:
    dice = random.Random(seed)
    engine = core(
        num_pages=9,
        max_model_len=140,
        max_num_seqs=dice.choice([3, 8]),
        max_num_batched_tokens=dice.choice([20, 100]),
    )
    prompts = {f"scored-{n}": ids(n, dice.randrange(2, 70)) for n in range(5)}
    requests = [scored(name, tokens, 60) for name, tokens in prompts.items()]
    requests += [
        make_request("text", Prompt.of(Tokens(prompts["scored-1"])), 60),
        make_request("rows", Prompt.of(noise("llama", 4, 9), Tokens(ids(8, 30))), 60),
    ]
    dice.shuffle(requests)
    found = run(engine, *requests)
    assert engine.stats().preemptions > 0
    for name, tokens in prompts.items():
        assert_right(told(found[name]), "llama", tokens)
    for one in requests:
        assert found[one.id].output == reference.greedy(tiny("llama"), one.prompt, 60), one.id


def test_a_request_without_output_ends_when_its_prompt_is_told() -> None:
    engine = core(max_num_batched_tokens=32)
    tokens = ids(6, 512)  # all that the model takes
    found = run(engine, scored("one", tokens, 0))["one"]
    assert_right(told(found), "llama", tokens)
    assert (found.output, found.last.finish_reason) == ([], "length")
    assert found.last.usage is not None
    assert (found.last.usage.prompt_tokens, found.last.usage.completion_tokens) == (512, 0)
    assert engine.stats().prompt_tokens == 512
    assert engine.stats().generated_tokens == 0


def test_a_request_that_wants_nothing_ends_at_once() -> None:
    engine = core()
    (delta,) = engine.admit(make_request("one", Prompt.of(Tokens(ids(6, 9))), 0))
    assert (delta.finish_reason, delta.token_ids) == ("length", ())
    assert len(engine) == 0


def test_a_resumed_request_is_not_told_of_its_prompt_again() -> None:
    engine = core()
    prompt = Prompt.of(Tokens(ids(7, 40)))
    whole = reference.greedy(tiny("llama"), prompt, 6)
    run(engine, make_request("before", prompt, 2))
    found = run(
        engine, make_request("one", prompt, 6, prompt_logprobs=TOP, prior_output=tuple(whole[:2]))
    )["one"]
    assert found.output == whole[2:]
    assert len(told(found).ranks) == 0
    assert found.cached == 32


def test_a_prompt_whose_logits_are_not_finite_fails_alone() -> None:
    model = CausalModel.load(
        EngineSettings.of(model=str(tiny("llama")), device="cpu", num_threads=1)
    )
    bounds = EngineLimits(
        max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, page_size=16, num_pages=64
    )
    engine = Core(model, bounds, SECRET)
    broken = 7
    with torch.no_grad():
        next(model.embedding.parameters())[broken] = float("nan")
    tokens = [id_ for id_ in ids(8, 60) if id_ != broken]
    found = run(engine, scored("bad", [*tokens[:20], broken, *tokens[20:]]), scored("good", tokens))
    assert found["bad"].last.error is not None
    assert isinstance(found["bad"].last.error.to_error(), EngineError)
    assert "not finite" in found["bad"].last.error.message
    assert_right(told(found["good"]), "llama", tokens)
