"""Metrics of the workers' health and sleep, from their cards; no worker is asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inlay.http.metrics.engine_health import health_of
from inlay.transport.api import Worker

_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names of the sleep levels 0, 1 and 2."""


class WorkerMetrics(Collector):
    """Collector of the workers' state.

    Args:
        workers: returns the ready workers.
        missing: returns the workers that should be ready and are not, with the reason.
    """

    def __init__(
        self, workers: Callable[[], Sequence[Worker]], missing: Callable[[], Mapping[str, str]]
    ) -> None:
        self._workers = workers
        self._missing = missing

    def collect(self) -> Iterator[Metric]:
        """Yield health, sleep state and the last probe, by model and worker."""
        labels = ("model_name", "engine")
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the worker's state: awake, weights_offloaded (level 1), discard_all (level 2).",
            labels=(*labels, "sleep_state"),
        )
        well = GaugeMetricFamily(
            "inlay:worker_well", "1 if a worker is healthy, else 0.", labels=labels
        )
        age = GaugeMetricFamily(
            "inlay:engine_probe_age_seconds", "Seconds since the last probe.", labels=labels
        )
        took = GaugeMetricFamily(
            "inlay:engine_probe_seconds",
            "Duration of the last probe, or its timeout.",
            labels=labels,
        )
        for worker in self._workers():
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
            "inlay:workers_missing",
            "Workers that should be ready and are not.",
            len(self._missing()),
        )
