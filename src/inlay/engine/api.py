"""Protocols of an engine: generation, embedding, adapters, sleep."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from inlay.card import Adapter, ModelCard, Stats
from inlay.errors import EngineError
from inlay.request import EmbedRequest, Emit, EmitEmbedOutput, Request


class Engine(Protocol):
    """What every engine is, whatever it can do; `GenerateEngine` and the others say that.

    Every method is called on the event loop of the worker, none of them may block it.
    """

    @property
    def card(self) -> ModelCard:
        """What it serves; known once it is started."""
        ...

    async def start(self) -> None:
        """Load the model and be ready.

        Raises `EngineError` or `InvalidRequestError` (a model it refuses).
        """
        ...

    async def close(self) -> None:
        """Abort everything and free all memory."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request and free its memory within one step. Unknown ids are ignored.

        Emits a last output, "abort".
        """
        ...

    async def probe(self) -> float:
        """Run one real token through the model; the seconds it took.

        Raises `EngineError` when it cannot.
        """
        ...

    def stats(self) -> Stats:
        """The counters now."""
        ...


@runtime_checkable
class GenerateEngine(Engine, Protocol):
    """An engine of `Task.GENERATE`."""

    def generate(self, request: Request, emit: Emit) -> None:
        """Admit `request`. Its outputs go to `emit` in order of offset, the last with a finish reason.

        Raises:
            InvalidRequestError: it can never run here; nothing was admitted.
        """
        ...

    async def reset_prefix_cache(self) -> int:
        """Forget every cached block no running request uses; the number forgotten."""
        ...


@runtime_checkable
class FailingEngine(Protocol):
    """An engine that knows when it has failed for good.

    Every request has ended with an error, and its worker is to end too.
    """

    async def failed(self) -> EngineError:
        """Return why, once it has."""
        ...


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine whose adapters come and go.

    Who may load what, and when one may go, its worker decides.
    """

    async def load_adapter(self, adapter: Adapter, directory: str) -> None:
        """Make `adapter`, whose checked files are in `directory`, usable by requests that name it.

        All or nothing. `max_cpu_loras` and one more have room.

        Raises `InvalidRequestError` where it does not fit the model, or there is no room for one
        more.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter no request uses any more."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can give its memory back while nobody needs it.

    No request is under way when it is told to.
    """

    def check_sleep(self, level: int) -> None:
        """Raise `InvalidRequestError` for a level it cannot sleep at, before any request is ended for it."""
        ...

    async def sleep(self, level: int) -> None:
        """Give back the memory of the cache and, level 1: keep the weights aside; level 2.

        Forget them.
        """
        ...

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Take back what `tags` name, "weights" and "kv_cache"; none means all.

        Whether it is wholly awake.
        """
        ...


@runtime_checkable
class EmbeddingEngine(Protocol):
    """An engine of `Task.EMBED` or `Task.SCORE`."""

    def embed(self, request: EmbedRequest, emit: EmitEmbedOutput) -> None:
        """Admit `request`. Exactly one answer goes to `emit`, also after `Engine.abort`.

        Raises:
            InvalidRequestError: it can never run here; nothing was admitted.
            OverloadedError: too much is waiting already.
        """
        ...
