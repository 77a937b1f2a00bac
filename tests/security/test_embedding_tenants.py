"""Embeddings of one tenant reveal nothing to another."""

from collections.abc import Iterator

import httpx
import pytest

from tests.embedding_models import tiny_embedding
from tests.live import Fleet, fleet

KEYS = ["first-tenant-key", "second-tenant-key"]


@pytest.fixture(scope="module")
def served() -> Iterator[Fleet]:
    with fleet(tiny_embedding("bert"), task="embed") as running:
        yield running


def embed(url: str, key: str, text: str, **options: str) -> None:
    body = {"input": [text], **options}
    response = httpx.post(
        url + "/v1/embeddings", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=180
    )
    assert response.status_code == 200, response.text


def counted(url: str, name: str) -> float:
    lines = httpx.get(url + "/metrics", timeout=180).text.splitlines()
    return float(
        next(line for line in lines if line.startswith(f"inlay:embedding_cache_{name} ")).split()[1]
    )


def test_an_embedding_is_kept_for_its_own_tenant(served: Fleet) -> None:
    url = served.serve(api_key=KEYS, embedding_cache_bytes=1 << 20)
    for key in (KEYS[0], KEYS[0], KEYS[1], KEYS[1]):
        embed(url, key, "the harbour town")
    assert (counted(url, "misses_total"), counted(url, "hits_total")) == (2, 2)
    embed(url, KEYS[0], "the harbour town", cache_salt="mine")
    assert counted(url, "misses_total") == 3


def test_tenants_share_embeddings_when_the_operator_says_so(served: Fleet) -> None:
    url = served.serve(api_key=KEYS, embedding_cache_bytes=1 << 20, share_prefix_cache=True)
    for key in KEYS:
        embed(url, key, "cold wind")
    assert (counted(url, "misses_total"), counted(url, "hits_total")) == (1, 1)
