"""Images over HTTP: `inlay serve --engine sglang`, asked by the `openai` client."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from inlay.media.families import spec_of
from tests.engines import images
from tests.engines.images_over_http import (
    REFUSED,
    Expected,
    a_name_that_a_client_gives_is_no_key,
    a_url_of_this_machine_is_not_fetched,
    files_mix_with_embeddings_of_both_kinds,
    harm_is_a_400_and_nobody_else_notices,
    images_are_answered_as_by_transformers,
)
from tests.engines.sglang.serving import PATCH
from tests.engines.sglang.test_over_http import serve
from tests.serving import Served


@pytest.fixture(scope="module")
def path() -> Path:
    return images.directory_of("qwen2_5_vl", PATCH)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Served]:
    with serve(path, "--enable-mm-embeds") as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(path: Path) -> Expected:
    spec = spec_of(path)
    assert spec is not None
    return Expected(path, spec)


def test_images_are_answered_as_by_transformers_alone_and_together(
    client: openai.OpenAI, expected: Expected
) -> None:
    images_are_answered_as_by_transformers(client, expected)


def test_files_mix_with_embeddings_of_both_kinds(client: openai.OpenAI, expected: Expected) -> None:
    files_mix_with_embeddings_of_both_kinds(client, expected)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_harms_others_is_a_400_and_nobody_else_notices(
    server: Served, client: openai.OpenAI, expected: Expected, name: str
) -> None:
    harm_is_a_400_and_nobody_else_notices(server, client, expected, name)


def test_a_name_that_a_client_gives_is_no_key(server: Served) -> None:
    a_name_that_a_client_gives_is_no_key(server)


def test_a_url_of_this_machine_is_not_fetched(server: Served) -> None:
    a_url_of_this_machine_is_not_fetched(server)
