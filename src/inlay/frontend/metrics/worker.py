"""What the workers' cards say of how they are, in Prometheus' form; nobody is asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inlay.frontend.metrics.engine_health import health_of
from inlay.transport.api import Worker

_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""As vLLM names the levels 0, 1 and 2."""


class WorkerMetrics(Collector):
    """How the workers are whenever someone looks.

    Args:
        workers: those that are ready now.
        missing: those that should be and are not, and why.
    """

    def __init__(
        self, workers: Callable[[], Sequence[Worker]], missing: Callable[[], Mapping[str, str]]
    ) -> None:
        self._workers = workers
        self._missing = missing

    def collect(self) -> Iterator[Metric]:
        """Health, sleep and the last probe, by model and worker."""
        labels = ("model_name", "engine")
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "awake 1: takes requests. weights_offloaded 1: sleeps at level 1. discard_all 1: at level 2.",
            labels=(*labels, "sleep_state"),
        )
        well = GaugeMetricFamily(
            "inlay:worker_well", "Whether nothing speaks against a worker.", labels=labels
        )
        age = GaugeMetricFamily(
            "inlay:engine_probe_age_seconds", "Since the engine was last tried.", labels=labels
        )
        took = GaugeMetricFamily(
            "inlay:engine_probe_seconds",
            "What that took, or had taken when it was given up.",
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
