"""Chooses a worker for each work and follows it to its end."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from inlay.errors import NotFoundError, OverloadedError
from inlay.protocol.embedding import EmbedWork, Vectors
from inlay.protocol.work import Adapter, Delta, ModelCard, Plane, Stream, Work, Worker
from inlay.router.model import ServedModel
from inlay.router.resume import ResumingStream, Sent

ASLEEP_RETRY_AFTER = 5.0
"""Seconds after which to ask again for a model that is asleep: waking takes about that long."""

_NAMED = 5
"""Names of served models at most in the error of one that is not."""


class _Counted:
    """A stream that tells when it has ended, however it ends."""

    def __init__(self, stream: Stream, load: Counter[str], worker_id: str, weight: int) -> None:
        self._stream = stream
        self._load = load
        self._worker_id = worker_id
        self._weight = weight

    async def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        try:
            async for deltas in self._stream:
                yield deltas
        finally:
            self._release()

    def _release(self) -> None:
        self._load[self._worker_id] -= self._weight
        self._weight = 0

    def cancel(self) -> None:
        self._stream.cancel()
        self._release()


class Router:
    """Least-loaded choice among the workers of a model, by positions under way."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._load: Counter[str] = Counter()
        self._known: dict[str, ModelCard] = {}

    def models(self) -> list[ModelCard]:
        """The card of each model that is, or was, served: one a name, aliases apart."""
        for worker in self._plane.workers():
            self._known[worker.card.name] = worker.card
        return list(self._known.values())

    def card(self, name: str) -> ModelCard:
        """The card of the model clients call `name`, or of the one whose adapter is called so.

        Raises:
            NotFoundError: no such model.
            OverloadedError: no worker has been ready yet, so nobody knows.
        """
        return self.model(name).card

    def model(self, name: str) -> ServedModel:
        """The model, or the adapter, that clients call `name`. Raises as `card`."""
        try:
            return ServedModel(self._base(name))
        except NotFoundError:
            for card in self.models():
                for adapter in self.adapters(card):
                    if name == adapter.name:
                        return ServedModel(card, adapter)
            raise

    def _base(self, name: str) -> ModelCard:
        models = self.models()
        for card in models:
            if name == card.name or name in card.aliases:
                return card
        if not models:
            raise self.unready()
        raise self._unknown(name)

    def _unknown(self, name: str) -> NotFoundError:
        return NotFoundError(
            f"The model `{name}` does not exist{self._served()}", param="model", code="model_not_found"
        )

    def adapters(self, card: ModelCard) -> list[Adapter]:
        """The adapters that some worker of a model can use now; while none is ready, those there were."""
        found: dict[str, Adapter] = {}
        for known in [worker.card for worker in self.workers(card.name)] or [card]:
            for adapter in known.adapters:
                found.setdefault(adapter.name, adapter)
        return list(found.values())

    def missing(self) -> Mapping[str, str]:
        """As `inlay.protocol.work.Plane.missing`."""
        return self._plane.missing()

    def unready(self) -> OverloadedError:
        """The error where no worker is ready; it says what is known of why."""
        missing = "".join(f"; {name}: {reason}" for name, reason in self.missing().items())
        return OverloadedError(f"no worker is ready{missing}", retry_after=1)

    def _served(self) -> str:
        names = [name for card in self.models() for name in (card.name, *card.aliases)]
        more = ", ..." if len(names) > _NAMED else ""
        return "; served: " + ", ".join(f"`{name}`" for name in names[:_NAMED]) + more

    def ready(self) -> Sequence[Worker]:
        """Every ready worker, of whatever model."""
        return self._plane.workers()

    def workers(self, name: str) -> list[Worker]:
        """The ready workers of the model with this name of its own or alias. Raises `NotFoundError`."""
        card = self._base(name)
        return [worker for worker in self._plane.workers() if _same_model(worker.card, card)]

    def awake(self, name: str) -> list[Worker]:
        """Those of `workers` that take works, at least one.

        Raises:
            NotFoundError: no such model.
            OverloadedError: no worker of it is ready, or all of them are asleep.
        """
        workers = self.workers(name)
        awake = [worker for worker in workers if not worker.card.asleep]
        if workers and not awake:
            raise OverloadedError(f"The model `{name}` is asleep.", retry_after=ASLEEP_RETRY_AFTER)
        if not awake:
            raise OverloadedError(f"No worker of the model `{name}` is ready.", retry_after=1)
        return awake

    async def wait_awake(self, name: str) -> None:
        """Return when none of the workers of a model is asleep alone: one is awake, or none is ready. Raises `NotFoundError`."""
        while (workers := self.workers(name)) and all(worker.card.asleep for worker in workers):
            await self._plane.changed()

    def room(self, num_bytes: int) -> memoryview | None:
        """As `inlay.protocol.work.Plane.room`."""
        return self._plane.room(num_bytes)

    def send(self, name: str, work: Work) -> Stream:
        """Send `work` to a worker of the model with this name of its own or alias, which has the adapter that the work is for.

        When that worker is gone before the end, others of its pool go on, as `inlay.router.resume` says.

        Raises:
            NotFoundError: no such model, or none of its workers has the adapter.
            OverloadedError: no worker of it is ready.
        """
        workers = self.awake(name)
        if work.adapter is not None:
            workers = [worker for worker in workers if _adapter(worker.card, work.adapter) is not None]
            if not workers:
                raise self._unknown(work.adapter)
        sent = self._send(workers, work)
        like = sent.worker.card
        return ResumingStream(work, sent, workers=lambda: self._pool(like, work.adapter), send=self._send)

    def _pool(self, like: ModelCard, adapter: str | None) -> list[Worker]:
        """The ready workers that would answer as the one with this card does."""
        return [
            worker
            for worker in self._plane.workers()
            if _same_model(worker.card, like)
            and (adapter is None or _adapter(worker.card, adapter) == _adapter(like, adapter))
        ]

    def _send(self, workers: Sequence[Worker], work: Work) -> Sent:
        worker = min(workers, key=lambda candidate: self._load[candidate.id])
        weight = len(work.prompt) + work.sampling.max_tokens
        stream = worker.send(work)
        self._load[worker.id] += weight
        return Sent(worker, _Counted(stream, self._load, worker.id, weight))

    async def embed(self, name: str, work: EmbedWork) -> Vectors:
        """Have a worker of the model clients call `name` make the vectors of `work`; one that is full or gone is passed over.

        Raises:
            NotFoundError: no such model.
            OverloadedError: no worker of it is ready, or none has room.
            InlayError: the work was refused or failed.
        """
        error = self.unready()
        weight = work.positions
        workers = sorted(self.awake(name), key=lambda candidate: self._load[candidate.id])
        for attempt, worker in enumerate(workers, work.attempt):
            self._load[worker.id] += weight
            try:
                return await worker.embed(msgspec.structs.replace(work, attempt=attempt))
            except OverloadedError as full:
                error = full
            finally:
                self._load[worker.id] -= weight
        raise error


def _same_model(one: ModelCard, other: ModelCard) -> bool:
    return (one.name, one.weights_id, one.dtype) == (other.name, other.weights_id, other.dtype)


def _adapter(card: ModelCard, name: str) -> str | None:
    """What the worker with this card knows an adapter's content by; None where it has none of this name."""
    return next((adapter.content_id for adapter in card.adapters if adapter.name == name), None)
