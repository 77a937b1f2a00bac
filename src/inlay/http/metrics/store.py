"""Metrics of a frontend's store of uploaded embeddings."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inlay.store import StoredPrompts

_COUNTERS = {
    "hits": "Uses of stored embeddings answered from memory.",
    "loads": "Uses of stored embeddings read from a file.",
    "fetches": "Uses of stored embeddings fetched from the fleet.",
    "misses": "References that were not found.",
    "evictions": "Stored embeddings evicted to make room.",
    "expirations": "Stored embeddings that expired.",
    "disk_errors": "Reads, writes and removals of files that failed.",
}


class StoreMetrics(Collector):
    """Collector of a store's counters."""

    def __init__(self, store: StoredPrompts) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the store."""
        stats = self._store.stats()
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
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"inlay:prompt_store_{name}", text, getattr(stats, name))
