"""A little of the fuzzing, every time the tests run.

`python -m tests.fuzz.fuzz_tensors` does the rest.
"""

from pathlib import Path

import pytest

from tests.fuzz.fuzz_tensors import CORPUS, check, fuzz

FILES = sorted(CORPUS.iterdir())


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_the_corpus_is_accepted_or_refused_as_its_names_say(path: Path) -> None:
    assert (check(path.read_bytes()) is None) == path.name.startswith("hostile-")


def test_mutations_are_refused_or_are_tensors_within_the_limits() -> None:
    accepted, _ = fuzz(20_000, seed=2, corpus=CORPUS)
    assert 0 < accepted < 20_000
