"""Each stage of a step alone, and how many Python calls a step that decodes takes."""

import sys
from collections.abc import Sequence as Run
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import inlay
from inlay.base.errors import EmbeddingsError, EngineError
from inlay.demo import model_dir
from inlay.engine.settings import EngineSettings
from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.in_flight_step import InFlightStep, Lookahead, TokenRun
from inlay.engine.torch.loading import speculator_of
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.plan import ScheduledChunk, Totals
from inlay.engine.torch.results import Committer, Emitter
from inlay.engine.torch.sampling.sampler import SampledToken
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.step import Core
from inlay.messages.prompt import Prompt, Segment, Tokens
from inlay.messages.request import Output, PromptLogprobs, Request, Sampling, TokenLogprobs
from tests.engine.torch.simulation import Simulation, bounds, rows
from tests.engine.torch.test_step import SECRET, core, ids, load, make_request

END = 2


def sequence(*segments: Segment, prior: Run[int] = (), **sampling: Any) -> Sequence:
    values = {"max_tokens": 8, "temperature": 0.0, **sampling}
    request = Request(
        id="a",
        prompts=(Prompt.of(*(segments or (Tokens([5, 6, 7]),))),),
        params=Sampling(**values),
        prior_output=tuple(prior),
    )
    return Sequence(request, arrival=0)


def run_of(one: Sequence, *ids: int, **changes: Any) -> TokenRun:
    """A chunk that gave `ids`, which are appended as sampling does."""
    for id_ in ids:
        one.append(id_)
    tokens = [SampledToken(id_, None) for id_ in ids]
    return TokenRun(ScheduledChunk(one, 0, 3, True), tokens, **changes)


class Ends:
    """An emitter of one sequence, and what it counts and ends."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.expected: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.emitter = Emitter((END,), self.totals, self.expected.append, self.ended.append)

    def emit(self, *runs: TokenRun) -> list[Output]:
        return self.emitter.emit(runs)


def flight(*chunks: ScheduledChunk) -> InFlightStep:
    return InFlightStep(chunks, torch.zeros(3, 4), torch.zeros(1, 9), {})


def test_without_overlap_a_step_is_read_at_once() -> None:
    lookahead, step = Lookahead(overlap=False), flight(ScheduledChunk(sequence(), 0, 3, True))
    assert lookahead.push(step) is step
    assert lookahead.unread is None
    assert lookahead.push(None) is None


def test_with_overlap_the_step_before_is_read() -> None:
    lookahead = Lookahead(overlap=True)
    steps = [flight(ScheduledChunk(sequence(), 0, 3, True)) for _ in range(2)]
    assert lookahead.push(steps[0]) is None
    assert lookahead.unread is steps[0]
    assert lookahead.push(steps[1]) is steps[0]
    assert lookahead.push(None) is steps[1]
    assert lookahead.unread is None


def test_drafts_need_every_step_read_before_the_next() -> None:
    assert Lookahead(overlap=True, speculator=Speculator(None, 0)).depth == 0


def test_a_step_is_launched_as_the_model_computes_it() -> None:
    engine = core()
    prompt = ids(3, 20)
    engine.admit(make_request("a", Prompt.of(Tokens(prompt))))
    (chunk,) = engine.scheduler.schedule().chunks
    step = engine._runner.run([chunk], None)
    assert step.sampling == [chunk]
    assert step.logits.shape == (1, load("llama").vocab_size)
    other = core()
    other.admit(make_request("a", Prompt.of(Tokens(prompt)), 1))
    (output,) = other.step()
    assert int(step.logits.argmax()) == output.token_ids[0]
    assert not chunk.sequence.output


def test_sampled_tokens_are_appended_and_given_once() -> None:
    engine = core()
    engine.admit(make_request("a", Prompt.of(Tokens(ids(3, 20)))))
    (chunk,) = engine.scheduler.schedule().chunks
    step = engine._runner.run([chunk], None)
    (run,) = engine._token_sampler.sample(step)
    assert run.chunk is chunk
    assert run.finite
    assert [token.token_id for token in run.tokens] == chunk.sequence.output
    assert len(chunk.sequence.output) == 1
    assert run.accepted == 0


def test_nothing_is_sampled_of_a_sequence_that_ended_meanwhile() -> None:
    engine = core()
    engine.admit(make_request("a", Prompt.of(Tokens(ids(3, 20)))))
    (chunk,) = engine.scheduler.schedule().chunks
    step = engine._runner.run([chunk], None)
    engine.abort("a")
    assert engine._token_sampler.sample(step) == []
    assert not chunk.sequence.output


@pytest.mark.parametrize("where", ["hidden", "logits"])
def test_one_value_that_is_not_finite_spoils_its_chunk_alone(where: str) -> None:
    chunks = [ScheduledChunk(sequence(), 0, 3, True) for _ in range(3)]
    values = {"hidden": torch.zeros(9, 4), "logits": torch.zeros(3, 9)}
    values[where][{"hidden": 4, "logits": 1}[where], 2] = torch.nan
    found = InFlightStep(chunks, values["hidden"], values["logits"], {}).read()
    assert [run.finite for run in found] == [True, False, True]


def test_good_pages_are_named_and_those_of_bad_chunks_never() -> None:
    simulation = Simulation(bounds())
    scheduler = simulation.scheduler
    good, bad = (simulation.admit(Tokens([n] * 40), max_tokens=4) for n in (1, 2))
    plan = scheduler.schedule()
    chunks = {chunk.sequence: chunk for chunk in plan.chunks}
    runs = [TokenRun(chunks[good]), TokenRun(chunks[bad], finite=False)]
    Committer(scheduler).commit(runs)
    computed = chunks[good].count // 16
    assert computed > 0
    assert [bool(simulation.named(good, 0, index)) for index in range(computed)] == [True] * (
        computed
    )
    assert not any(simulation.named(bad, 0, index) for index in range(2))
    written = len(bad.pages[0].pages)
    scheduler.finish(bad)
    assert scheduler.table.dirty == written > 0
    assert not good.unread


def test_pages_of_a_step_that_was_not_read_are_scrubbed_once_its_request_has_ended() -> None:
    simulation = Simulation(bounds())
    scheduler = simulation.scheduler
    sequence = simulation.admit(Tokens([1] * 40), max_tokens=4)
    scheduler.schedule()
    written = len(sequence.pages[0].pages)
    scheduler.finish(sequence)
    assert scheduler.table.dirty == written > 0


def test_pages_that_decoding_fills_have_given_finite_logits_too() -> None:
    simulation = Simulation(bounds())
    sequence = simulation.admit(Tokens([1] * 8), max_tokens=60)
    for _ in range(50):
        simulation.step()
    table, (run,) = simulation.scheduler.table, sequence.pages
    assert [table.is_verified(page) for page in run.pages] == [True] * 4


def test_a_sequence_whose_adapter_rests_is_not_counted_as_passed_over() -> None:
    simulation = Simulation(bounds(), max_loras=1)
    one, other = (simulation.admit(Tokens([1] * 8), max_tokens=40, adapter=name) for name in "ab")
    simulation.step()
    (planned,) = {chunk.sequence for chunk in simulation.step().chunks}
    resting = other if planned is one else one
    resting.starved_steps = 2  # of pages that it lacked before
    simulation.step()
    assert resting.starved_steps == 0


def test_rejected_drafts_are_computed_again() -> None:
    simulation = Simulation(bounds())
    one = simulation.admit(Tokens([1] * 20), max_tokens=20)
    (chunk,) = simulation.scheduler.schedule().chunks
    for id_ in (7, 8):
        one.append(id_)
    drafted = ScheduledChunk(one, 0, chunk.count + 4, True, (7, 8, 9, 9))
    one.num_computed_tokens = chunk.count + 4
    tokens = [SampledToken(id_, None) for id_ in (7, 8, 3)]
    Committer(simulation.scheduler).commit([TokenRun(drafted, tokens)])
    assert one.num_computed_tokens == chunk.count + 2


def test_a_run_of_one_token_is_an_output_like_a_longer_one() -> None:
    one, ends = sequence(), Ends()
    (first,) = ends.emit(run_of(one, 11))
    (second,) = ends.emit(run_of(one, 12, 13, 14))
    assert [(first.offset, first.token_ids), (second.offset, second.token_ids)] == [
        (0, (11,)),
        (1, (12, 13, 14)),
    ]
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 1)
    assert second.usage is None
    assert (ends.totals.prompt_tokens, ends.totals.generated_tokens) == (3, 4)
    assert ends.expected == [one, one]
    assert not ends.ended


def test_a_prompt_counts_once_however_its_output_was_begun() -> None:
    one, ends = sequence(prior=[9, 9]), Ends()
    ends.emit(run_of(one, 11, 12))
    ends.emit(run_of(one, 13))
    assert ends.totals.prompt_tokens == 3


@pytest.mark.parametrize(
    ("tokens", "reason", "stop"),
    [((11, END), "stop", END), ((4,) * 8, "length", None)],
)
def test_the_last_token_of_a_run_may_be_the_end(
    tokens: tuple[int, ...], reason: str, stop: int | None
) -> None:
    one, ends = sequence(), Ends()
    (output,) = ends.emit(run_of(one, *tokens))
    assert (output.finish_reason, output.stop_token_id) == (reason, stop)
    assert ends.ended == [one]
    assert ends.expected == []


def test_an_error_after_tokens_comes_after_them() -> None:
    one, ends = sequence(), Ends()
    error = EngineError("no token is left")
    first, second = ends.emit(run_of(one, 11, error=error))
    assert first.token_ids == (11,)
    assert second.token_ids == ()
    assert second.error is not None
    assert second.error.message == error.message
    assert ends.ended == [one]


def test_logprobs_of_a_prompt_come_before_its_first_token() -> None:
    one, ends = sequence(prompt_logprobs=0), Ends()
    scores = PromptLogprobs(1, bytes(8), bytes(8), bytes(8))
    first, second = ends.emit(run_of(one, 11, scores=scores))
    assert (first.prompt_logprobs, first.offset, first.token_ids) == (scores, 0, ())
    assert first.usage is not None
    assert first.usage.completion_tokens == 0
    assert (second.offset, second.token_ids) == (0, (11,))
    assert one.scored == 3


def test_logprobs_of_tokens_come_with_them() -> None:
    one, ends = sequence(logprobs=1), Ends()
    run = run_of(one, 11)
    run.tokens = [SampledToken(11, TokenLogprobs(-0.5, ((11, -0.5),)))]
    (output,) = ends.emit(run)
    assert [each.logprob for each in output.logprobs] == [-0.5]


@pytest.mark.parametrize(
    ("segments", "kind"), [((Tokens([1, 2, 3]),), EngineError), ((rows(1, 2),), EmbeddingsError)]
)
def test_a_chunk_that_is_not_finite_ends_its_request_by_what_it_holds(
    segments: tuple[Segment, ...], kind: type[Exception]
) -> None:
    one, ends = sequence(*segments), Ends()
    (output,) = ends.emit(TokenRun(ScheduledChunk(one, 0, 2, True), finite=False))
    assert output.error is not None
    assert "not finite" in output.error.message
    assert ("embeddings" in output.error.message) == (kind is EmbeddingsError)
    assert ends.ended == [one]


def calls(num_sequences: int, steps: int, method: str | None) -> float:
    """Python calls of this project's code in a step that decodes, mean of `steps`."""
    settings = EngineSettings.of(model=str(model_dir()), device="cpu", num_threads=1)
    model = CausalModel.load(settings)
    limits = EngineLimits(
        num_pages=1024,
        page_size=32,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=512,
    )
    config = None if method is None else SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    engine = Core(model, limits, SECRET, speculator=speculator_of(config, None, limits, model))
    for number in range(num_sequences):
        prompt = Prompt.of(Tokens([(11 * at + 7919 * number) % 250 + 1 for at in range(40)]))
        engine.admit(make_request(str(number), prompt, 100))
    for _ in range(12):
        engine.step()
    count, source = 0, str(Path(inlay.__file__).parent)

    def counting(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(source):
            count += 1

    before = sys.getprofile()
    sys.setprofile(counting)
    try:
        for _ in range(steps):
            engine.step()
    finally:
        sys.setprofile(before)
    engine.close()
    return count / steps


@pytest.mark.parametrize(("method", "fixed", "each"), [(None, 230, 20), ("ngram", 280, 45)])
def test_a_step_that_decodes_takes_few_calls(method: str | None, fixed: int, each: int) -> None:
    one, many = calls(1, 20, method), calls(17, 20, method)
    assert one <= fixed
    assert (many - one) / 16 <= each
