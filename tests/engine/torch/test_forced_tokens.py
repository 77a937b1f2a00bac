"""Ids that a grammar forces are drafted: fewer steps, the same output."""

import json
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.adapters import bank_of, read_lows
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.engine.torch.grammar import masks
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.grammar.masks import GRACE, forced_tokens
from inlay.engine.torch.grammar.state import MAX_FORCED, GrammarState
from inlay.engine.torch.loading import core_of
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.step import Core
from inlay.messages.request import Grammar, Output, Request
from tests.adapters import make_lora
from tests.engine.torch.test_overlap import KINDS
from tests.engine.torch.test_step import SECRET, Outcome, make_request, prompts
from tests.models import tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_person": {"type": "boolean"},
        "place_of_birth": {"enum": ["harbour", "mountain", "highlands"]},
        "colours": {"type": "array", "items": {"const": "amaranth"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name_of_the_person", "place_of_birth", "colours"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
AFTER = Grammar("json_schema", json.dumps(SCHEMA), after=(11,))
LENGTH = 70


@cache
def loaded(family: str) -> CausalModel:
    settings = EngineSettings.of(
        model=str(tiny(family)),
        device="cpu",
        num_threads=1,
        enable_lora=family == "llama",
        max_loras=2,
        max_lora_rank=8,
    )
    return CausalModel.load(settings)


@pytest.fixture(scope="module")
def grammars() -> Iterator[dict[str, Grammars]]:
    found = {
        family: Grammars(tiny(family), loaded(family).vocab_size, loaded(family).eos_token_ids)
        for family in ("llama", "qwen3_5_text")
    }
    yield found
    for one in found.values():
        one.close()


def core(family: str, *, forced: bool, **changes: int) -> Core:
    values: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "page_size": 16,
        "num_pages": 160,
    }
    return Core(
        loaded(family),
        EngineLimits(**(values | changes)),
        SECRET,
        max_cpu_loras=1,
        speculator=Speculator(None, 0) if forced else None,
    )


def requests(family: str) -> list[Request]:
    """One of each kind of sampling and form of a prompt, all held to the schema."""
    forms = {"text": "b-text", "mixed": "a-mixed", "rows": "d-soft"}
    found = [
        make_request(f"{kind}, {form}", prompts(family)[at], LENGTH, **options | {"grammar": of})
        for kind, options in KINDS.items()
        if not kind.startswith("in a")
        for form, at in forms.items()
        if form == "text" or kind != "scored"
        for of in [AFTER if kind == "held back" else GRAMMAR]
    ]
    free = make_request("free", prompts(family)["b-text"], LENGTH)
    return [*found, free]


def outcomes(engine: Core, grammars: Grammars, asked: Sequence[Request]) -> dict[str, Any]:
    """Output, its end and its logprobs of each; one joins every step."""
    waiting, outputs = list(asked), list[Output]()
    for _ in range(1500):
        if waiting:
            one = waiting.pop(0)
            grammar, state = one.sampling.grammar, None
            if grammar is not None:
                start = grammars.start(grammar, one.sampling.stop_token_ids, one.prior_output)
                state = start.state.result(60)
            outputs += engine.admit(one, grammar=state)
        elif not len(engine):
            break
        outputs += engine.step()
    assert len(engine) == 0
    assert engine.stats().blocks_used == 0
    found = {}
    for one in asked:
        of = Outcome([output for output in outputs if output.request_id == one.id])
        logprobs = [each for output in of.deltas for each in output.logprobs]
        found[one.id] = of.output, of.last.finish_reason, of.last.error, logprobs
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: of[:3] for name, of in found.items()} == {
        name: of[:3] for name, of in expected.items()
    }
    for name, of in expected.items():
        for told, other in zip(of[3], found[name][3], strict=True):
            assert told.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [id_ for id_, _ in told.top] == [id_ for id_, _ in other.top]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("llama", {}, marks=pytest.mark.slow),
        ("llama", {"num_pages": 22, "max_num_batched_tokens": 24}),
        pytest.param("qwen3_5_text", {}, marks=pytest.mark.slow),
        ("qwen3_5_text", {"num_pages": 60, "max_num_batched_tokens": 24}),
    ],
    ids=["roomy", "tight", "states", "tight with states"],
)
def test_every_setting_gives_what_it_gives_one_token_at_a_time(
    grammars: dict[str, Grammars],
    family: str,
    changes: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A draft whose mask is late is left for the next step, so no mask may be late here.
    monkeypatch.setattr(masks, "GRACE", 60.0)
    asked = requests(family)
    expected = outcomes(core(family, forced=False, **changes), grammars[family], asked)
    engine = core(family, forced=True, **changes)
    assert_same(outcomes(engine, grammars[family], asked), expected)
    stats = engine.stats()
    assert stats.num_draft_tokens == stats.num_forced_draft_tokens > 500
    assert stats.num_forced_accepted_tokens > 0.9 * stats.num_forced_draft_tokens
    assert ("num_pages" in changes) == (stats.preemptions > 0)


def test_outputs_that_go_on_elsewhere_are_the_same(grammars: dict[str, Grammars]) -> None:
    whole = outcomes(
        core("llama", forced=False),
        grammars["llama"],
        [make_request("a", prompts("llama")["b-text"], LENGTH, grammar=GRAMMAR)],
    )["a"][0]
    rest = [
        make_request(
            str(cut),
            prompts("llama")["b-text"],
            LENGTH,
            grammar=GRAMMAR,
            prior_output=tuple(whole[:cut]),
        )
        for cut in range(len(whole) - 1)
    ]
    found = outcomes(core("llama", forced=True), grammars["llama"], rest)
    assert {name: of[0] for name, of in found.items()} == {
        one.id: whole[len(one.prior_output) :] for one in rest
    }


def test_outputs_with_an_adapter_are_the_same(
    grammars: dict[str, Grammars], tmp_path: Path
) -> None:
    make_lora(tmp_path, tiny("llama"))
    lows = read_lows(str(tmp_path), bank_of(loaded("llama").lora), torch.float32)
    asked = [
        make_request(f"{of}", prompts("llama")["c-text"], LENGTH, grammar=GRAMMAR, adapter=of)
        for of in ("style", None)
    ]
    found = {}
    for forced in (False, True):
        engine = core("llama", forced=forced)
        engine.adapters.put("style", "style", lows)
        found[forced] = outcomes(engine, grammars["llama"], asked)
    assert_same(found[True], found[False])


def test_a_forced_run_takes_one_step(grammars: dict[str, Grammars]) -> None:
    told = Grammar("json_schema", json.dumps({"const": "a lantern in the harbour at night"}))
    asked = [make_request("a", prompts("llama")["b-text"], LENGTH, grammar=told)]
    engine = core("llama", forced=True)
    ((output, reason, *_),) = outcomes(engine, grammars["llama"], asked).values()
    assert reason == "length"
    steps, drafted = engine.stats().steps, engine.stats().num_forced_draft_tokens
    assert 0 < drafted <= len(output) - 1
    assert steps <= 2 + -(-len(output) // (1 + MAX_FORCED)) + LENGTH - drafted


@pytest.mark.parametrize(
    ("options", "drafts"),
    [
        ({}, True),
        ({"speculative_config": '{"method": "grammar"}'}, True),
        ({"speculative_config": '{"method": "none"}'}, False),
        ({"async_scheduling": True}, False),
        ({"async_scheduling": True, "speculative_config": '{"method": "grammar"}'}, True),
    ],
    ids=str,
)
def test_forced_ids_are_drafted_unless_that_is_off_or_steps_overlap(
    grammars: dict[str, Grammars], options: dict[str, Any], drafts: bool
) -> None:
    settings = EngineSettings.of(model=str(tiny("llama")), **options)
    engine = core_of(
        settings, loaded("llama"), SECRET, CacheEventQueue(settings, SECRET), num_blocks=20
    )
    told = Grammar("json_schema", json.dumps({"const": "a lantern in the harbour"}))
    outcomes(
        engine, grammars["llama"], [make_request("a", prompts("llama")["b-text"], 20, grammar=told)]
    )
    assert bool(engine.stats().num_forced_accepted_tokens) == drafts


class Held:
    """The parts of a sequence that masks need."""

    client = None

    def __init__(self, grammar: GrammarState) -> None:
        self.grammar: GrammarState | None = grammar
        self.output: list[int] = []


class Stuck:
    """An executor that never begins."""

    def submit(self, job: object, client: object) -> None:
        pass


def test_forced_ids_that_come_late_are_not_waited_for_again(
    grammars: dict[str, Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [grammars["llama"].start(GRAMMAR, (), ()).state.result(60) for _ in range(20)]
    held = [Held(state) for state in states]
    assert forced_tokens(held) == {}
    for state in states:
        state.begin_masks([], Stuck(), None)  # type: ignore[arg-type]
    waits: list[float] = []
    forced = GrammarState.forced

    def told(self: GrammarState, length: int, seconds: float) -> Any:
        waits.append(seconds)
        return forced(self, length, seconds)

    monkeypatch.setattr(GrammarState, "forced", told)
    assert forced_tokens(held) == {}
    # All together, not each.
    assert len(waits) == len(states)
    assert sum(waits) < 2 * GRACE
    assert all(state.slow for state in states)


def test_masks_after_drafts_are_late_together_and_no_sequence_is_slow_for_it(
    grammars: dict[str, Grammars],
) -> None:
    states = [grammars["llama"].start(GRAMMAR, (), ()).state.result(60) for _ in range(3)]
    held = [Held(state) for state in states]
    for state in states:
        state.begin_masks([], Stuck(), None)  # type: ignore[arg-type]
    waited = masks.Masks()
    try:
        assert waited.late(held, time.monotonic()) == dict.fromkeys(held)
        assert not any(state.slow for state in states)
        assert waited.late(held) == dict.fromkeys(held)
        assert all(state.slow for state in states)
    finally:
        waited.close()


def test_all_drafts_of_a_step_wait_for_masks_until_one_moment(
    grammars: dict[str, Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[float | None] = []
    late = masks.Masks.late

    def told(self: masks.Masks, sequences: Any, until: float | None = None) -> Any:
        if sequences:
            moments.append(until)
        return late(self, sequences, until)

    monkeypatch.setattr(masks.Masks, "late", told)
    monkeypatch.setattr(masks, "GRACE", 60.0)
    grammar = Grammar("json_schema", json.dumps({"const": "a lantern in the harbour at night"}))
    asked = [make_request("a", prompts("llama")["b-text"], 40, grammar=grammar)]
    engine = core("llama", forced=True)
    outcomes(engine, grammars["llama"], asked)
    # The token after known positions is waited for as ever, those after drafts once a step.
    drafted = [moment for moment in moments if moment is not None]
    assert len(moments) - len(drafted) == engine.stats().steps
    assert engine.stats().num_forced_accepted_tokens == len(drafted)
    assert 0 < len(set(drafted)) == engine.stats().num_drafts < len(drafted)


def test_a_sequence_that_was_late_once_has_no_more_drafts(grammars: dict[str, Grammars]) -> None:
    told = Grammar("json_schema", json.dumps({"const": "harbour"}))
    state = grammars["llama"].start(told, (), ()).state.result(60)
    state.begin_masks([], Now(), None)  # type: ignore[arg-type]
    assert forced_tokens([Held(state)])
    state.slow = True
    assert forced_tokens([Held(state)]) == {}


def test_ids_that_the_model_does_not_have_are_not_drafted(grammars: dict[str, Grammars]) -> None:
    model = loaded("llama")
    told = Grammar("json_schema", json.dumps({"const": "harbour"}))
    few = Grammars(tiny("llama"), 4, model.eos_token_ids)
    try:
        for source, enough in ((grammars["llama"], True), (few, False)):
            state = source.start(told, (), ()).state.result(60)
            state.begin_masks([], Now(), None)  # type: ignore[arg-type]
            assert bool(state.forced(0, 0.0)) == enough
    finally:
        few.close()


class Now:
    """An executor that runs what it is given."""

    def submit(self, job: Any, client: object) -> None:
        job.run()
