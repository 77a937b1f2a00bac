"""A little of the fuzzing of the bounds on JSON's structure, every time the tests run.

`python -m tests.fuzz.fuzz_structure` does the rest.
"""

from tests.fuzz.fuzz_structure import check, corpus, fuzz, seeds, small_limits


def test_what_was_found_is_refused_where_it_passes_a_bound_and_nowhere_else() -> None:
    with small_limits():
        assert {check(data) for data in corpus()} == {True, False}


def test_the_corpus_still_holds_what_it_was_begun_with() -> None:
    assert set(seeds()) <= set(corpus())


def test_mutations_are_refused_where_they_pass_a_bound_and_nowhere_else() -> None:
    assert 0 < fuzz(3000, seed=3) < 3000
