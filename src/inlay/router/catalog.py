"""Models and adapters by the names that clients use."""

import time
from collections.abc import Callable, Mapping, Sequence

from inlay.card import Adapter, ModelCard
from inlay.errors import NotFoundError, OverloadedError
from inlay.request import Task
from inlay.router.pool import PoolKey, content_of
from inlay.transport.api import Worker

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


def _stands_for(card: ModelCard, other: ModelCard) -> bool:
    """True if `card` is to be shown rather than another of the same name.

    Clients ask the model; workers that only encode its images are beside it. Where workers differ,
    one that accepts rows stands for all: requests with rows go to those.
    """
    if (card.role is Task.ENCODE) != (other.role is Task.ENCODE):
        return other.role is Task.ENCODE
    return other.prompt_embeds is not None or card.prompt_embeds is None


class Catalog:
    """The models and adapters of some workers.

    Args:
        workers: those that are ready, the same list as long as nothing has changed.
        missing: as `inlay.transport.api.Plane.unavailable`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        missing: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._missing = missing
        self._clock = clock
        self._seen: Sequence[Worker] | None = None
        self._known: dict[str, ModelCard] = {}
        self._gone: dict[str, float] = {}

    def models(self) -> list[ModelCard]:
        """The card of each model that is, or was lately, served: one a name, aliases apart."""
        workers = self._workers()
        if workers is not self._seen:
            self._seen = workers
            found: dict[str, ModelCard] = {}
            for card in (worker.card for worker in workers):
                other = found.get(card.name)
                if other is None or _stands_for(card, other):
                    found[card.name] = card
            for name, card in found.items():
                known = self._known.get(name)
                # A model does not become another while its encode workers alone are ready.
                if known is None or known.role is Task.ENCODE or card.role is not Task.ENCODE:
                    self._known[name] = card
            for name in self._gone.keys() & found.keys():
                del self._gone[name]
            for name in self._known.keys() - found.keys() - self._gone.keys():
                self._gone[name] = self._clock()
        self._retire()
        return list(self._known.values())

    def _retire(self) -> None:
        """Forget models that have had no worker for long; those that went first stand first."""
        while self._gone and self._seen:
            name, since = next(iter(self._gone.items()))
            if len(self._gone) <= MAX_GONE and self._clock() - since < RETIRED_SECONDS:
                return
            del self._gone[name], self._known[name]

    def model(self, name: str, task: Task | None = None) -> ServedModel:
        """The model or adapter that clients know by `name`.

        Args:
            name: of a model or an adapter, or an alias.
            task: as for `base`.

        Raises:
            NotFoundError: no such model.
            OverloadedError: no worker has been ready yet.
        """
        try:
            return ServedModel(self.base(name, task))
        except NotFoundError:
            for card in self.models():
                for adapter in self.adapters(card):
                    if name == adapter.name:
                        return ServedModel(card, adapter)
            raise

    def base(self, name: str, task: Task | None = None) -> ModelCard:
        """The model with this name of its own or alias. Raises as `model`.

        With a `task`, the card of a pool that does it, first of one that does nothing else.
        """
        models = self.models()
        for card in models:
            if name == card.name or name in card.aliases:
                return card if task in (None, card.role) else self._doing(card, task)
        if not models:
            raise self.unready()
        for card in models:
            if card.stage is not None and card.stage.graph.name == name:
                raise OverloadedError(
                    f"The stage {card.stage.graph.front} of the pipeline `{name}` is not ready.",
                    retry_after=1,
                )
        raise self.unknown(name)

    def _doing(self, card: ModelCard, task: Task | None) -> ModelCard:
        """Return the card of a ready worker of that name that does `task`; `card` if none does."""
        able = [
            other
            for other in (worker.card for worker in self._workers())
            if other.name == card.name and task in other.tasks
        ]
        return min(able, key=lambda other: other.role is not task, default=card)

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
