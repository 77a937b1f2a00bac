"""Metrics of the embedding cache."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inlay.embedding.cache import ResultCache

_COUNTERS = {
    "hits": "Embeddings that were in the cache.",
    "joined": "Embeddings that another request was computing already.",
    "misses": "Embeddings that were computed.",
    "evictions": "Embeddings evicted to make room.",
    "refused": "Embeddings larger than the whole cache.",
}


class CacheMetrics(Collector):
    """Collector of a cache's counters."""

    def __init__(self, cache: ResultCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the cache."""
        yield GaugeMetricFamily(
            "inlay:embedding_cache_entries", "Embeddings kept.", len(self._cache)
        )
        yield GaugeMetricFamily(
            "inlay:embedding_cache_bytes", "Bytes that keeping them takes.", self._cache.bytes
        )
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(
                f"inlay:embedding_cache_{name}", text, getattr(self._cache, name)
            )
