"""Gemma 3 270M, a base model whose norms are loud."""

import openai
import pytest

from tests.killed import differs_only_where_two_tokens_are_near, served_and_killed
from tests.published.conftest import WITHIN, checkpoint
from tests.published.numbers import NEAR
from tests.published.prompts import CODE, GEMMA

pytestmark = [pytest.mark.published, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def name() -> str:
    return GEMMA


def test_a_stream_goes_on_where_its_worker_was_killed() -> None:
    _, expected, found = served_and_killed(checkpoint(GEMMA), CODE, 80, 24, within=WITHIN)
    differs_only_where_two_tokens_are_near(expected, found, cut=24, near=NEAR)


@pytest.mark.parametrize(
    ("prompt", "known"),
    [
        ("Paris is the capital of", "France"),
        ("1, 2, 3, 4, 5, 6, 7,", "8, 9, 10"),
        ("Monday, Tuesday, Wednesday,", "Thursday"),
    ],
)
def test_it_knows_what_every_model_knows(client: openai.OpenAI, prompt: str, known: str) -> None:
    said = client.completions.create(model="m", prompt=prompt, max_tokens=16, temperature=0)
    assert known in said.choices[0].text
