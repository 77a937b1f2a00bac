"""A little of the fuzzing, every time the tests run; `fuzz_gguf` does the rest."""

from tests.fuzz.fuzz_gguf import fuzz


def test_mutations_are_refused_or_are_files_whose_tensors_lie_in_them() -> None:
    assert 0 < fuzz(2_000, seed=2) < 2_000
