"""Published weights in the dtype they are served in: as near to float32 as transformers is.

Every prompt and every greedy token after it, over HTTP, by what the server says the most likely
tokens are.
"""

import pytest

from tests.published.conftest import checkpoint
from tests.published.numbers import (
    FARTHER,
    NEAR,
    Answer,
    Distance,
    distance,
    gaps,
    in_float32,
    logprobs,
    reference,
)
from tests.published.told import GEMMA, QWEN, told

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]


REFUSED = 2.0
"""Ratio of a single answer that is no rounding: over it a start is refused too."""


@pytest.fixture(scope="module", params=[QWEN, GEMMA])
def judged(request: pytest.FixtureRequest) -> list[tuple[Answer, Distance, list[float]]]:
    """Each answer, its distances, and how far its tokens are from being float32's first choice."""
    answers = told(request.param)
    with reference(checkpoint(request.param)) as model:
        rounded = logprobs(model, answers)
        with in_float32(model):
            exact = logprobs(model, answers)
    return [
        (answer, distance(answer, truth, own), gaps(answer, truth))
        for answer, truth, own in zip(answers, exact, rounded, strict=True)
    ]


def test_logprobs_are_as_near_to_float32_as_those_of_transformers(
    judged: list[tuple[Answer, Distance, list[float]]],
) -> None:
    """All prompts together, read and decoded; roundings in one answer go together."""
    for part in (
        [far.of(0, len(answer.prompt) - 1) for answer, far, _ in judged],
        [far.of(len(answer.prompt) - 1) for answer, far, _ in judged],
    ):
        print(" ".join(f"{each.ratio():.2f}" for each in part))
        assert Distance.all_of(part).ratio() <= FARTHER
        assert all(each.ratio() <= REFUSED for each in part)


def test_each_greedy_token_is_float32s_but_for_near_ties(
    judged: list[tuple[Answer, Distance, list[float]]],
) -> None:
    for _, _, behind in judged:
        print(f"largest gap {max(behind):.3f}, {sum(gap > 0 for gap in behind)} not the first")
        assert max(behind) < NEAR
