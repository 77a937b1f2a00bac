"""The engine without its thread, at tiny random models in float32.

Every way to the same positions gives what
`transformers.generate` gives, exactly.
"""

import math
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from inlay.base.errors import DeadlineExceededError, EmbeddingsError, EngineError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.sampling.sampler import SampledTokens
from inlay.engine.torch.step import Core
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Rows, Tokens
from inlay.messages.request import Output, Request, Sampling
from tests.engine import reference
from tests.models import EOS_ID, tiny

pytestmark = pytest.mark.usefixtures("overlap")

FAMILIES = ("llama", "qwen3")
SECRET = Secret(bytes(32))


@cache
def load(family: str) -> CausalModel:
    return CausalModel.load(EngineSettings.of(model=str(tiny(family)), device="cpu", num_threads=1))


def core(family: str = "llama", *, prefix_caching: bool = True, **changes: int) -> Core:
    values: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "page_size": 16,
        "num_pages": 64,
    }
    return Core(
        load(family), EngineLimits(**(values | changes)), SECRET, prefix_caching=prefix_caching
    )


def ids(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (count,), generator=generator).tolist()


def in_table(family: str, tokens: Sequence[int], *, atomic: bool = False) -> Rows:
    return reference.rows_of(reference.look_up(tiny(family), tokens), atomic=atomic)


def noise(family: str, seed: int, count: int) -> Rows:
    """Rows that no token has."""
    generator = torch.Generator().manual_seed(seed)
    return reference.rows_of(
        0.5 * torch.randn(count, load(family).hidden_size, generator=generator)
    )


def make_request(name: str, prompt: Prompt, max_tokens: int = 12, **options: Any) -> Request:
    changes = {
        field: options.pop(field) for field in tuple(options) if field in Sampling.__struct_fields__
    }
    values: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        **changes,
    }
    return Request(id=name, prompts=(prompt,), params=Sampling(**values), **options)


class Outcome:
    """Result of one request."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.deltas = list(outputs)

    @property
    def output(self) -> list[int]:
        return [id_ for output in self.deltas for id_ in output.token_ids]

    @property
    def last(self) -> Output:
        assert self.deltas[-1].finish_reason is not None
        return self.deltas[-1]

    @property
    def cached(self) -> int:
        assert self.last.usage is not None
        return self.last.usage.cached_tokens


def run(engine: Core, *requests: Request, steps: int = 2000) -> dict[str, Outcome]:
    outputs: list[Output] = []
    for one in requests:
        outputs += engine.admit(one)
    for _ in range(steps):
        if not len(engine):
            break
        outputs += engine.step()
        stats = engine.stats()
        assert stats.blocks_used <= stats.blocks_total
    assert len(engine) == 0
    assert engine.stats().blocks_used == 0
    assert len(engine.sampler) == 0
    return {
        one.id: Outcome([output for output in outputs if output.request_id == one.id])
        for one in requests
    }


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompts(family: str) -> dict[str, Prompt]:
    """Texts, rows and mixtures of different lengths.

    Those of one letter have the same positions.
    """
    a, b, c = ids(1, 50), ids(2, 7), ids(3, 90)
    return {
        "a-text": Prompt.of(Tokens(a)),
        "a-rows": Prompt.of(in_table(family, a)),
        "a-mixed": Prompt.of(Tokens(a[:20]), in_table(family, a[20:33]), Tokens(a[33:])),
        "a-atomic": Prompt.of(
            Tokens(a[:10]), in_table(family, a[10:40], atomic=True), Tokens(a[40:])
        ),
        "b-text": Prompt.of(Tokens(b)),
        "b-rows": Prompt.of(in_table(family, b[:3]), in_table(family, b[3:])),
        "c-text": Prompt.of(Tokens(c)),
        "d-soft": Prompt.of(noise(family, 4, 9), Tokens(b)),
        "e-soft": Prompt.of(Tokens(c), noise(family, 5, 30)),
    }


@cache
def truth(family: str) -> dict[str, list[int]]:
    return {
        name: reference.greedy(tiny(family), prompt, 12) for name, prompt in prompts(family).items()
    }


def test_the_reference_itself_takes_text_and_rows_alike(family: str) -> None:
    found = truth(family)
    assert found["a-text"] == found["a-rows"] == found["a-mixed"]
    assert len({tuple(output) for output in found.values()}) == 5


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("budget", [128, 32], ids=["whole", "chunked"])
def test_every_form_of_a_prompt_alone_decodes_as_transformers_does(
    family: str, budget: int, prefix_caching: bool
) -> None:
    engine = core(family, max_num_batched_tokens=budget, prefix_caching=prefix_caching)
    for name, prompt in prompts(family).items():
        assert run(engine, make_request(name, prompt))[name].output == truth(family)[name], name
    assert (engine.stats().cached_tokens > 0) == prefix_caching


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 32},
        {"page_size": 32, "num_pages": 40},
        {"num_pages": 10, "max_model_len": 150},
        {"max_num_seqs": 2},
        {"num_pages": 10, "max_model_len": 150, "max_num_batched_tokens": 37, "max_num_seqs": 16},
    ],
    ids=["roomy", "chunked", "large pages", "few pages", "two at a time", "all tight"],
)
def test_batched_with_neighbours_nothing_changes(family: str, changes: dict[str, int]) -> None:
    engine = core(family, prefix_caching=True, **changes)
    found = run(engine, *(make_request(name, prompt) for name, prompt in prompts(family).items()))
    assert {name: outcome.output for name, outcome in found.items()} == truth(family)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    family: str, prefix_caching: bool
) -> None:
    engine = core(family, num_pages=9, max_model_len=140, prefix_caching=prefix_caching)
    chosen = {
        name: prompt
        for name, prompt in prompts(family).items()
        if name in ("a-text", "b-text", "d-soft")
    }
    expected = {name: reference.greedy(tiny(family), prompt, 60) for name, prompt in chosen.items()}
    found = run(engine, *(make_request(name, prompt, 60) for name, prompt in chosen.items()))
    assert engine.stats().preemptions > 0
    assert {name: outcome.output for name, outcome in found.items()} == expected


def test_arriving_in_the_middle_changes_nobody() -> None:
    engine = core(max_num_batched_tokens=40)
    outputs: list[Output] = []
    for name, prompt in prompts("llama").items():
        outputs += engine.admit(make_request(name, prompt))
        outputs += engine.step()
        outputs += engine.step()
    while len(engine):
        outputs += engine.step()
    for name, expected in truth("llama").items():
        assert (
            Outcome([output for output in outputs if output.request_id == name]).output == expected
        )


@pytest.mark.parametrize("seed", range(3))
def test_a_random_load_of_all_forms_with_aborts_and_failures_is_exact(seed: int) -> None:
    dice = random.Random(seed)
    engine = core(
        num_pages=dice.choice([12, 30]),
        max_model_len=150,
        max_num_seqs=dice.choice([3, 8]),
        max_num_batched_tokens=dice.choice([33, 100]),
        page_size=dice.choice([16, 32]),
    )
    known = prompts("llama") | {
        "bad": Prompt.of(Tokens(ids(1, 20)), bad_rows("llama", 20), Tokens([5]))
    }
    names: dict[str, str] = {}
    gone: set[str] = set()
    outputs: list[Output] = []
    while len(names) < 40 or len(engine):
        if len(names) < 40 and dice.random() < 0.4:
            name, kind = f"work {len(names)}", dice.choice(sorted(known))
            names[name] = kind
            outputs += engine.admit(
                make_request(name, known[kind], dice.randint(1, 12), priority=dice.randint(0, 2))
            )
        if dice.random() < 0.05 and names:
            name = dice.choice(sorted(names))
            aborted = engine.abort(name)
            gone.update(output.request_id for output in aborted)
            outputs += aborted
        outputs += engine.step()
    assert engine.stats().blocks_used == 0
    for name, kind in names.items():
        found = Outcome([output for output in outputs if output.request_id == name])
        if kind == "bad":
            assert (found.output, found.last.finish_reason) == (
                [],
                "abort" if name in gone else "error",
            )
        else:
            assert found.output == truth("llama")[kind][: len(found.output)]
            assert found.last.finish_reason == ("abort" if name in gone else "length")
    assert set(names.values()) >= {"bad", "a-mixed", "e-soft"}


def test_a_text_prefix_is_shared_by_a_mixed_prompt_and_the_other_way_round(family: str) -> None:
    text, tail = ids(7, 48), ids(8, 20)
    mixed = Prompt.of(Tokens(text), in_table(family, tail))
    plain = Prompt.of(Tokens(text), Tokens(tail))
    expected = reference.greedy(tiny(family), plain, 8)
    for first, second in ((plain, mixed), (mixed, plain)):
        engine = core(family)
        assert run(engine, make_request("first", first, 8))["first"].output == expected
        found = run(engine, make_request("second", second, 8))["second"]
        assert found.output == expected
        assert found.cached == 48


def test_equal_rows_are_found_again_and_other_rows_are_not(family: str) -> None:
    engine = core(family)
    head = Tokens(ids(7, 16))
    run(engine, make_request("first", Prompt.of(head, noise(family, 1, 40)), 4))
    found = run(
        engine,
        make_request("same", Prompt.of(head, noise(family, 1, 40)), 4),
        make_request("other", Prompt.of(head, noise(family, 2, 40)), 4),
    )
    assert (found["same"].cached, found["other"].cached) == (48, 16)
    other = reference.greedy(tiny(family), Prompt.of(head, noise(family, 2, 40)), 4)
    assert found["other"].output == other


def test_another_salt_finds_nothing() -> None:
    engine = core()
    prompt = Prompt.of(Tokens(ids(7, 40)))
    run(engine, make_request("first", prompt, salt="mine"))
    assert run(engine, make_request("second", prompt, salt="yours"))["second"].cached == 0
    assert run(engine, make_request("third", prompt, salt="mine"))["third"].cached == 32


def test_requests_that_share_a_prompt_compute_it_once() -> None:
    engine = core()
    prompt = Prompt.of(Tokens(ids(9, 100)))
    found = run(engine, *(make_request(str(index), prompt) for index in range(4)))
    expected = reference.greedy(tiny("llama"), prompt, 12)
    assert all(outcome.output == expected for outcome in found.values())
    assert engine.stats().progress == 100 + 3 * 4 + 4 * 11


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_resumed_request_goes_on_where_the_other_stopped(family: str, cut: int) -> None:
    name = "a-mixed"
    whole = truth(family)[name]
    prior = tuple(whole[:cut])
    found = run(core(family), make_request(name, prompts(family)[name], prior_output=prior))[name]
    assert found.output == whole[cut:]
    assert [output.offset for output in found.deltas] == list(range(cut, 12))
    assert found.last.usage is not None
    assert found.last.usage.completion_tokens == 12


def test_a_request_whose_earlier_output_was_complete_ends_at_once() -> None:
    prompt = Prompt.of(Tokens(ids(1, 5)))
    found = run(core(), make_request("full", prompt, 3, prior_output=(5, 6, 7)))["full"]
    assert (found.output, found.last.finish_reason, found.last.offset) == ([], "length", 3)
    ended = run(
        core(), make_request("ended", prompt, 9, prior_output=(5, EOS_ID), ignore_eos=False)
    )["ended"]
    assert (ended.output, ended.last.finish_reason) == ([], "stop")


def test_outputs_count_on_and_carry_usage_first_and_last() -> None:
    found = run(core(), make_request("a", prompts("llama")["a-text"]))["a"]
    assert [output.offset for output in found.deltas] == list(range(12))
    assert [output.usage is not None for output in found.deltas] == [True, *[False] * 10, True]
    assert [output.finish_reason for output in found.deltas] == [*[None] * 11, "length"]
    assert found.last.usage is not None
    assert (found.last.usage.prompt_tokens, found.last.usage.completion_tokens) == (50, 12)


def test_a_stop_token_ends_the_output_and_is_its_last() -> None:
    whole = truth("llama")["a-text"]
    stop = whole[5]
    found = run(core(), make_request("a", prompts("llama")["a-text"], stop_token_ids=(stop,)))["a"]
    assert found.output == whole[: whole.index(stop) + 1]
    assert (found.last.finish_reason, found.last.stop_token_id) == ("stop", stop)


def test_the_models_own_end_token_ends_the_output_unless_it_is_ignored() -> None:
    prompt = prompts("llama")["a-text"]
    bias = {EOS_ID: 1000.0}
    ended = run(core(), make_request("a", prompt, ignore_eos=False, logit_bias=bias))["a"]
    assert (ended.output, ended.last.finish_reason) == ([EOS_ID], "stop")
    ignored = run(core(), make_request("a", prompt, 3, ignore_eos=True, logit_bias=bias))["a"]
    assert (ignored.output, ignored.last.finish_reason) == ([EOS_ID] * 3, "length")
    late = run(core(), make_request("a", prompt, ignore_eos=False, logit_bias=bias, min_tokens=4))[
        "a"
    ]
    assert late.output[4:] == [EOS_ID]


def test_seeded_sampling_does_not_depend_on_neighbours_or_on_being_resumed() -> None:
    prompt = prompts("llama")["a-mixed"]
    options: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 11,
        "frequency_penalty": 0.4,
    }
    alone = run(core(), make_request("a", prompt, 20, **options))["a"].output
    neighbours = [
        make_request(name, other, 20, temperature=1.0) for name, other in prompts("llama").items()
    ]
    crowded = run(
        core(num_pages=24, max_model_len=200), *neighbours, make_request("a", prompt, 20, **options)
    )
    assert crowded["a"].output == alone
    resumed = run(core(), make_request("a", prompt, 20, prior_output=tuple(alone[:7]), **options))[
        "a"
    ]
    assert resumed.output == alone[7:]


def test_logprobs_are_given_for_every_token_when_asked() -> None:
    found = run(core(), make_request("a", prompts("llama")["b-text"], 5, logprobs=3))["a"]
    for output in found.deltas:
        assert len(output.logprobs) == len(output.token_ids) == 1
        assert len(output.logprobs[0].top) == 3
        assert output.logprobs[0].top[0] == (output.token_ids[0], output.logprobs[0].logprob)


def test_an_abort_frees_the_pages_at_once_and_leaves_the_others_alone() -> None:
    engine = core(prefix_caching=False, max_num_batched_tokens=256)
    outputs = engine.admit(make_request("stays", prompts("llama")["a-text"]))
    outputs += engine.admit(make_request("goes", prompts("llama")["c-text"]))
    while Outcome([output for output in outputs if output.request_id == "goes"]).output[1:] == []:
        outputs += engine.step()
    used = engine.stats().blocks_used
    (last,) = engine.abort("goes")
    assert (last.finish_reason, last.offset) == ("abort", 2)
    assert last.usage is not None
    assert last.usage.completion_tokens == 2
    assert engine.stats().blocks_used == used - 6
    assert engine.abort("goes") == []
    while len(engine):
        outputs += engine.step()
    assert (
        Outcome([output for output in outputs if output.request_id == "stays"]).output
        == truth("llama")["a-text"]
    )


def test_a_request_in_the_queue_can_be_aborted() -> None:
    engine = core(max_num_seqs=1)
    engine.admit(make_request("runs", prompts("llama")["a-text"]))
    engine.admit(make_request("waits", prompts("llama")["b-text"]))
    engine.step()
    assert [output.finish_reason for output in engine.abort("waits")] == ["abort"]
    assert engine.stats().waiting == 0


def test_a_request_past_its_deadline_fails_whether_it_runs_or_waits() -> None:
    engine = core(max_num_seqs=1)
    engine.admit(make_request("runs", prompts("llama")["a-text"]), expires=10.0)
    engine.admit(make_request("waits", prompts("llama")["b-text"]), expires=20.0)
    engine.step()
    assert engine.expire(9.9) == []
    for now, name in ((10.0, "runs"), (20.0, "waits")):
        (late,) = engine.expire(now)
        assert (late.request_id, late.finish_reason) == (name, "error")
        assert late.error is not None
        assert isinstance(late.error.to_error(), DeadlineExceededError)
    assert engine.stats().blocks_used == 0


def fill(engine: Core, value: float) -> None:
    """Content of the pages before the first write."""
    for pages in (*engine.pages.keys, *engine.pages.values):
        pages.fill_(value)


def test_what_pages_held_before_has_no_effect(family: str) -> None:
    engine = core(family)
    fill(engine, math.nan)
    found = run(engine, *(make_request(name, prompt) for name, prompt in prompts(family).items()))
    assert {name: outcome.output for name, outcome in found.items()} == truth(family)


def bad_rows(family: str, count: int) -> Rows:
    return reference.rows_of(torch.full((count, load(family).hidden_size), math.nan))


def test_a_request_whose_output_is_not_finite_fails_alone(family: str) -> None:
    engine = core(family, max_num_batched_tokens=48, num_pages=40)
    head = Tokens(ids(7, 32))
    good = {name: prompt for name, prompt in prompts(family).items() if name != "a-atomic"}
    found = run(
        engine,
        make_request("bad", Prompt.of(head, bad_rows(family, 40), Tokens([5]))),
        *(make_request(name, prompt) for name, prompt in good.items()),
    )
    bad = found.pop("bad")
    assert bad.output == []
    assert bad.last.error is not None
    assert isinstance(bad.last.error.to_error(), EmbeddingsError)
    assert "not finite" in bad.last.error.message
    assert {name: outcome.output for name, outcome in found.items()} == {
        name: truth(family)[name] for name in good
    }


def test_pages_of_a_request_that_failed_are_scrubbed_and_never_found_again() -> None:
    engine = core(num_pages=12, max_model_len=150)
    fill(engine, 0.0)
    head = ids(7, 32)
    run(engine, make_request("good", Prompt.of(Tokens(head), Tokens([5])), 2))
    bad = Prompt.of(Tokens(head), bad_rows("llama", 40), Tokens([5]))
    run(engine, make_request("bad", bad))
    assert any(bool(pages.isnan().any()) for pages in engine.pages.keys)
    after = run(
        engine,
        make_request("again", bad),
        make_request("good", Prompt.of(Tokens(head), Tokens([6])), 2),
    )
    assert after["again"].last.finish_reason == "error"
    assert after["again"].cached == 32
    assert after["good"].cached == 32
    run(engine, make_request("next", prompts("llama")["b-text"]))
    assert not any(
        bool(pages.isnan().any()) for pages in (*engine.pages.keys, *engine.pages.values)
    )


def test_logits_that_are_finite_but_overflow_when_added_are_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = core()
    asked: list[int] = []
    logits = engine.model.logits

    def loud(hidden: torch.Tensor) -> torch.Tensor:
        """Logits whose sum is infinite."""
        asked.append(len(hidden))
        found = logits(hidden).clamp(min=0) + torch.finfo(torch.float32).max / 8
        assert not len(found) or found.sum(-1).isinf().all()
        return found

    monkeypatch.setattr(engine.model, "logits", loud)
    assert (
        run(engine, make_request("a", prompts("llama")["b-text"], 2))["a"].last.finish_reason
        == "length"
    )
    assert sum(asked) == 2


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Core:
    """An engine whose sampler fails for requests of seed 13, in the middle of a batch."""
    engine = core()
    draw = engine.sampler.draw

    def failing(logits: torch.Tensor, sequences: Sequence[Any]) -> SampledTokens:
        if any(sequence.sampling.seed == 13 for sequence in sequences):
            raise ValueError("seed 13")
        return draw(logits, sequences)

    monkeypatch.setattr(engine.sampler, "draw", failing)
    return engine


def test_a_request_that_cannot_be_sampled_fails_alone(picky: Core) -> None:
    found = run(
        picky,
        make_request("bad", prompts("llama")["b-text"], seed=13),
        make_request("a-text", prompts("llama")["a-text"], repetition_penalty=1.0),
    )
    assert found["a-text"].output == truth("llama")["a-text"]
    assert found["bad"].last.error is not None
    assert isinstance(found["bad"].last.error.to_error(), EngineError)
    assert "ValueError" in found["bad"].last.error.message


def test_the_cache_can_be_forgotten() -> None:
    engine = core()
    prompt = prompts("llama")["c-text"]
    run(engine, make_request("first", prompt))
    assert engine.reset_prefix_cache() == 6
    assert run(engine, make_request("second", prompt))["second"].cached == 0


def test_stats_count_positions_tokens_and_rows() -> None:
    engine = core()
    run(
        engine,
        make_request("mixed", prompts("llama")["a-mixed"], 4),
        make_request("text", prompts("llama")["b-text"], 4),
    )
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.rows_served) == (57, 8, 13)
    assert stats.progress == 57 + 2 * 3
    assert (stats.running, stats.waiting, stats.steps) == (0, 0, 4)
