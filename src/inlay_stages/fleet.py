"""The one graph of each pipeline in a fleet: workers that say another are left out.

The rule looks at cards alone, in no order, so every frontend computes the same.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inlay.base.errors import OverloadedError
from inlay.messages.card import ModelCard
from inlay.transport.api import Worker
from inlay_stages.cards import graph_of

log = logging.getLogger(__name__)


class _Claim(NamedTuple):
    """Order of graphs; the least is kept."""

    since: float
    fewer: int
    identity: bytes


class Graphs:
    """As `FleetPart`: leaves out workers of graphs that are not their pipeline's.

    A pipeline's graph is the one that the fleet has had longest (`Rollout.since`); of those that
    are as old, it is that of the most workers.
    """

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}

    @property
    def refused(self) -> Mapping[str, str]:
        """Reasons by the id of each worker that was left out."""
        return self._refused

    def accept(self, workers: Sequence[Worker], announced: Sequence[ModelCard]) -> list[Worker]:
        """Return the workers without those of an unlike graph, in their order.

        Args:
            workers: that this frontend reaches.
            announced: cards of all that are ready, reached from here or not.
        """
        chosen = _chosen(announced)
        refused, self._refused = self._refused, {}
        kept = []
        for worker in workers:
            graph = graph_of(worker.card)
            if graph is None or graph.identity == chosen.get(graph.name, graph.identity):
                kept.append(worker)
                continue
            reason = f"its graph is not the one that other workers of `{graph.name}` have"
            self._refused[worker.id] = reason
            if worker.id not in refused:
                log.warning("the worker %s is asked nothing: %s", worker.id, reason)
        return kept

    def missing(self, name: str, models: Sequence[ModelCard]) -> OverloadedError | None:
        """As `FleetPart`: the name of a pipeline of which only other stages are there."""
        for card in models:
            graph = graph_of(card)
            if graph is not None and graph.name == name:
                return OverloadedError(
                    f"The stage {graph.front} of the pipeline `{name}` is not ready.",
                    retry_after=1,
                )
        return None


def _chosen(cards: Sequence[ModelCard]) -> dict[str, bytes]:
    """Return the identity of each pipeline's graph, by its name."""
    claims: dict[str, dict[bytes, _Claim]] = {}
    for card in cards:
        graph = graph_of(card)
        if graph is not None:
            of_name = claims.setdefault(graph.name, {})
            known = of_name.get(graph.identity, _Claim(card.rollout.since, 0, graph.identity))
            since = min(known.since, card.rollout.since)
            of_name[graph.identity] = known._replace(since=since, fewer=known.fewer - 1)
    return {name: min(found.values()).identity for name, found in claims.items()}
