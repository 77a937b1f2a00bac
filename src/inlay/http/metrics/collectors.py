"""Metrics that are read from the objects they are of, at each scrape."""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import inlay
from inlay.base.watched import WatchedFiles
from inlay.embedding.cache import ResultCache
from inlay.http.metrics.engine_health import health_of
from inlay.router import Router
from inlay.store import StoredPrompts
from inlay.transport.api import Loss, Worker

_MODEL = ("model_name",)

_OF_CACHE = {
    "hits": "Embeddings that were in the cache.",
    "joined": "Embeddings that another request was computing already.",
    "misses": "Embeddings that were computed.",
    "evictions": "Embeddings evicted to make room.",
    "refused": "Embeddings larger than the whole cache.",
}
_OF_STORE = {
    "hits": "Uses of stored embeddings answered from memory.",
    "loads": "Uses of stored embeddings read from a file.",
    "fetches": "Uses of stored embeddings fetched from the fleet.",
    "misses": "References that were not found.",
    "evictions": "Stored embeddings evicted to make room.",
    "expirations": "Stored embeddings that expired.",
    "disk_errors": "Reads, writes and removals of files that failed.",
}
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names of the sleep levels 0, 1 and 2."""


class Collected(Collector):
    """Collector of what a function yields."""

    def __init__(self, metrics: Callable[[], Iterator[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        return self._metrics()


def cache_metrics(cache: ResultCache) -> Iterator[Metric]:
    """Yield the metrics of the embedding cache."""
    yield GaugeMetricFamily("inlay:embedding_cache_entries", "Embeddings kept.", len(cache))
    yield GaugeMetricFamily(
        "inlay:embedding_cache_bytes", "Bytes that keeping them takes.", cache.kept.used
    )
    for name, text in _OF_CACHE.items():
        yield CounterMetricFamily(f"inlay:embedding_cache_{name}", text, getattr(cache, name))


def store_metrics(store: StoredPrompts) -> Iterator[Metric]:
    """Yield the metrics of the store of uploaded embeddings."""
    stats = store.stats()
    yield GaugeMetricFamily("inlay:prompt_store_entries", "Stored embeddings.", stats.count)
    yield GaugeMetricFamily(
        "inlay:prompt_store_pinned", "Stored embeddings that are pinned.", stats.pinned
    )
    size = GaugeMetricFamily(
        "inlay:prompt_store_bytes", "Bytes of stored embeddings, by tier.", labels=["tier"]
    )
    size.add_metric(["memory"], stats.memory_bytes)
    size.add_metric(["disk"], stats.disk_bytes)
    size.add_metric(["nats"], stats.shared_bytes)
    yield size
    for name, text in _OF_STORE.items():
        yield CounterMetricFamily(f"inlay:prompt_store_{name}", text, getattr(stats, name))


def file_metrics(watched: Sequence[WatchedFiles]) -> Iterator[Metric]:
    """Yield which of the files that are read again when they change could not be."""
    failures = CounterMetricFamily(
        "inlay:reload_failures", "Readings of changed files that failed.", labels=["files"]
    )
    failing = GaugeMetricFamily(
        "inlay:reload_failing",
        "1 if the files as they are now cannot be used, and the old ones are; else 0.",
        labels=["files"],
    )
    for files in watched:
        if files.paths:
            failures.add_metric([files.name], files.failures)
            failing.add_metric([files.name], files.failing)
    yield from (failures, failing)


def build_metrics(build: str) -> Iterator[Metric]:
    """Yield which code runs."""
    info = GaugeMetricFamily(
        "inlay:build_info",
        "1, for the version and the code that runs.",
        labels=["version", "build"],
    )
    info.add_metric([inlay.__version__, build], 1)
    yield info


def router_metrics(router: Router) -> Iterator[Metric]:
    """Yield the waiting choices and the routing decisions, by model."""
    waiting = GaugeMetricFamily(
        "inlay:router_requests_waiting",
        "Choices waiting in this frontend because all workers are full.",
        labels=_MODEL,
    )
    held = router.waiting()
    for model in {card.name for card in router.models()} | set(held):
        waiting.add_metric([model], held.get(model, 0))
    yield waiting
    share = GaugeMetricFamily(
        "inlay:weights_share",
        "Share of each set of weights in the requests for a model.",
        labels=(*_MODEL, "weights_id", "dtype"),
    )
    for model, shares in router.shares().items():
        for weights, part in shares.items():
            share.add_metric([model, weights.weights_id, weights.dtype], part)
    yield share
    lost = CounterMetricFamily(
        "inlay:workers_lost",
        "Workers that were lost: silent, no sign of life came; restarted, the engine's end.",
        labels=(*_MODEL, "reason"),
    )
    losses = router.losses()
    # From 0 on: an increase from nothing is not seen.
    reasons: tuple[Loss, ...] = typing.get_args(Loss)
    for model in {card.name for card in router.models()} | {model for model, _ in losses}:
        for reason in reasons:
            lost.add_metric([model, reason], losses.get((model, reason), 0))
    yield lost
    yield GaugeMetricFamily(
        "inlay:workers_ready", "Workers that may be sent requests.", len(router.ready())
    )
    yield GaugeMetricFamily(
        "inlay:discovery_reachable",
        "1 if what tells of workers (NATS) answers, else 0.",
        int(router.unreachable() is None),
    )
    stats = router.stats
    decisions = CounterMetricFamily(
        "inlay:router_decisions",
        "Choices sent to a worker; further attempts follow the loss of a worker.",
        labels=(*_MODEL, "attempt"),
    )
    for (model, further), count in list(stats.decisions.items()):
        decisions.add_metric([model, "further" if further else "first"], count)
    yield decisions
    for name, text, counts in (
        ("handovers", "Prompts computed at a prefill worker for another worker.", stats.handovers),
        ("blocks", "Blocks of prompts looked up in the workers' prefix caches.", stats.looked_up),
        ("hit_blocks", "Blocks found in the prefix cache of the chosen worker.", stats.hits),
    ):
        metric = CounterMetricFamily(f"inlay:router_{name}", text, labels=_MODEL)
        for model, count in list(counts.items()):
            metric.add_metric([model], count)
        yield metric


def worker_metrics(workers: Sequence[Worker], missing: Mapping[str, str]) -> Iterator[Metric]:
    """Yield health, sleep state and the last probe of workers, from their cards; none is asked.

    Args:
        workers: that are ready.
        missing: those that should be ready and are not, with the reason.
    """
    labels = (*_MODEL, "engine")

    def gauge(name: str, text: str, *more: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=(*labels, *more))

    sleep = gauge(
        "vllm:engine_sleep_state",
        "1 for the worker's state: awake, weights_offloaded (level 1), discard_all (level 2).",
        "sleep_state",
    )
    well = gauge("inlay:worker_well", "1 if a worker is healthy, else 0.")
    age = gauge("inlay:engine_probe_age_seconds", "Seconds since the last probe.")
    took = gauge("inlay:engine_probe_seconds", "Duration of the last probe, or its timeout.")
    for worker in workers:
        found = health_of(worker)
        named = (found.model, found.id)
        well.add_metric(named, found.well)
        for level, state in enumerate(_SLEEP_STATES):
            sleep.add_metric((*named, state), worker.card.asleep == level)
        if found.last_probe is not None:
            age.add_metric(named, found.last_probe.age)
            took.add_metric(named, found.last_probe.seconds)
    yield from (sleep, well, age, took)
    yield GaugeMetricFamily(
        "inlay:workers_missing", "Workers that should be ready and are not.", len(missing)
    )
