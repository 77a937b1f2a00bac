"""Lines of batch files are what the plainest reader finds, whatever a file holds.

`python -m tests.fuzz.fuzz_lines` finds more.
"""

from tests.fuzz.fuzz_lines import check, fuzz, seeds


def test_files_of_every_kind_are_read_in_any_pieces() -> None:
    assert [check(data) for data in seeds()] == [True, True, *[False] * 7, True, True]


def test_mutations_are_refused_or_say_what_the_plainest_reader_reads() -> None:
    assert 0 < fuzz(3000, seed=5) < 3000
