"""Gemma 3 270M, a base model whose norms are loud."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.killed import differs_only_where_two_tokens_are_near, served_and_killed
from tests.published.conftest import checkpoint, served_by_default
from tests.published.forms import all_forms_have_one_answer
from tests.published.numbers import NEAR, Steps, expect_checked, is_exact
from tests.published.told import CODE, GEMMA, TEXTS
from tests.serving import Served

pytestmark = [pytest.mark.published, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served_by_default(checkpoint(GEMMA)) as served:
        yield served


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


def test_the_check_at_its_start_passed(http: httpx.Client) -> None:
    expect_checked(http)


def test_text_ids_rows_mixtures_and_references_have_one_answer(server: Served) -> None:
    all_forms_have_one_answer(server, checkpoint(GEMMA), (CODE, TEXTS[3]))


def test_neighbours_change_nothing_but_near_ties(http: httpx.Client) -> None:
    alone = [Steps.of(http, text) for text in TEXTS]
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        together = list(pool.map(lambda text: Steps.of(http, text), TEXTS))
    for text, one, other in zip(TEXTS, together, alone, strict=True):
        one.expect(other, exact=is_exact(http), what=text)


def test_a_stream_goes_on_where_its_worker_was_killed() -> None:
    _, expected, found = served_and_killed(checkpoint(GEMMA), CODE, 120, 40)
    differs_only_where_two_tokens_are_near(expected, found, cut=40, near=NEAR)
