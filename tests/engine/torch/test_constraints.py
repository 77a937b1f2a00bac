"""Constraints give the same logits as a plain check of every setting in every step."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.grammar.masks import Masks
from inlay.engine.torch.sampling import constraints
from inlay.engine.torch.sampling.constraints import (
    Bits,
    Constraints,
    forbid_by_row,
    forbid_packed,
)
from inlay.engine.torch.sequence import Sequence
from inlay.messages.request import Sampling
from tests.engine.torch.sequences import sequence_of
from tests.engine.torch.test_overlap import core, outcomes
from tests.engine.torch.test_sampler import choose, logits
from tests.engine.torch.test_speculation import EvenCosts, Oracle
from tests.engine.torch.test_speculation import core as guessing
from tests.engine.torch.test_step import load

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


@pytest.mark.thorough
@settings(max_examples=300)
@given(st.lists(samplings, min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=8))
def test_the_constraints_of_a_growing_output_are_those_of_a_search(
    batch: list[Sampling], output: list[int]
) -> None:
    made, rows = Constraints(VOCAB, EOS, CPU), logits(len(batch), vocab=VOCAB)
    sequences = [sequence_of(sampling) for sampling in batch]
    for id_ in [*output, 0]:
        expected = torch.stack([naive(row, of) for row, of in zip(rows, sequences, strict=True)])
        assert torch.equal(made.apply(rows, sequences), expected)
        for of in sequences:
            of.output.append(id_)
    for of in sequences:
        made.forget(of)
    assert not made.kept()


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
    made, of = Constraints(VOCAB, EOS, CPU), sequence_of(sampling)
    seen = []
    for _ in range(20):
        made.apply(logits(1, vocab=VOCAB), [of])
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


@settings(max_examples=200)
@given(st.data(), st.integers(1, 80), st.integers(1, 5))
def test_packed_masks_forbid_what_unpacked_ones_do(data: Any, vocab: int, count: int) -> None:
    """Of some rows, of a vocabulary of any size, with -inf and NaN among the logits."""
    size = -(-vocab // 8)
    rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
    allowed = {
        row: np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
        for row in rows
    }
    before = logits(count, vocab=vocab)
    before[0, 0], before[-1, -1] = -torch.inf, torch.nan
    expected = before.clone()
    for row, bits in allowed.items():
        for id_ in range(vocab):
            if not bits[id_ >> 3] >> (id_ & 7) & 1:
                expected[row, id_] = -torch.inf
    for forbid in (forbid_by_row, forbid_packed):
        found = before.clone()
        forbid(found, allowed)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("speculation", [False, True], ids=["one by one", "drafts"])
def test_outputs_with_packed_masks_are_those_with_unpacked_ones(
    speculation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With masks that are late, and after drafts that a grammar refuses."""
    model, late, turn = load("llama"), Masks.late, itertools.count()

    def sometimes(masks: Masks, sequences: Any, *until: float | None) -> Any:
        bound = [one for one in sequences if one.grammar is not None]
        found = late(masks, sequences, *until)
        return found | {one: None for one in bound if next(turn) % 3 == 2}

    calls = 0

    def packed(rows: Tensor, allowed: Mapping[int, Bits]) -> None:
        nonlocal calls
        calls += 1
        forbid_packed(rows, allowed)

    grammars = Grammars(Path(model.path), model.vocab_size, model.eos_token_ids)
    try:
        expected = outcomes(core(overlap=False), grammars)
        monkeypatch.setattr(constraints, "forbid_by_row", packed)
        monkeypatch.setattr(Masks, "late", sometimes)
        oracle = Oracle({name: of[0] for name, of in expected.items()})
        engine = guessing(EvenCosts(oracle, 12)) if speculation else core(overlap=False)
        found = outcomes(engine, grammars)
    finally:
        grammars.close()
    assert {name: of[:2] for name, of in found.items()} == {
        name: of[:2] for name, of in expected.items()
    }
    assert calls > 10
    assert next(turn) > 20
    assert bool(engine.stats().num_accepted_tokens) == speculation
