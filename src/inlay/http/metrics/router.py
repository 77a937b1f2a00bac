"""Metrics of a frontend's router."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inlay.router import Router

_MODEL = ("model_name",)


class RouterMetrics(Collector):
    """Collector of the router's counters."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """Yield the waiting choices and the routing decisions, by model."""
        waiting = GaugeMetricFamily(
            "inlay:router_requests_waiting",
            "Choices waiting in this frontend because all workers are full.",
            labels=_MODEL,
        )
        held = self._router.waiting()
        for model in {card.name for card in self._router.models()} | set(held):
            waiting.add_metric([model], held.get(model, 0))
        yield waiting
        yield GaugeMetricFamily(
            "inlay:discovery_reachable",
            "1 if what tells of workers (NATS) answers, else 0.",
            int(self._router.unreachable() is None),
        )
        tally = self._router.stats
        decisions = CounterMetricFamily(
            "inlay:router_decisions",
            "Choices sent to a worker; further attempts follow the loss of a worker.",
            labels=(*_MODEL, "attempt"),
        )
        for (model, further), count in list(tally.decisions.items()):
            decisions.add_metric([model, "further" if further else "first"], count)
        yield decisions
        for name, text, counts in (
            (
                "inlay:router_handovers",
                "Prompts computed at a prefill worker for another worker.",
                tally.handovers,
            ),
            (
                "inlay:router_blocks",
                "Blocks of prompts looked up in the workers' prefix caches.",
                tally.looked_up,
            ),
            (
                "inlay:router_hit_blocks",
                "Blocks found in the prefix cache of the chosen worker.",
                tally.hits,
            ),
        ):
            metric = CounterMetricFamily(name, text, labels=_MODEL)
            for model, count in list(counts.items()):
                metric.add_metric([model], count)
            yield metric
