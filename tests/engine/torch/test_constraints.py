"""Constraints give the same logits as a plain check of every setting in every step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.engine.torch.sampling.constraints import Constraints
from inlay.engine.torch.sequence import Sequence
from inlay.request import Sampling
from tests.engine.torch.sequences import sequence_of
from tests.engine.torch.test_sampler import choose, logits

VOCAB, EOS, CPU = 13, (2, 5), torch.device("cpu")

ids = st.integers(0, VOCAB - 1)
words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=6).map(
    tuple
)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(50),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    logit_bias=st.dictionaries(ids, st.integers(-3, 3).map(float), max_size=4),
    bad_words=words,
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=9, unique=True).map(tuple),
)


def naive(row: Tensor, of: Sequence) -> Tensor:
    """The logits of one sequence, one setting after another."""
    found, sampling, output = row.clone(), of.sampling, tuple(of.output)
    for id_, bias in sampling.logit_bias.items():
        found[id_] += bias
    for word in sampling.bad_words:
        if (*output, word[-1])[-len(word) :] == word:
            found[word[-1]] = -torch.inf
    if len(output) < sampling.min_tokens:
        for id_ in {*EOS, *sampling.stop_token_ids}:
            found[id_] = -torch.inf
    if sampling.allowed_token_ids is not None:
        for id_ in set(range(VOCAB)) - set(sampling.allowed_token_ids):
            found[id_] = -torch.inf
    return found


@settings(max_examples=300)
@given(st.lists(samplings, min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=8))
def test_the_constraints_of_a_growing_output_are_those_of_a_search(
    batch: list[Sampling], output: list[int]
) -> None:
    constraints, rows = Constraints(VOCAB, EOS, CPU), logits(len(batch), vocab=VOCAB)
    sequences = [sequence_of(sampling) for sampling in batch]
    for id_ in [*output, 0]:
        expected = torch.stack([naive(row, of) for row, of in zip(rows, sequences, strict=True)])
        assert torch.equal(constraints.apply(rows, sequences), expected)
        for of in sequences:
            of.output.append(id_)
    for of in sequences:
        constraints.forget(of)
    assert not constraints.kept()


class Counted(tuple[Any, ...]):
    """A tuple that counts how often it is walked through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        type(self).walks += 1
        return super().__iter__()


class CountedBias(dict[int, float]):
    walks = 0

    def items(self) -> Any:
        type(self).walks += 1
        return super().items()


def test_long_settings_are_walked_through_once_and_not_in_every_step() -> None:
    sampling = Sampling(
        max_tokens=100,
        min_tokens=100,
        logit_bias=CountedBias(dict.fromkeys(range(VOCAB), 1.0)),
        bad_words=Counted(((1, 2), (3,))),
        stop_token_ids=Counted((4,)),
        allowed_token_ids=Counted(range(VOCAB)),
    )
    constraints, of = Constraints(VOCAB, EOS, CPU), sequence_of(sampling)
    seen = []
    for _ in range(20):
        constraints.apply(logits(1, vocab=VOCAB), [of])
        of.output.append(1)
        seen.append((Counted.walks, CountedBias.walks))
    assert set(seen) == {seen[0]}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e300},
        {"temperature": 1e300, "repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e300, "temperature": 0.0},
        {"repetition_penalty": 1e-300},
        {"frequency_penalty": 1e300, "presence_penalty": -1e300},
    ],
)
def test_settings_beyond_float32_warn_nobody_and_lift_no_ban(options: dict[str, Any]) -> None:
    row = logits(1)[0]
    allowed = (7, 8, 9)
    for seed in range(20):
        sampling = Sampling(max_tokens=9, seed=seed, allowed_token_ids=allowed, **options)
        assert choose(row, sequence_of(sampling, (7, 30), [8, 8, 40])) in allowed
