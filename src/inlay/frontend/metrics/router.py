"""What a frontend's router counts, in Prometheus' form."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inlay.router import Router

_MODEL = ("model_name",)


class RouterMetrics(Collector):
    """Reads the router's own counters whenever someone looks."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """What waits, and what was decided, by model."""
        waiting = GaugeMetricFamily(
            "inlay:router_requests_waiting",
            "Choices that wait in this frontend because all workers are full.",
            labels=_MODEL,
        )
        held = self._router.waiting()
        for model in {card.name for card in self._router.models()} | set(held):
            waiting.add_metric([model], held.get(model, 0))
        yield waiting
        tally = self._router.stats
        decisions = CounterMetricFamily(
            "inlay:router_decisions",
            "Choices sent to a worker; further ones go on elsewhere when their worker is gone.",
            labels=(*_MODEL, "attempt"),
        )
        for (model, further), count in list(tally.decisions.items()):
            decisions.add_metric([model, "further" if further else "first"], count)
        yield decisions
        for name, text, counts in (
            (
                "inlay:router_blocks",
                "Blocks of prompts looked for in what workers have cached.",
                tally.looked_up,
            ),
            (
                "inlay:router_hit_blocks",
                "Those of them that the chosen worker has, as far as is known.",
                tally.hits,
            ),
        ):
            metric = CounterMetricFamily(name, text, labels=_MODEL)
            for model, count in list(counts.items()):
                metric.add_metric([model], count)
            yield metric
