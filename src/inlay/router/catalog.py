"""Models and adapters by the names that clients use."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from inlay.card import Adapter, ModelCard
from inlay.errors import NotFoundError, OverloadedError
from inlay.request import Task
from inlay.router.pool import PoolKey, content_of
from inlay.router.shares import Weights, called, drawn, leader, shares_of
from inlay.transport.api import Worker

log = logging.getLogger(__name__)

_NAMED = 5
"""Names of served models at most in the error of one that is not."""

RETIRED_SECONDS = 3600.0
"""Seconds without a worker after which a model is no longer served, where others are.

Until then, and for ever where no other is, its workers are thought to come back.
"""
MAX_GONE = 256
"""Models without a worker at most that are remembered; those that went first are forgotten."""


class ServedModel:
    """A model, or one of its adapters, that a client named.

    Attributes:
        card: of the model.
        adapter: that was named, or None.
        adapter_name: its name, or None.
        name: in responses.
        positions_before: positions that stand before every prompt; they count as the prompt's.
        max_len: positions of a client's prompt and its output together.
    """

    __slots__ = ("adapter", "adapter_name", "card", "max_len", "name", "positions_before")

    def __init__(self, card: ModelCard, adapter: Adapter | None = None) -> None:
        self.card = card
        self.adapter = adapter
        self.adapter_name = None if adapter is None else adapter.name
        self.name = self.adapter_name or card.name
        self.positions_before = 0 if adapter is None else adapter.num_positions
        self.max_len = card.limits.max_model_len - self.positions_before


def _rather(card: ModelCard, known: ModelCard) -> ModelCard:
    """A model does not become another while its encode workers alone are ready."""
    return known if card.role is Task.ENCODE and known.role is not Task.ENCODE else card


class Catalog:
    """The models and adapters of some workers.

    Args:
        workers: those that are ready, the same list as long as nothing has changed.
        missing: as `inlay.transport.api.Plane.unavailable`.
        clock: monotonic seconds.
        announced: cards as `inlay.transport.api.Announces`; None: the workers' own.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        missing: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
        announced: Callable[[], Sequence[ModelCard]] | None = None,
    ) -> None:
        self._announced = announced or (lambda: self._cards)
        self._workers = workers
        self._missing = missing
        self._clock = clock
        self._seen: Sequence[Worker] | None = None
        self._told: Sequence[ModelCard] | None = None
        self._cards: list[ModelCard] = []
        self._shares: dict[tuple[str, Task | None], Mapping[Weights, float]] = {}
        self._said: dict[str, Mapping[Weights, float]] = {}
        self._known: dict[str, ModelCard] = {}
        self._since: dict[str, float] = {}
        self._gone: dict[str, float] = {}

    def models(self) -> list[ModelCard]:
        """The card of each model that is, or was lately, served: one a name, aliases apart.

        Of several weights under a name it is of those with the largest share.
        """
        self._look()
        self._retire()
        return list(self._known.values())

    def _look(self) -> None:
        workers = self._workers()
        if workers is self._seen and self._told is self._announced():
            return
        self._seen, self._shares = workers, {}
        # In an order that all frontends have.
        self._cards = [worker.card for worker in sorted(workers, key=lambda worker: worker.id)]
        self._told = self._announced()
        found = dict.fromkeys(worker.card.name for worker in workers)
        for card in self._told:
            self._since[card.name] = card.rollout.since
        for name in found:
            shares = {one: share for one, share in self.shares(name).items() if one.name == name}
            card = self._standing(leader(shares), name)
            self._known[name] = _rather(card, self._known.get(name, card))
            self._say(name)
        for name in self._gone.keys() & found.keys():
            del self._gone[name]
        for name in self._known.keys() - found.keys() - self._gone.keys():
            self._gone[name] = self._clock()
        self._since = {name: self._since.get(name, 0.0) for name in self._known}
        self._known = dict(sorted(self._known.items(), key=lambda item: self._since[item[0]]))

    def shares(self, name: str, task: Task | None = None) -> Mapping[Weights, float]:
        """Each set of weights that is ready under this name, and its share of requests for it.

        Those that no worker connected here has are left out; empty where there is none.
        """
        found = self._shares.get((name, task))
        if found is None:
            cards = called(self._cards, name, task)
            here = {Weights.of(card) for card in cards}
            told = called(self._told or (), name, task)
            shares = {one: share for one, share in shares_of(told).items() if one in here}
            if not (total := sum(shares.values())):
                shares = shares_of([card for card in told if Weights.of(card) in here] or cards)
                total = sum(shares.values())
            found = {one: share / (total or 1.0) for one, share in shares.items()}
            self._shares[name, task] = found
        return found

    def _say(self, name: str) -> None:
        """Log the weights that requests for `name` go to, where that has changed."""
        now = {one: share for one, share in self.shares(name).items() if share}
        before = self._said.get(name)
        self._said[name] = now
        if now != before and (before is not None or len(self.shares(name)) > 1):
            told = ", ".join(
                f"{one.weights_id} ({one.dtype}) {share:.1%}" for one, share in now.items()
            )
            log.warning("requests for `%s` go to the weights %s", name, told or "of nobody")

    def _standing(self, weights: Weights, name: str, task: Task | None = None) -> ModelCard:
        """The card that stands for all workers with these weights.

        Where they differ it is of one that accepts rows: requests with rows go to those.
        """
        cards = [card for card in called(self._cards, name, task) if Weights.of(card) == weights]
        return next((card for card in reversed(cards) if card.prompt_embeds is None), cards[-1])

    def _retire(self) -> None:
        """Forget models that have had no worker for long; those that went first stand first."""
        while self._gone and self._seen:
            name, since = next(iter(self._gone.items()))
            if len(self._gone) <= MAX_GONE and self._clock() - since < RETIRED_SECONDS:
                return
            del self._gone[name], self._known[name]
            self._said.pop(name, None)

    def model(
        self, name: str, task: Task | None = None, number: float | None = None
    ) -> ServedModel:
        """The model or adapter that clients know by `name`.

        Args:
            name: of a model or an adapter, or an alias.
            task: as for `base`.
            number: as for `draw`; None: as `base`.

        Raises:
            NotFoundError: no such model.
            OverloadedError: no worker has been ready yet.
        """
        try:
            return ServedModel(
                self.base(name, task) if number is None else self.draw(name, number, task)
            )
        except NotFoundError:
            for card in self.models():
                for adapter in self.adapters(card):
                    if name == adapter.name:
                        return ServedModel(card, adapter)
            raise

    def base(self, name: str, task: Task | None = None) -> ModelCard:
        """The model with this name of its own or alias. Raises as `model`.

        With a `task`, the card of a pool that does it, first of one that does nothing else. Of
        several weights it is of those with the largest share.
        """
        models = self.models()
        known = next((card for card in models if name in (card.name, *card.aliases)), None)
        shares = self.shares(name, task)
        card = self._standing(leader(shares), name, task) if shares else known
        if card is not None:
            return card if known is None or task is Task.ENCODE else _rather(card, known)
        if not models:
            raise self.unready()
        for card in models:
            if card.stage is not None and card.stage.graph.name == name:
                raise OverloadedError(
                    f"The stage {card.stage.graph.front} of the pipeline `{name}` is not ready.",
                    retry_after=1,
                )
        raise self.unknown(name)

    def draw(self, name: str, number: float, task: Task | None = None) -> ModelCard:
        """As `base`, but of the weights that a random `number` from 0 to below 1 falls to.

        Raises also `OverloadedError` where all ready workers have `--weight 0`.
        """
        base = self.base(name, task)
        shares = self.shares(name, task)
        if not shares:
            return base
        if not any(shares.values()):
            raise OverloadedError(
                f"The ready workers of `{name}` take no requests (--weight 0).", retry_after=1
            )
        return _rather(self._standing(drawn(shares, number), name, task), base)

    def same_weights(self, card: ModelCard, task: Task) -> ModelCard:
        """The card of a pool with these weights that does `task`; `card` itself if none does."""
        self._look()
        weights = Weights.of(card)
        if task is card.role or weights not in self.shares(card.name, task):
            return card
        return self._standing(weights, card.name, task)

    def adapters(self, card: ModelCard) -> list[Adapter]:
        """The adapters that some worker of a model can use now.

        While none is ready, those there were.
        """
        found: dict[str, Adapter] = {}
        for known in [worker.card for worker in self.workers(card)] or [card]:
            for adapter in known.adapters:
                found.setdefault(adapter.name, adapter)
        return list(found.values())

    def workers(self, card: ModelCard) -> list[Worker]:
        """The ready workers of a model's pool."""
        pool = PoolKey.of(card)
        return [worker for worker in self._workers() if PoolKey.of(worker.card) == pool]

    def equivalent_workers(
        self, card: ModelCard, adapter: str | None, *, rows: bool = False
    ) -> list[Worker]:
        """The ready workers that would answer as the one with this card does.

        With `rows`, those that take a prompt with rows.
        """
        content = None if adapter is None else content_of(card, adapter)
        return [
            worker
            for worker in self.workers(card)
            if (adapter is None or content_of(worker.card, adapter) == content)
            and not (rows and worker.card.prompt_embeds is not None)
        ]

    def unknown(self, name: str) -> NotFoundError:
        """The error of a model or adapter that is not there."""
        return NotFoundError(
            f"The model `{name}` does not exist{self._served()}",
            param="model",
            code="model_not_found",
        )

    def _served(self) -> str:
        shown = [card for card in self.models() if not card.is_inner]
        names = [name for card in shown for name in (card.name, *card.aliases)]
        more = ", ..." if len(names) > _NAMED else ""
        return "; served: " + ", ".join(f"`{name}`" for name in names[:_NAMED]) + more

    def unready(self) -> OverloadedError:
        """The error where no worker is ready; it says what is known of why."""
        missing = "".join(f"; {name}: {reason}" for name, reason in self._missing().items())
        return OverloadedError(f"no worker is ready{missing}", retry_after=1)
