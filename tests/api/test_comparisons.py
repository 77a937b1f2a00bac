"""Comparisons of queries and documents: bounded, off the event loop, ended with their client."""

import asyncio
import http.client
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from inlay.api.openai.embeddings import route, scoring, sides, similarity, stored
from inlay.api.openai.embeddings.gathering import Array
from inlay.api.openai.embeddings.similarity import Comparison, max_sim
from inlay.base import pace
from inlay.embedding.cache import Bundle
from inlay.http.server import SMALL_BYTES, Server
from tests import output_models as models
from tests.api.test_stored_documents import (
    ONE,
    QUERY,
    answered,
    ask,
    bge,
    kept,
    ranks,
    refusal,
    store,
    url,
)
from tests.embedding_models import tiny_embedding
from tests.live import fleet, until

__all__ = ["bge", "url"]

TEXTS = [f"cold wind counts {'ships ' * n}" for n in range(40)]
TOKENS = {"output": "tokens"}
DEEP = json.loads("[" * 80 + "]" * 80)


def vectors(rows: int, width: int = 16, seed: int = 0) -> Bundle:
    numbers = np.random.default_rng([seed, rows]).standard_normal((rows, width))
    return {"tokens": numbers.astype(np.float32)}


def refs(url: str, texts: list[str] = TEXTS, **body: Any) -> list[dict[str, str]]:
    return [{"ref": ref} for ref in kept(url, texts, outputs=["tokens"], **body)]


def on_the_loop(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> tuple[list[bool], Callable[..., Any]]:
    """Return a list that tells of each call of a function if it was made on an event loop."""
    seen: list[bool] = []
    real = getattr(module, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        try:
            asyncio.get_running_loop()
            seen.append(True)
        except RuntimeError:
            seen.append(False)
        return real(*arguments, **named)

    monkeypatch.setattr(module, name, watched)
    return seen, real


@pytest.mark.parametrize(("asked", "found"), [(1, 1), (3, 700), (700, 3), (1100, 1300)])
def test_max_sim_by_slabs_is_that_of_the_whole(asked: int, found: int) -> None:
    query, document = vectors(asked)["tokens"], vectors(found, seed=1)["tokens"]
    wanted = (query.astype(np.float64) @ document.T).max(axis=1).sum()
    assert max_sim(query, document) == pytest.approx(wanted, rel=1e-5)
    assert max_sim(query[:0], document) == max_sim(query, document[:0]) == 0


@pytest.mark.parametrize("width", [16, 128, 384, 1024, 4096])
def test_no_product_is_so_large_that_its_threads_wait_for_each_other(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = np.matmul
    sizes: list[int] = []

    def watched(rows: Array, others: Array) -> Array:
        assert len(rows) > 1
        assert others.shape[2] > 1
        sizes.append(len(rows) * others.shape[1] * others.shape[2])
        found: Array = real(rows, others)
        return found

    monkeypatch.setattr(np, "matmul", watched)
    for asked, found in ((32, 60), (61, 61), (1, 300), (300, 1), (700, 1100)):
        query, document = vectors(asked, width)["tokens"], vectors(found, width, 1)["tokens"]
        wanted = (query.astype(np.float64) @ document.T).max(axis=1).sum()
        # Of one vector the products are of either sign, and their sum is small.
        near = 1e-6 * asked * width**0.5
        assert max_sim(query, document) == pytest.approx(wanted, rel=1e-5, abs=near)
    # OpenBLAS: SMP_THRESHOLD_MIN x GEMM_MULTITHREAD_THRESHOLD.
    assert 0 < max(sizes) <= 65_536 * 4


@pytest.mark.parametrize("pairs", [False, True])
def test_a_document_has_the_same_score_alone_and_among_others(pairs: bool) -> None:
    query = vectors(33, 128)
    documents = [vectors(rows, 128, 1) for rows in (5, 700, 0, 64, 1, 3000)]
    queries = [query] * len(documents) if pairs else [query]
    together = Comparison(queries, documents, "tokens").scores()
    alone = [Comparison([query], [each], "tokens").scores()[0] for each in documents]
    assert together == alone


def peak(comparison: Comparison) -> int:
    """Return the bytes of memory that a comparison takes at most."""
    tracemalloc.start()
    comparison.scores()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


@pytest.mark.parametrize("pairs", [False, True])
def test_a_long_document_takes_no_more_memory_than_is_reserved(pairs: bool) -> None:
    documents = [vectors(20_000), vectors(3)]
    queries = [vectors(2_000, seed=1)] * (len(documents) if pairs else 1)
    comparison = Comparison(queries, documents, "tokens")
    # Threads of other tests' servers may take some memory at the same time: the least of three.
    assert min(peak(comparison) for _ in range(3)) < comparison.num_bytes + 16_384
    assert comparison.num_bytes < 2_000_000


def test_sparse_vectors_without_a_common_index_have_the_score_0() -> None:
    def sparse(**weights: float) -> Bundle:
        return {
            "sparse.indices": np.array([int(name[1:]) for name in weights], np.int32),
            "sparse.values": np.array([*weights.values()], np.float32),
        }

    query = sparse(i3=2, i8=1, i900=4)
    others = [sparse(i3=1, i900=0.5), sparse(i900=1), sparse(), sparse(i1000=3), sparse(i4=3)]
    assert Comparison([query], others, "sparse").scores() == [4, 4, 0, 0, 0]
    assert Comparison(others, [query] * 5, "sparse").scores() == [4, 4, 0, 0, 0]


def test_what_nobody_waits_for_ends_before_the_next_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    left, slabs = threading.Event(), [0]

    def leave() -> None:
        slabs[0] += 1
        if slabs[0] == 3:
            left.set()
        pace.yield_gil()

    monkeypatch.setattr(similarity, "yield_gil", leave)
    comparison = Comparison([vectors(600)], [vectors(6_000)], "tokens")
    with pytest.raises(pace.Unwanted):
        pace.while_wanted(left, comparison.scores)
    assert slabs == [3]


def test_a_reference_that_is_there_often_is_scored_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = refs(url, TEXTS[:3])
    seen, _ = on_the_loop(monkeypatch, similarity, "max_sim")
    wanted = dict(ranks(url, some, **TOKENS))
    assert len(seen) == 3
    often = dict(ranks(url, some * 50, **TOKENS))
    assert len(seen) == 6
    assert [often[place] for place in range(150)] == [wanted[place % 3] for place in range(150)]
    queries = refs(url, TEXTS[:2], role="query")
    pairs = {"text_1": (queries + queries[:1]) * 20, "text_2": some * 20}
    assert len(answered(url, "/v1/score", **pairs, **TOKENS)["data"]) == 60
    assert len(seen) == 9


def test_too_many_multiplications_are_refused_before_one_is_made(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, (query,) = refs(url, TEXTS[:3]), refs(url, [QUERY], role="query")
    rows = [
        answered(url, "/v1/embeddings", input=text, outputs=["tokens"], role=role)["data"][0]
        for text, role in ((QUERY, "query"), *((text, "document") for text in TEXTS[:3]))
    ]
    asked, *found = (item["tokens"]["shape"][0] for item in rows)
    takes = asked * sum(found) * models.SIZE
    monkeypatch.setattr(similarity, "MAX_MULTIPLICATIONS", takes)
    body: dict[str, Any] = {"query": query, "documents": some * 2, **TOKENS}
    assert ask(url, **body).status_code == 200
    monkeypatch.setattr(similarity, "MAX_MULTIPLICATIONS", takes - 1)
    seen, _ = on_the_loop(monkeypatch, similarity, "max_sim")
    param, message = refusal(ask(url, **body))
    assert param == "documents"
    assert f"query with documents takes {takes} multiplications" in message
    assert f"at most {takes - 1} are allowed" in message
    assert seen == []


def test_a_comparison_ends_when_its_client_leaves(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"query": QUERY, "documents": refs(url), **TOKENS})
    begun, ended = threading.Event(), threading.Event()

    def until_left() -> None:
        begun.set()
        try:
            while True:
                pace.yield_gil()
                time.sleep(0.005)
        except pace.Unwanted:
            ended.set()
            raise

    monkeypatch.setattr(similarity, "yield_gil", until_left)
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", "/v1/rerank", body, {**ONE, "content-type": "application/json"})
    until(begun.is_set)
    connection.close()
    until(ended.is_set)


def test_many_short_texts_are_no_small_work_and_are_prepared_a_part_at_a_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    running, most = 0, 0
    run = Server.run_prepared

    async def watched(server: Server, size: int, function: Any, *given: Any, **named: Any) -> Any:
        nonlocal running, most
        if getattr(function, "__name__", "") != "_prepared":
            return await run(server, size, function, *given, **named)
        sizes.append(size)
        running += 1
        most = max(most, running)
        try:
            return await run(server, size, function, *given, **named)
        finally:
            running -= 1

    monkeypatch.setattr(Server, "run_prepared", watched)
    ask(url, query=QUERY, documents=["x"] * 600)
    assert most == 1
    assert len(sizes) == 3
    assert min(sizes) > SMALL_BYTES


def test_what_is_long_is_done_off_the_event_loop(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"content": [{"type": "text", "text": "cold"} for _ in range(5_000)]}
    seen, _ = on_the_loop(monkeypatch, sides, "check_depth")
    ask(url, query=QUERY, documents=["x", content])
    assert seen == [False]
    some = refs(url, embed_dtype="float16")
    watched: list[tuple[object, str, dict[str, Any]]] = [
        (stored, "_checked", {"documents": some}),
        (sides, "comparable", {"documents": TEXTS}),
        (scoring, "Comparison", {"documents": TEXTS}),
    ]
    for module, name, body in watched:
        seen, real = on_the_loop(monkeypatch, module, name)
        answered(url, query=QUERY, **body, **TOKENS)
        assert seen
        assert set(seen) == {False}, name
        monkeypatch.setattr(module, name, real)
    seen, _ = on_the_loop(monkeypatch, route, "output_shown")
    answered(url, "/v1/embeddings", input=TEXTS, outputs=["tokens"])
    assert seen == [False] * len(TEXTS)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"documents": ["x", {"ref": "REF"}], "max_tokens_per_doc": 3}, "max_tokens_per_doc", "documents[1] has ref"),
        ({"documents": [{"content": [{"type": "text", "text": "x"}]}], "document_prompt_name": "passage"}, "document_prompt_name", "documents[0] has content"),
        ({"query": {"ref": "REF"}, "documents": ["x"], "max_tokens_per_query": 3}, "max_tokens_per_query", "query has ref"),
        ({"query": {"ref": "REF"}, "documents": ["x"], "query_prompt_name": "query"}, "query_prompt_name", "query has ref"),
        ({"documents": [{"ref": "REF"}], "document_prompt_name": "none"}, "document_prompt_name", "has no prompt 'none'"),
        ({"documents": [{"content": [{"a": DEEP}]}]}, "documents[0].content", "more than 64"),
    ],
)  # fmt: skip
def test_fields_of_texts_are_refused_beside_what_is_no_text(
    e5: str, body: dict[str, Any], param: str, words: str
) -> None:
    found = refusal(ask(e5, **({"query": QUERY} | body)))
    assert found[0] == param
    assert words in found[1]


@pytest.fixture(scope="module")
def e5() -> Iterator[str]:
    with fleet(tiny_embedding("e5"), task="embed") as running:
        yield running.serve(store=store())


def test_fields_of_texts_that_keep_all_stand_beside_references(e5: str) -> None:
    (ref,) = kept(e5, ["cold wind"])
    plain = ranks(e5, [{"ref": ref}])
    assert ranks(e5, [{"ref": ref}], max_tokens_per_doc=0, query_prompt_name="query") == plain
