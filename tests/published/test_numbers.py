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
    for answer, far, _ in judged:
        first = len(answer.prompt) - 1
        read = Distance(far.served[:first], far.transformers[:first])
        decoded = Distance(far.served[first:], far.transformers[first:])
        print(f"{read.ratio():.2f} read, {decoded.ratio():.2f} decoded")
        assert read.ratio() <= FARTHER
        assert decoded.ratio() <= FARTHER


def test_each_greedy_token_is_float32s_but_for_near_ties(
    judged: list[tuple[Answer, Distance, list[float]]],
) -> None:
    for _, _, behind in judged:
        print(f"largest gap {max(behind):.3f}, {sum(gap > 0 for gap in behind)} not the first")
        assert max(behind) < NEAR
