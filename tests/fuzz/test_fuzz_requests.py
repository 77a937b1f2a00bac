"""A little of the fuzzing of requests, every time the tests run.

`python -m tests.fuzz.fuzz_requests` does the rest.
"""

import pytest

from tests.fuzz.fuzz_requests import TARGETS, bodies, check, corpus, fuzz


@pytest.mark.parametrize("target", TARGETS)
def test_every_body_of_the_corpus_ends_alike_with_and_without_lifting(target: str) -> None:
    assert {check(target, body) for body in corpus(target)} == {True, False}


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_still_begins_with_the_bodies_it_was_made_from(target: str) -> None:
    assert set(bodies(target).values()) <= set(corpus(target))


@pytest.mark.parametrize("target", TARGETS)
def test_mutations_are_refused_or_become_requests(target: str) -> None:
    assert 0 < fuzz(target, 1000, seed=2) < 1000
