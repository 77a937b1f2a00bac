"""The sampler against transformers' logits processors; choices independent of batch and worker."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inlay.engine.torch.sampling.draws import WIDTHS
from inlay.engine.torch.sampling.sampler import SampledToken, Sampler
from inlay.engine.torch.sequence import Sequence
from inlay.messages.request import Sampling
from tests.engine.torch.sequences import sequence_of

VOCAB = 400
EOS = (2, 5)
CPU = torch.device("cpu")


def sequence(
    prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **options: Any
) -> Sequence:
    return sequence_of(Sampling(max_tokens=1000, **options), prompt, list(output))


def logits(rows: int, *, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(vocab, EOS, CPU)


def choices(of: Sampler, rows: Tensor, batch: list[Sequence]) -> list[SampledToken]:
    """The token chosen for each sequence; there always is one."""
    found = [choice for choice in of.sample(rows, batch) if isinstance(choice, SampledToken)]
    assert len(found) == len(batch)
    return found


def choose(row: Tensor, of: Sequence, *, vocab: int = VOCAB) -> int:
    return choices(sampler(vocab), row[None], [of])[0].token_id


def frequencies(row: Tensor, draws: int = 10_000, vocab: int = VOCAB, **options: Any) -> Tensor:
    """Share of each id among draws with seeds 0, 1, ..."""
    many = [sequence(seed=seed, **options) for seed in range(draws)]
    picked = torch.zeros(vocab)
    one = sampler(vocab)
    for start in range(0, draws, 2000):
        batch = many[start : start + 2000]
        ids = [choice.token_id for choice in choices(one, row.expand(len(batch), -1), batch)]
        picked += torch.bincount(torch.tensor(ids), minlength=vocab)
    return picked / draws


def chi_square_deviation(shares: Tensor, expected: Tensor, draws: int = 10_000) -> float:
    """Chi-square's distance from its mean in standard deviations.

    Ids expected under 5 times are pooled.
    """
    common = expected * draws >= 5
    parts = [(shares[common] - expected[common]) ** 2 / expected[common]]
    rest = expected[~common].sum()
    if rest * draws >= 5:
        parts.append(((shares[~common].sum() - rest) ** 2 / rest)[None])
    terms = torch.cat(parts)
    freedom = max(1, len(terms) - 1)
    return (float(terms.sum()) * draws - freedom) / float(np.sqrt(2 * freedom))


REFERENCES: list[tuple[dict[str, Any], list[Any]]] = [
    ({}, []),
    ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    ({"top_k": 7}, [TopKLogitsWarper(7)]),
    ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
    ({"top_k": 12, "top_p": 0.9}, [TopKLogitsWarper(12), TopPLogitsWarper(0.9)]),
    (
        {"temperature": 1.3, "min_p": 0.02, "top_k": 40, "top_p": 0.7},
        [
            TemperatureLogitsWarper(1.3),
            MinPLogitsWarper(0.02),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.7),
        ],
    ),
    ({"min_p": 0.01, "top_p": 0.95}, [MinPLogitsWarper(0.01), TopPLogitsWarper(0.95)]),
]


@pytest.mark.parametrize(("options", "processors"), REFERENCES, ids=lambda value: str(value)[:40])
def test_draws_have_the_distribution_transformers_processors_leave(
    options: dict[str, Any], processors: list[Any]
) -> None:
    row = logits(1)[0]
    expected = LogitsProcessorList(processors)(torch.zeros(1, 0, dtype=torch.long), row[None])[
        0
    ].softmax(-1)
    shares = frequencies(row, **options)
    assert not (shares[expected == 0] > 0).any()
    assert chi_square_deviation(shares, expected) < 3


@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, {"top_k": 900}, {"min_p": 1e-4}, {"top_p": 0.999}]
)
def test_a_flat_distribution_over_a_wide_vocabulary_is_truncated_as_exactly(
    options: dict[str, Any],
) -> None:
    """More tokens are left than the first candidates hold, so the later widths are used."""
    vocab = 12_000
    row = logits(1, vocab=vocab, scale=0.5)[0]
    probabilities, order = row.softmax(-1).to(torch.float64).sort(descending=True)
    if "top_p" in options:
        kept = int((probabilities.cumsum(0) < options["top_p"]).sum()) + 1
    elif "top_k" in options:
        kept = options["top_k"]
    else:
        kept = int((probabilities >= options["min_p"] * probabilities[0]).sum())
    assert kept > WIDTHS[0]
    allowed = set(order[:kept].tolist())
    many = [sequence(seed=seed, **options) for seed in range(300)]
    drawn = {choice.token_id for choice in choices(sampler(vocab), row.expand(300, -1), many)}
    assert drawn <= allowed
    assert len(drawn) > 200


def test_the_widths_of_the_search_do_not_change_what_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab = 3000
    rows = logits(8, vocab=vocab, scale=1.0)
    mixed = [
        sequence(seed=4, top_p=0.9),
        sequence(seed=5, top_p=0.4, min_p=0.01),
        sequence(seed=6, top_k=700),
        sequence(seed=7, top_k=3, top_p=0.5),
        sequence(seed=8, min_p=0.001),
        sequence(seed=9, min_p=0.9),
        sequence(seed=10, top_k=2000, top_p=0.99),
        sequence(seed=11, top_k=2000, min_p=1e-9, top_p=0.99),
    ]
    outcomes = []
    for widths in ((), (1, 10, 100), (256, 1200), (2999,), (5000,)):
        monkeypatch.setattr("inlay.engine.torch.sampling.draws.WIDTHS", widths)
        outcomes.append([choice.token_id for choice in choices(sampler(vocab), rows, mixed)])
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_greedy_is_the_first_of_the_largest_logits() -> None:
    rows = logits(3)
    rows[1, [7, 300]] = 50.0
    rows[2, :] = 1.0
    batch = [sequence(temperature=0.0) for _ in range(3)]
    chosen = [choice.token_id for choice in choices(sampler(), rows, batch)]
    assert chosen == [int(rows[0].argmax()), 7, 0]


def test_a_greedy_output_does_not_end_before_its_least_length() -> None:
    row = logits(1)[0]
    row[EOS[0]] = 50.0
    asked: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2}
    row_without = row.clone()
    row_without[list(EOS)] = -torch.inf
    assert choose(row, sequence(output=(5,), **asked)) == int(row_without.argmax())
    assert choose(row, sequence(output=(5, 6), **asked)) == EOS[0]


def test_a_temperature_next_to_zero_is_greedy() -> None:
    row = logits(1)[0]
    assert choose(row, sequence(temperature=1e-6, seed=3)) == int(row.argmax())
    assert choose(row, sequence(temperature=1e-300, seed=3)) == int(row.argmax())


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_the_narrowest_bounds_are_greedy_even_on_ties(options: dict[str, Any]) -> None:
    row = logits(1)[0]
    row[[20, 90]] = 30.0
    expected = {20, 90} if "min_p" in options else {20}
    assert {choose(row, sequence(seed=seed, **options)) for seed in range(20)} == expected


def test_top_k_beyond_the_vocabulary_means_all() -> None:
    row = logits(1)[0]
    for seed in range(20):
        assert choose(row, sequence(seed=seed, top_k=10**9)) == choose(row, sequence(seed=seed))


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output() -> None:
    row = logits(1)[0]
    prompt, output = (3, 9, 9, 250), (9, 17)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *output]]), row[None])[
        0
    ]
    shares = frequencies(row, repetition_penalty=1.7, prompt=prompt, output=output)
    assert chi_square_deviation(shares, expected.softmax(-1)) < 3
    row[9], row[4] = 40.0, 30.0
    assert choose(row, sequence(prompt, output, temperature=0.0, repetition_penalty=1.3)) == 9
    assert choose(row, sequence(prompt, output, temperature=0.0, repetition_penalty=1.4)) == 4


def test_frequency_and_presence_penalties_count_the_output_alone() -> None:
    row = torch.zeros(VOCAB)
    row[10], row[11] = 5.0, 3.0
    seen: dict[str, Any] = {"prompt": (10, 10, 10), "output": (10, 10)}
    assert choose(row, sequence(temperature=0.0, frequency_penalty=0.9, **seen)) == 10
    assert choose(row, sequence(temperature=0.0, frequency_penalty=1.1, **seen)) == 11
    assert choose(row, sequence(temperature=0.0, presence_penalty=1.9, **seen)) == 10
    assert choose(row, sequence(temperature=0.0, presence_penalty=2.1, **seen)) == 11
    assert choose(row, sequence(temperature=0.0, presence_penalty=2.0, prompt=(10,) * 9)) == 10
    both = sequence(
        temperature=0.0, presence_penalty=-2.0, frequency_penalty=-0.1, prompt=(), output=(12,)
    )
    row[12] = 3.0
    assert choose(row, both) == 12


def test_penalties_follow_an_output_as_it_grows() -> None:
    """Compare a sampler that follows the output with one that sees it for the first time."""
    options: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "seed": 8,
    }
    growing = sequence((1, 2, 3), **options)
    steady = sampler()
    rows = logits(150, scale=1.0)
    for row in rows:
        token = choices(steady, row[None], [growing])[0].token_id
        assert token == choose(row, sequence((1, 2, 3), tuple(growing.output), **options))
        growing.output.append(token)
    assert len(set(growing.output)) > 64


def test_a_tally_is_kept_until_it_is_forgotten_and_only_for_penalties() -> None:
    kept, plain = sequence((1,), frequency_penalty=0.5), sequence((1,))
    steady = sampler()
    choices(steady, logits(2), [kept, plain])
    assert len(steady) == 1
    steady.forget(plain)
    assert len(steady) == 1
    steady.forget(kept)
    steady.forget(kept)
    assert len(steady) == 0


def test_ids_the_vocabulary_lacks_do_no_harm() -> None:
    row = logits(1)[0]
    odd = sequence(
        (10**6, -1, 3),
        (10**7,),
        temperature=0.0,
        repetition_penalty=1.0001,
        frequency_penalty=1e-4,
        stop_token_ids=(10**6,),
        min_tokens=9,
        logit_bias={10**6: 5.0},
    )
    assert choose(row, odd) == int(row.argmax())


def test_end_and_stop_tokens_are_banned_before_min_tokens() -> None:
    row = torch.zeros(VOCAB)
    row[[2, 5, 77, 80]] = torch.tensor([90.0, 80.0, 70.0, 60.0])
    options: dict[str, Any] = {
        "temperature": 0.0,
        "min_tokens": 2,
        "stop_token_ids": (77,),
        "logit_bias": {2: 100.0},
    }
    assert [choose(row, sequence(output=(9,) * count, **options)) for count in range(3)] == [
        80,
        80,
        2,
    ]


def test_a_bias_can_leave_one_token() -> None:
    row = logits(1)[0]
    ban = {id_: -100.0 for id_ in range(VOCAB) if id_ != 123}
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 3},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
    ]
    for options in choices:
        assert choose(row, sequence(logit_bias=ban, **options)) == 123


def test_what_has_probability_zero_is_never_drawn() -> None:
    row = torch.full((VOCAB,), -torch.inf)
    row[[0, 8, 399]] = torch.tensor([-torch.inf, 1.0, 1.0])
    for options in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 1e-9}):
        assert {choose(row, sequence(seed=seed, **options)) for seed in range(40)} == {8, 399}


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(value: float) -> None:
    rows = logits(3)
    expected = [choose(row, sequence(seed=1, top_p=0.9)) for row in rows]
    rows[1] = value
    several: list[dict[str, Any]] = [{"top_p": 0.9}, {}, {"logprobs": 5}]
    for options in several:
        batch = [
            sequence(seed=1, top_p=0.9),
            sequence(seed=1, **options),
            sequence(seed=1, top_p=0.9),
        ]
        ids = [choice.token_id for choice in choices(sampler(), rows, batch)]
        assert (ids[0], ids[2]) == (expected[0], expected[2])
        assert 0 <= ids[1] < VOCAB


def test_the_logits_are_left_as_they_are() -> None:
    rows = logits(2)
    before = rows.clone()
    choices(
        sampler(),
        rows,
        [sequence((1,), repetition_penalty=2.0, logit_bias={4: 9.0}), sequence(min_tokens=4)],
    )
    assert torch.equal(rows, before)


def test_logprobs_are_of_the_models_own_distribution() -> None:
    rows = logits(4)
    batch = [
        sequence(logprobs=3, temperature=0.1, top_k=2, logit_bias={50: 100.0}, seed=1),
        sequence(temperature=0.0),
        sequence(logprobs=0, temperature=0.0),
        sequence(logprobs=10**6, temperature=0.0),
    ]
    found = choices(sampler(), rows, batch)
    expected = rows.log_softmax(-1)
    first, none, alone, whole = (choice.logprobs for choice in found)
    assert none is None
    assert found[0].token_id == 50
    assert first is not None
    assert first.logprob == pytest.approx(float(expected[0, 50]), abs=1e-5)
    top = expected[0].topk(3)
    assert [id_ for id_, _ in first.top] == top.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert alone is not None
    assert alone.top == ()
    assert alone.logprob == pytest.approx(float(expected[2].max()), abs=1e-5)
    assert whole is not None
    assert len(whole.top) == VOCAB


def test_logprobs_of_named_ids_stand_in_the_place_of_the_best_whoever_else_is_there() -> None:
    rows = logits(4, seed=4)
    named = (7, 399, 0, 7)
    batch = [
        sequence(logprobs=2, temperature=0.0),
        sequence(logprobs=0, logprob_token_ids=named, temperature=0.0),
        sequence(logprobs=0, logprob_token_ids=(3,), temperature=1.0, seed=5),
        sequence(temperature=0.0),
    ]
    found = choices(sampler(), rows, batch)
    best, several, one, none = (choice.logprobs for choice in found)
    assert best
    assert several
    assert one
    assert none is None
    expected = rows.log_softmax(dim=-1)
    assert [id_ for id_, _ in several.top] == list(named)
    assert [id_ for id_, _ in one.top] == [3]
    assert [id_ for id_, _ in best.top] == rows[0].topk(2).indices.tolist()
    for place, told in ((0, best), (1, several), (2, one)):
        shown = [logprob for _, logprob in told.top]
        assert shown == pytest.approx(
            [float(expected[place, id_]) for id_, _ in told.top], abs=1e-5
        )
        own = float(expected[place, found[place].token_id])
        assert told.logprob == pytest.approx(own, abs=1e-5)
        alone = choices(sampler(), rows[place : place + 1], [batch[place]])[0]
        assert alone.logprobs is not None
        assert [id_ for id_, _ in alone.logprobs.top] == [id_ for id_, _ in told.top]


def test_equal_logprobs_are_listed_by_id() -> None:
    row = torch.zeros(VOCAB)
    row[[9, 200]] = 4.0
    chosen = choices(sampler(), row[None], [sequence(logprobs=4, temperature=0.0)])[0]
    assert chosen.logprobs is not None
    assert [id_ for id_, _ in chosen.logprobs.top] == [9, 200, 0, 1]


some_ids = st.lists(st.integers(0, VOCAB - 1), max_size=20).map(tuple)

samplings = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
        "top_k": st.sampled_from([0, 1, 3, 50, 300, 10_000]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.7]),
        "min_tokens": st.integers(0, 30),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
        "logprobs": st.integers(0, 5),
        "seed": st.integers(-(2**63), 2**63 - 1),
    },
)
sequences = st.builds(
    lambda options, prompt, output: sequence(prompt, output, **options),
    samplings,
    some_ids,
    some_ids,
)


@settings(max_examples=150)
@given(
    st.lists(sequences, min_size=1, max_size=6),
    st.integers(0, 10**6),
    st.randoms(use_true_random=False),
)
def test_a_choice_is_the_same_alone_and_in_any_company(
    batch: list[Sequence], seed: int, random: Any
) -> None:
    # Half-precision logits, as models give them, are full of ties.
    rows = logits(len(batch), seed=seed).to(torch.bfloat16).to(torch.float32)
    alone = [choices(sampler(), row[None], [one])[0] for row, one in zip(rows, batch, strict=True)]
    order = list(range(len(batch)))
    random.shuffle(order)
    together = choices(sampler(), rows[order], [batch[index] for index in order])
    assert together == [alone[index] for index in order]
    for one, choice in zip(batch, alone, strict=True):
        check_choice(one, choice)


def check_choice(one: Sequence, choice: SampledToken) -> None:
    assert 0 <= choice.token_id < VOCAB
    if len(one.output) < one.sampling.min_tokens:
        assert choice.token_id not in {*EOS, *one.sampling.stop_token_ids}
    if one.sampling.logprobs is None:
        assert choice.logprobs is None
    else:
        assert choice.logprobs is not None
        assert choice.logprobs.logprob <= 0
        assert len(choice.logprobs.top) == one.sampling.logprobs


@given(samplings, some_ids, st.integers(1, 12), st.integers(0, 10**6))
def test_a_resumed_sequence_goes_on_as_it_would_have(
    options: dict[str, Any], prompt: tuple[int, ...], length: int, seed: int
) -> None:
    rows = logits(length + 5, seed=seed)
    first = sequence(prompt, **options)
    worker = sampler()
    for row in rows:
        first.output.append(choices(worker, row[None], [first])[0].token_id)
    second = sequence_of(msgspec.structs.replace(first.sampling), prompt, first.output[:length])
    worker = sampler()
    for row in rows[length:]:
        second.output.append(choices(worker, row[None], [second])[0].token_id)
    assert second.output == first.output


ALIKE: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.7},
    "of the best": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "of as many as it takes": {"top_p": 0.9},
    "penalised": {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "with logprobs": {"logprobs": 5},
    "held back": {"min_tokens": 9, "logit_bias": {7: 2.0}, "bad_words": ((3, 4), (5,))},
    "of a list": {"allowed_token_ids": (1, 2, 3)},
}


@pytest.mark.parametrize("kind", ALIKE)
def test_drawing_does_not_wait_for_the_device(kind: str) -> None:
    """A meta tensor has no data: whatever looked at any would raise."""
    device = torch.device("meta")
    batch = [sequence((3, 9), (3,), **ALIKE[kind]), sequence(temperature=0.0)]
    drawn = Sampler(VOCAB, EOS, device).draw(torch.empty(2, VOCAB, device=device), batch)
    assert (drawn.ids.shape, drawn.ids.device) == ((2,), device)
