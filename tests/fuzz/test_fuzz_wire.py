"""A little of the fuzzing of a connection's bytes, every time the tests run.

`python -m tests.fuzz.fuzz_wire` does the rest.
"""

from tests.fuzz.fuzz_wire import check, corpus, fuzz, seeds, small_limits


def test_what_was_found_is_read_alike_in_any_pieces() -> None:
    with small_limits():
        assert {check(data) for data in corpus()} == {True, False}


def test_the_corpus_still_holds_what_it_was_begun_with() -> None:
    with small_limits():
        assert set(seeds()) <= set(corpus())


def test_mutations_are_refused_or_read_as_they_were_sent() -> None:
    assert 0 < fuzz(5000, seed=3) < 5000
