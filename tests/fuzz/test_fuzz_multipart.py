"""What fuzzing multipart bodies found, every time the tests run.

`python -m tests.fuzz.fuzz_multipart` finds more.
"""

import random

from tests.fuzz.fuzz_multipart import CORPUS, WORDS, check, seeds, small_limits
from tests.fuzz.mutation import mutated

FOUND = [path.read_bytes() for path in sorted(CORPUS.iterdir())]


def test_what_was_found_reads_alike_in_any_pieces() -> None:
    with small_limits():
        assert {check(data) for data in FOUND} == {True, False}


def test_the_corpus_still_holds_what_it_was_begun_with() -> None:
    assert set(seeds()) <= set(FOUND)


def test_mutations_are_refused_or_say_what_the_plainest_reader_reads() -> None:
    rng = random.Random(3)
    with small_limits():
        accepted = sum(check(mutated(rng.choice(FOUND), FOUND, WORDS, rng)) for _ in range(3000))
    assert 0 < accepted < 3000
