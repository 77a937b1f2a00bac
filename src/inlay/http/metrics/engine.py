"""Metrics of the workers' engines, under vLLM's names where the meaning is the same."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from inlay.base.errors import InlayError
from inlay.base.single_flight import Paced
from inlay.messages.card import Stats
from inlay.messages.commands import ReadStats
from inlay.transport.api import Worker

PACE = 0.5
"""Seconds from one look at the workers to the next, however often somebody wants one."""

WITHIN = 0.5
"""Seconds a worker has to answer; the metrics of one that does not are left out."""

_LABELS = ("model_name", "engine")

_GAUGES = (
    ("vllm:num_requests_running", "Sequences in the engine's steps.", "running"),
    ("vllm:num_requests_waiting", "Sequences that wait to be admitted.", "waiting"),
    ("vllm:kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", "kv_cache_usage"),
    ("inlay:kv_cache_blocks", "Blocks of the KV cache.", "blocks_total"),
    ("inlay:worker_prompt_store_bytes",
        "Bytes of stored embeddings held by the worker.", "kept_bytes"),
    ("inlay:image_cache_bytes",
        "Bytes of the rows of encoded images held by the engine.", "image_cache_bytes"),
    ("inlay:kv_host_bytes", "Bytes of keys and values kept in host memory.", "kv_host_bytes"),
    ("inlay:kv_disk_bytes", "Bytes of files of keys and values.", "kv_disk_bytes"),
    ("inlay:held_payloads", "Payloads held for the next stage of a pipeline.", "held_payloads"),
    ("inlay:held_payload_bytes",
        "Bytes of the payloads held for the next stage of a pipeline.", "held_bytes"),
)  # fmt: skip
_COUNTERS = (
    ("vllm:num_preemptions", "Preempted sequences.", "preemptions"),
    ("vllm:prefix_cache_queries",
        "Prompt positions looked up in the prefix cache.", "prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt positions found in the prefix cache.", "cached_tokens"),
    ("inlay:engine_rows", "Embedding vectors in the prompts of the engine.", "rows_served"),
    ("inlay:engine_generated_tokens",
        "Generated tokens, including those cut off later.", "generated_tokens"),
    ("vllm:spec_decode_num_drafts", "Speculated drafts.", "num_drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens of drafts.", "num_draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens",
        "Tokens of drafts that became output.", "num_accepted_tokens"),
    ("inlay:spec_decode_num_forced_draft_tokens",
        "Of the tokens of drafts, those that a grammar forced.", "num_forced_draft_tokens"),
    ("inlay:spec_decode_num_forced_accepted_tokens",
        "Of them, those that became output.", "num_forced_accepted_tokens"),
    ("inlay:engine_steps", "Steps of the engine.", "steps"),
    ("inlay:engine_positions", "Positions computed.", "progress"),
    ("inlay:worker_prompt_store_hits",
        "Uses of stored embeddings whose rows the worker had.", "kept_hits"),
    ("inlay:worker_prompt_store_misses",
        "Uses of stored embeddings whose rows were sent to the worker.", "kept_misses"),
    ("inlay:worker_prompt_store_evictions",
        "Stored embeddings evicted from the worker's memory.", "kept_evictions"),
    ("inlay:kv_pages_fetched",
        "Pages of keys and values that came from other workers.", "kv_pages_fetched"),
    ("inlay:kv_pages_given",
        "Pages of keys and values that were given to other workers.", "kv_pages_given"),
    ("inlay:kv_pages_offloaded",
        "Pages of keys and values that were kept when the cache evicted them.",
        "kv_pages_offloaded"),
    ("inlay:kv_pages_loaded",
        "Pages of keys and values that came back from host memory or disk.", "kv_pages_loaded"),
    ("inlay:kv_pages_from_disk",
        "Of those that came back, pages that came from disk; the others from host memory.",
        "kv_pages_from_disk"),
    ("inlay:kv_pages_refused",
        "Kept pages of keys and values that were dropped because they were damaged.",
        "kv_pages_refused"),
    ("inlay:kv_disk_refused_files",
        "Files of keys and values that were dropped because they were torn, changed or another's.",
        "kv_disk_refused_files"),
    ("inlay:kv_disk_errors",
        "Reads, writes and removals of files of keys and values that failed.", "kv_disk_errors"),
    ("inlay:image_cache_hits",
        "Uses of images whose rows the engine had or was computing.", "image_cache_hits"),
    ("inlay:image_cache_misses", "Images that the engine encoded.", "image_cache_misses"),
    ("inlay:image_cache_evictions",
        "Encoded images evicted from the engine's memory.", "image_cache_evictions"),
    ("inlay:fetched_payloads",
        "Payloads fetched from the workers of earlier stages of a pipeline.", "fetched_payloads"),
    ("inlay:engine_busy_seconds",
        "Seconds in which the model computed a batch; engines for embeddings only.",
        "busy_seconds"),
)  # fmt: skip
"""Name of a metric, its help, and the field of `Stats` that it shows."""


class _Seen(NamedTuple):
    """One worker's counters at the last refresh; `stats` is None if it did not answer."""

    model: str
    id: str
    stats: Stats | None


class EngineMetrics(Collector):
    """Collector of the workers' counters at the last `refresh`.

    Args:
        workers: returns the ready workers.
    """

    def __init__(self, workers: Callable[[], Sequence[Worker]]) -> None:
        self._workers = workers
        self._seen: list[_Seen] = []
        self._looks = Paced(self._look, PACE)

    async def refresh(self) -> None:
        """Ask all workers at once, for at most `WITHIN` s; calls within `PACE` s share it."""
        await self._looks.result()

    async def _look(self) -> None:
        self._seen = list(await asyncio.gather(*map(_seen, self._workers())))

    def stats(self) -> dict[str, Stats | None]:
        """Counters by worker at the last `refresh`; None where a worker did not answer."""
        return {worker.id: worker.stats for worker in self._seen}

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, by model and worker."""
        up = GaugeMetricFamily(
            "inlay:worker_answers", "1 if a ready worker answered, else 0.", labels=_LABELS
        )
        for worker in self._seen:
            up.add_metric([worker.model, worker.id], worker.stats is not None)
        yield up
        places = GaugeMetricFamily(
            "inlay:worker_places", "Sequences that a worker has at a time.", labels=_LABELS
        )
        for ready in self._workers():
            places.add_metric([ready.card.name, ready.id], ready.card.limits.max_num_seqs)
        yield places
        distance = GaugeMetricFamily(
            "inlay:self_check_distance",
            "Error of a model's numbers over the rounding of its own code; 1 is rounding.",
            labels=(*_LABELS, "result"),
        )
        for ready in self._workers():
            if (check := ready.card.self_check) is not None:
                labels = [ready.card.name, ready.id, check.result]
                distance.add_metric(labels, check.distance)
        yield distance
        yield from _canaries(self._workers())
        yield from _media_cache(self._seen)
        yield _tokens_of_steps(self._seen)
        for family, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, field in rows:
                metric = family(name, text, labels=_LABELS)
                for worker in self._seen:
                    if worker.stats is not None:
                        metric.add_metric([worker.model, worker.id], _value(worker.stats, field))
                yield metric


def _media_cache(seen: Sequence[_Seen]) -> Iterator[Metric]:
    """VLLM's names of what `inlay:image_cache_*` counts."""
    queries = CounterMetricFamily("vllm:mm_cache_queries", "Images looked up.", labels=_LABELS)
    hits = CounterMetricFamily("vllm:mm_cache_hits", "Of them, those found.", labels=_LABELS)
    for worker in seen:
        if worker.stats is not None:
            found, missed = worker.stats.image_cache_hits, worker.stats.image_cache_misses
            queries.add_metric([worker.model, worker.id], found + missed)
            hits.add_metric([worker.model, worker.id], found)
    yield from (queries, hits)


def _tokens_of_steps(seen: Sequence[_Seen]) -> Metric:
    """VLLM's histogram of a step's tokens: how many steps and tokens there were, no buckets."""
    tokens = HistogramMetricFamily(
        "vllm:iteration_tokens_total",
        "Tokens of an engine's step, of prompts and outputs; its count and sum alone.",
        labels=_LABELS,
    )
    for worker in seen:
        if (stats := worker.stats) is not None:
            computed = stats.prompt_tokens - stats.cached_tokens + stats.generated_tokens
            tokens.add_metric([worker.model, worker.id], [("+Inf", stats.steps)], computed)
    return tokens


def _canaries(workers: Sequence[Worker]) -> Iterator[Metric]:
    failures = CounterMetricFamily(
        "inlay:self_check_canary_failures",
        "Wrong answers of a worker to its own request.",
        labels=_LABELS,
    )
    distance = GaugeMetricFamily(
        "inlay:self_check_canary_distance",
        "Relative distance of a worker's last answer to its own request from its first one.",
        labels=_LABELS,
    )
    for worker in workers:
        if (canary := worker.card.canary) is not None:
            labels = [worker.card.name, worker.id]
            failures.add_metric(labels, canary.failures)
            distance.add_metric(labels, canary.distance)
    yield failures
    yield distance


def _value(stats: Stats, field: str) -> float:
    if field == "kv_cache_usage":
        return stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    found: float = getattr(stats, field)
    return found


async def _seen(worker: Worker) -> _Seen:
    name, id_ = worker.card.name, worker.id
    try:
        return _Seen(name, id_, await worker.call(ReadStats(), WITHIN))
    except InlayError:
        return _Seen(name, id_, None)
