"""The one graph of each pipeline in a fleet: workers that say another are left out."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from inlay.transport.api import Worker

log = logging.getLogger(__name__)


class Graphs:
    """Keeps the graph that each pipeline has, by its name.

    It is that of the workers there are; of those that come later with another, none is asked
    anything. Where unlike ones are there from the beginning, it is that of the most workers.
    """

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}
        self._refused: dict[str, str] = {}

    @property
    def refused(self) -> Mapping[str, str]:
        """Reasons by the id of each worker that was left out."""
        return self._refused

    def alike(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the workers without those of an unlike graph, in their order."""
        said: dict[str, Counter[bytes]] = {}
        found: list[tuple[Worker, str, bytes]] = []
        for worker in workers:
            stage = worker.card.stage
            if stage is None:
                found.append((worker, "", b""))
                continue
            name, graph = stage.graph.name, stage.graph.identity
            found.append((worker, name, graph))
            said.setdefault(name, Counter())[graph] += 1
        known, self._known = self._known, {}
        for name, graphs in said.items():
            before = known.get(name)
            most = graphs.most_common(1)[0][0]
            self._known[name] = before if before is not None and before in graphs else most
        refused, self._refused = self._refused, {}
        kept = []
        for worker, name, graph in found:
            if graph == self._known.get(name, graph):
                kept.append(worker)
                continue
            reason = f"its graph is not the one that other workers of `{name}` have"
            self._refused[worker.id] = reason
            if worker.id not in refused:
                log.warning("the worker %s is asked nothing: %s", worker.id, reason)
        return kept
