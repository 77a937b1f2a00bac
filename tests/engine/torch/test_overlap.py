"""A step is launched before the last is read.

What is chosen, told and cached stays what it is step after step.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.base.errors import EngineError
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.step import Core
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Grammar, Output
from tests.engine.torch.test_step import (
    SECRET,
    Outcome,
    fill,
    ids,
    load,
    make_request,
    prompts,
    run,
    truth,
)

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "top_p": 0.95, "seed": 3},
    "of the best": {"temperature": 1.1, "top_k": 30, "min_p": 0.01, "seed": 4, "logprobs": 3},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    "held back": {"min_tokens": 9, "ignore_eos": False, "logit_bias": {2: 30.0}},
    "bad words": {"bad_words": tuple((one, other) for one in range(3, 9) for other in range(200))},
    "scored": {"prompt_logprobs": 2},
    "stopped": {"stop_token_ids": tuple(range(100, 180))},
    "in a grammar": {"grammar": Grammar("regex", "(ab|cd){9}")},
    "in another": {"grammar": Grammar("json_object", ""), "temperature": 0.8, "seed": 9},
}


def core(model: str = "llama", /, *, overlap: bool, **changes: int) -> Core:
    values: dict[str, Any] = {
        "max_model_len": 160,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "page_size": 16,
        "num_pages": 64,
    }
    return Core(load(model), EngineLimits(**(values | changes)), SECRET, overlap=overlap)


def outcomes(engine: Core, grammars: Grammars, family: str = "llama") -> dict[str, Any]:
    """Results of requests of all kinds; one joins every second step."""
    names = {f"{kind}, {form}": (kind, form) for form in ("a-mixed", "d-soft") for kind in KINDS}
    names = {
        name: of for name, of in names.items() if of != ("scored", "a-mixed") and of[0] != "scored"
    }
    names["scored, c-text"] = ("scored", "c-text")
    waiting, outputs = list(names), list[Output]()
    for step in range(500):
        if waiting and step % 2 == 0:
            kind, form = names[name := waiting.pop(0)]
            one = make_request(name, prompts(family)[form], 30, **KINDS[kind])
            asked = one.sampling.grammar
            state = None if asked is None else grammars.start(asked, (), ()).state.result(60)
            outputs += engine.admit(one, grammar=state)
        outputs += engine.step()
    assert len(engine) == 0
    found = {
        name: Outcome([output for output in outputs if output.request_id == name]) for name in names
    }
    return {
        name: (
            of.output,
            of.last.finish_reason,
            [one for output in of.deltas for one in output.logprobs],
        )
        for name, of in found.items()
    }


@pytest.mark.parametrize(
    "changes", [{}, {"num_pages": 14, "max_num_batched_tokens": 24}], ids=["roomy", "tight"]
)
def test_every_setting_chooses_as_it_does_step_after_step(changes: dict[str, int]) -> None:
    model = load("llama")
    grammars = Grammars(Path(model.path), model.vocab_size, model.eos_token_ids)
    try:
        expected = outcomes(core(overlap=False, **changes), grammars)
        engine = core(overlap=True, **changes)
        found = outcomes(engine, grammars)
    finally:
        grammars.close()
    assert {name: of[:2] for name, of in found.items()} == {
        name: of[:2] for name, of in expected.items()
    }
    for name, (_, _, logprobs) in expected.items():
        for told, other in zip(logprobs, found[name][2], strict=True):
            assert told.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert len(told.top) == len(other.top) == KINDS[name.split(", ")[0]]["logprobs"]
    assert ("num_pages" in changes) == (engine.stats().preemptions > 0)


def test_a_step_is_launched_before_the_last_is_read() -> None:
    engine = core(overlap=True)
    engine.admit(make_request("a", prompts("llama")["b-text"], 3))
    told = [[id_ for output in engine.step() for id_ in output.token_ids] for _ in range(4)]
    assert told == [[], *([id_] for id_ in truth("llama")["b-text"][:3])]
    # Three tokens take the prompt and two positions: the last token's end was known before it was
    # read.
    assert engine.stats().progress == 7 + 2
    assert engine.stats().steps == 3


def test_what_is_computed_beyond_an_end_is_neither_told_nor_cached() -> None:
    prompt = Prompt.of(Tokens(ids(1, 15)))
    whole = run(core(overlap=False), make_request("a", prompt, 12))["a"].output
    stop = whole[1]
    cut = whole.index(stop) + 1
    engine = core(overlap=True)
    ended = run(engine, make_request("a", prompt, 12, stop_token_ids=(stop,)))["a"]
    assert (ended.output, ended.last.finish_reason) == (whole[:cut], "stop")
    # One position more than without overlap, in a page that no digest names.
    assert engine.stats().progress == 15 + cut
    assert engine.reset_prefix_cache() == (15 + cut - 1) // 16


def test_whoever_comes_in_place_of_one_that_failed_sees_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = core(overlap=True, num_pages=10, max_num_batched_tokens=160)
    fill(engine, 0.0)
    model, broken = engine.model, 5
    hidden = model.hidden
    rotten: list[bool] = []

    def rotting(batch: Any, pages: Any) -> torch.Tensor:
        """The model's output turns bad at a position after the prompt, and its keys too."""
        found = hidden(batch, pages)
        if not rotten and int(batch.positions.max()) == 40 + broken:
            rotten.append(True)
            pages.keys[0].view(pages.keys[0].shape[0], -1, pages.keys[0].shape[3])[
                :, batch.slots[0]
            ] = math.nan
            return torch.full_like(found, math.nan)
        return found

    monkeypatch.setattr(model, "hidden", rotting)
    bad = run(engine, make_request("bad", Prompt.of(Tokens(ids(3, 40))), 30))["bad"]
    assert len(bad.output) == broken + 1
    assert bad.last.error is not None
    assert isinstance(bad.last.error.to_error(), EngineError)
    after = run(
        engine, *(make_request(name, prompts("llama")[name]) for name in ("a-text", "c-text"))
    )
    assert {name: outcome.output for name, outcome in after.items()} == {
        name: truth("llama")[name] for name in after
    }
    assert not any(bool(pages.isnan().any()) for pages in engine.pages.keys)


def test_a_request_may_end_and_another_of_its_name_begin_while_a_step_is_unread() -> None:
    engine = core(overlap=True)
    expected = truth("llama")
    engine.admit(make_request("a", prompts("llama")["a-text"]))
    engine.step()
    engine.abort("a")
    found = run(engine, make_request("a", prompts("llama")["b-text"]))["a"]
    assert found.output == expected["b-text"]
