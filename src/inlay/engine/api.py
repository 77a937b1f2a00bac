"""Protocols of an engine: requests, prefix cache, adapters, sleep."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from inlay.base.address import Address
from inlay.base.errors import InlayError
from inlay.messages.card import Adapter, ModelCard, Stats
from inlay.messages.request import Emit, Payload, Request


class Engine(Protocol):
    """Interface of every engine. The other protocols are for what only some can do.

    All methods are called on the worker's event loop and must not block it.
    """

    @property
    def card(self) -> ModelCard:
        """Metadata of the served model; available once the engine is started."""

    async def start(self) -> None:
        """Load the model; return when requests can run.

        Raises `EngineError`, or `InvalidRequestError` for a model that is not supported.
        """

    async def close(self) -> None:
        """Abort all requests and free all memory."""

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit a request of one of the card's tasks.

        `emit` gets its outputs in order of offset, the last with a finish reason. Of a task other
        than `Task.GENERATE` it gets a payload on the task's port.

        Raises:
            InvalidRequestError: it can never run here; nothing was admitted.
            OverloadedError: too much is queued, or the engine is closing.
        """

    def abort(self, request_id: str) -> None:
        """Stop a request and free its memory within one step. Unknown ids are ignored.

        Its last output has the finish reason "abort".
        """

    async def probe(self) -> float:
        """Run one token through the model; return the seconds it took.

        Raises `EngineError` if that fails.
        """

    def stats(self) -> Stats:
        """Return the current counters."""


@runtime_checkable
class GenerateEngine(Engine, Protocol):
    """An engine of `Task.GENERATE`: it has a prefix cache."""

    async def reset_prefix_cache(self) -> int:
        """Evict every cached block that no running request uses; return their number."""


class PeerWorkers(Protocol):
    """Other workers, as an engine asks them."""

    async def payloads(
        self, address: Address, request: Request, within: float | None = None
    ) -> Sequence[Payload]:
        """Return the payloads of `request`, done by the worker at `address`.

        Raises:
            OverloadedError: it is not reached, is gone, or has not answered `within` seconds.
            InlayError: its own answer.
        """


@runtime_checkable
class PeerUser(Protocol):
    """An engine that asks other workers for what a request's `sources` name."""

    def use_peers(self, peers: PeerWorkers) -> None:
        """Ask through `peers` from now on."""


@runtime_checkable
class HostMemoryUser(Protocol):
    """An engine that keeps in host memory what is to outlive its process."""

    def use_host_memory(self, fd: int) -> None:
        """Keep it in the memory of `fd`, which may have what an earlier process kept.

        Called before the start. The descriptor is the engine's from here on.
        """


@runtime_checkable
class PageEngine(Protocol):
    """An engine that gives pages of its prefix cache to other workers; see its card's layout."""

    def give_pages(self, request: Request, emit: Emit) -> None:
        """Answer a request of `Task.PAGES` with the records of pages, also while draining.

        Raises:
            InvalidRequestError: it gives none, or none of this layout.
            OverloadedError: too many ask.
        """


@runtime_checkable
class FailingEngine(Protocol):
    """An engine that can fail permanently.

    Every request then ends with an error, and the worker must exit.
    """

    async def failed(self) -> InlayError:
        """Wait for the permanent failure and return it."""


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine that loads and unloads adapters at run time.

    Its worker decides which adapters are loaded, and unloads only unused ones.
    """

    async def load_adapter(self, adapter: Adapter, directory: str) -> None:
        """Make the adapter in `directory` (checked files) usable by requests that name it.

        All or nothing. There is room for `max_cpu_loras` adapters and one more.

        Raises `InvalidRequestError` if it does not fit the model or there is no room.
        """

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter that no request uses."""


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release its memory while idle.

    Called only while no request is running.
    """

    def check_sleep(self, level: int) -> None:
        """Raise `InvalidRequestError` if the engine does not support sleeping at `level`."""

    async def sleep(self, level: int) -> None:
        """Release memory: of the KV cache and the weights.

        Level 1 keeps a copy of the weights in host memory, level 2 does not.
        """

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Restore the parts in `tags`, "weights" and "kv_cache"; none means all.

        Returns True if the engine is fully awake.
        """
