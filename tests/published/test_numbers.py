"""Published weights in the dtype they are served in: as near to float32 as transformers is.

Every prompt and every greedy token after it, over HTTP, by what the server says the most likely
tokens are.
"""

import httpx
import pytest

from tests.published.conftest import checkpoint
from tests.published.forms import all_forms_have_one_answer
from tests.published.numbers import (
    FARTHER,
    NEAR,
    Answer,
    Distance,
    Steps,
    answers,
    distance,
    expect_checked,
    gaps,
    in_float32,
    is_exact,
    logprobs,
    reference,
)
from tests.published.prompts import CODE, GEMMA, PROMPTS, QWEN, TEXTS
from tests.serving import Served

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]


REFUSED = 2.0
"""Ratio of a single answer that is no rounding: over it a start is refused too."""


# In the order of the modules before and behind this one, each of which has one of them.
@pytest.fixture(scope="module", params=[GEMMA, QWEN])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def together(http: httpx.Client) -> list[Answer]:
    """Answers to all prompts, asked at once."""
    return answers(http, PROMPTS)


@pytest.fixture(scope="module")
def judged(name: str, together: list[Answer]) -> list[tuple[Answer, Distance, list[float]]]:
    """Each answer, its distances, and how far its tokens are from being float32's first choice."""
    with reference(checkpoint(name)) as model:
        rounded = logprobs(model, together)
        with in_float32(model):
            exact = logprobs(model, together)
    return [
        (answer, distance(answer, truth, own), gaps(answer, truth))
        for answer, truth, own in zip(together, exact, rounded, strict=True)
    ]


def test_the_check_at_its_start_passed(http: httpx.Client) -> None:
    expect_checked(http)


def test_text_ids_rows_mixtures_and_references_have_one_answer(server: Served, name: str) -> None:
    all_forms_have_one_answer(server, checkpoint(name), CODE + TEXTS[3])


def test_neighbours_change_nothing_but_near_ties(
    http: httpx.Client, together: list[Answer]
) -> None:
    for prompt, other in list(zip(PROMPTS, together, strict=True))[:4]:
        # Computed anew, not read from what is cached of it.
        found = Steps.of(http, prompt, cache_salt="alone")
        said = other.said[len(other.prompt) - 1 :]
        found.expect(Steps(other.output, said), exact=is_exact(http), what=str(prompt))


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
