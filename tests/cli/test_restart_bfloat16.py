"""`kill -9` of a worker in the middle of a stream of the bundled model, which is in bfloat16."""

import pytest

from inlay import demo
from inlay.engine.torch.native import kernels
from tests.killed import Step, differs_only_where_two_tokens_are_near, served_and_killed

NEAR = 0.25
"""Logits; as in `tests/engine/torch/test_bfloat16.py`."""

LENGTH, CUT = 300, 60
LONG, LONG_CUT = 2000, 1300
"""Tokens where the numbers are the same: of an answer, and before its worker dies."""

pytestmark = pytest.mark.slow


def killed(length: int, cut: int, *words: str) -> tuple[str, list[Step], list[Step]]:
    prompt = demo.examples().completions[0].prompt
    return served_and_killed(demo.model_dir(), prompt, length, cut, *words)


def test_an_answer_whose_worker_is_killed_goes_on_and_differs_only_where_two_tokens_are_near() -> (
    None
):
    exactness, expected, found = killed(LENGTH, CUT, "--no-batch-invariant")
    assert exactness == "rounded"
    differs_only_where_two_tokens_are_near(expected, found, cut=CUT, near=NEAR)


@pytest.mark.skipif(
    (native := kernels()) is None or not native.products.pairs,
    reason="no products of pairs of bfloat16 here",
)
def test_with_batch_invariance_it_goes_on_with_the_same_numbers() -> None:
    exactness, expected, found = killed(LONG, LONG_CUT, "--batch-invariant")
    assert (exactness, found) == ("exact", expected)
