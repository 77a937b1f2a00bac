"""Published checkpoints, served as `inlay serve` does by default."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from scripts.published import directory_of, obtain

from tests.serving import Served, serving

WITHIN = 400.0
"""Seconds for a start on a busy machine."""


def checkpoint(name: str) -> Path:
    """The model's directory.

    Never fetched by a test, which would take the time that another one has.
    """
    if not directory_of(name).exists():
        pytest.fail(f"{name} is not there: `make test-published` fetches it", pytrace=False)
    return obtain(name)


@contextmanager
def served_by_default(path: Path, *arguments: object) -> Iterator[Served]:
    """A server with every core, rows allowed, and otherwise as it comes."""
    with serving(
        path,
        "--served-model-name",
        "m",
        "--enable-prompt-embeds",
        *arguments,
        environment={"OMP_NUM_THREADS": str(os.cpu_count())},
        within=WITHIN,
    ) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=400) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=400) as client:
        yield client
