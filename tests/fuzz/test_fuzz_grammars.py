"""A little of the fuzzing, every time the tests run.

`python -m tests.fuzz.fuzz_grammars` does the rest.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from inlay import demo
from inlay.base.errors import InvalidRequestError
from inlay.engine.grammar.trial import Trial, TrialProcess
from tests.fuzz.fuzz_grammars import CORPUS, fuzz, grammar_in

FILES = sorted(CORPUS.iterdir())


@pytest.fixture(scope="module")
def process() -> Iterator[TrialProcess]:
    made = TrialProcess(demo.model_dir(), (0,))
    yield made
    made.close()


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_the_corpus_is_refused_by_its_count_or_compiles_within_the_limits(
    path: Path, process: TrialProcess
) -> None:
    grammar = grammar_in(path.read_bytes())
    assert grammar is not None
    if path.name.startswith("hostile-"):
        with pytest.raises(InvalidRequestError) as raised:
            Trial(process, grammar).run()
        assert "compiling it takes" not in raised.value.message
    else:
        assert Trial(process, grammar).run()


@pytest.mark.thorough
def test_what_is_let_pass_costs_little() -> None:
    accepted, _ = fuzz(500, seed=2)
    assert 0 < accepted < 500
