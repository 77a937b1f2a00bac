"""Commands to a worker, and its replies.

Each command names the type of its reply. A worker that does not know a command refuses it.
"""

from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.messages.card import Stats

R_co = TypeVar("R_co", covariant=True)

AdapterState: TypeAlias = Literal["loading", "ready", "draining", "failed"]
"""States of an adapter at a worker; in "ready" alone it takes requests."""


class CacheReset(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """The cached blocks that were freed."""

    blocks: int


class Probed(msgspec.Struct, frozen=True, tag="probe"):
    """The seconds that the engine took for one token."""

    seconds: float


class AdapterLoaded(msgspec.Struct, frozen=True, tag="load_adapter"):
    """An adapter takes requests now.

    Attributes:
        content_id: as `Adapter.content_id`.
        already: it did before.
    """

    content_id: str
    already: bool = False


class AdapterUnloaded(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """The adapter is gone, and its memory is free."""


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter as `GET /v1/loras` shows it.

    Attributes:
        running: running requests.
        reason: why it failed.
    """

    name: str
    path: str
    state: AdapterState
    kind: Literal["lora", "prompt"] | None = None
    content_id: str | None = None
    rank: int = 0
    num_positions: int = 0
    running: int = 0
    reason: str | None = None


class AdapterStatuses(msgspec.Struct, frozen=True, tag="list_adapters"):
    """All adapters, whatever their state."""

    adapters: tuple[AdapterStatus, ...]


class Slept(msgspec.Struct, frozen=True, tag="sleep"):
    """The level at which the engine sleeps."""

    level: int


class Woken(msgspec.Struct, frozen=True, tag="wake_up"):
    """True if the engine is wholly awake, and takes requests."""

    awake: bool


class Draining(msgspec.Struct, frozen=True, tag="drain"):
    """The number of requests that have not ended."""

    requests: int


class WorkerCommand(msgspec.Struct, Generic[R_co], frozen=True, array_like=True):
    """A command whose reply is an `R_co`."""


class ResetPrefixCache(WorkerCommand[CacheReset], frozen=True, tag="reset_prefix_cache"):
    """Evict every cached block that no running request uses."""


class ProbeEngine(WorkerCommand[Probed], frozen=True, tag="probe"):
    """Run one token through the model."""


class ReadStats(WorkerCommand[Stats], frozen=True, tag="stats"):
    """Read the engine's counters."""


class LoadAdapter(WorkerCommand[AdapterLoaded], frozen=True, tag="load_adapter"):
    """Load an adapter.

    Attributes:
        name: what clients will call it.
        path: a directory of the worker's machine, or an address.
        sha256: of its weights' file, or None.
        in_place: it may take the place of another of that name.
        base_model: name of the model it is for, or None.
        content_id: what it must be where it is loaded again after a restart, or None.
        recorded: the namespace has it; where it cannot be loaded it is listed as failed.
    """

    name: str
    path: str
    sha256: str | None = None
    in_place: bool = False
    base_model: str | None = None
    content_id: str | None = None
    recorded: bool = False

    def is_same(self, other: "LoadAdapter") -> bool:
        """True if both give the same adapter the same name."""
        mine = (self.name, self.path, self.sha256)
        return mine == (other.name, other.path, other.sha256)


class UnloadAdapter(WorkerCommand[AdapterUnloaded], frozen=True, tag="unload_adapter"):
    """Unload an adapter.

    Attributes:
        name: of the adapter.
        drain_seconds: what its running requests get before they are aborted; None for the worker's
            own setting.
    """

    name: str
    drain_seconds: float | None = None


class ListAdapters(WorkerCommand[AdapterStatuses], frozen=True, tag="list_adapters"):
    """Say which adapters there are."""


class Sleep(WorkerCommand[Slept], frozen=True, tag="sleep"):
    """Take no more requests, and release memory.

    Attributes:
        level: 1 keeps a copy of the weights in host memory, 2 does not.
        mode: treatment of the running requests, as vLLM names it: "abort" aborts them at once,
            "wait" when they have not ended in time.
        wait: seconds that "wait" gives them.
    """

    level: int = 1
    mode: str = "abort"
    wait: float = 30.0


class WakeUp(WorkerCommand[Woken], frozen=True, tag="wake_up"):
    """Restore the parts in `tags`, "weights" and "kv_cache"; none means all."""

    tags: tuple[str, ...] = ()


class Drain(WorkerCommand[Draining], frozen=True, tag="drain"):
    """Take no more requests.

    Attributes:
        give_up: abort those that run, too: they go on at another worker.
    """

    give_up: bool = False


AnyCommand: TypeAlias = (
    ResetPrefixCache
    | ProbeEngine
    | ReadStats
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | Sleep
    | WakeUp
    | Drain
)
Reply: TypeAlias = (
    CacheReset
    | Probed
    | Stats
    | AdapterLoaded
    | AdapterUnloaded
    | AdapterStatuses
    | Slept
    | Woken
    | Draining
)

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)


def name_of(command: WorkerCommand[object]) -> str:
    """The name of a command, as clients and logs see it."""
    return str(command.__struct_config__.tag)


def encode(command: WorkerCommand[object]) -> msgspec.Raw:
    """The command as a part of a message."""
    return msgspec.Raw(_encode(command))


def decode(raw: msgspec.Raw) -> AnyCommand:
    """The command in a message. Raises `InvalidRequestError` for one that is not known here."""
    try:
        return _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"the worker cannot follow this command: {error}") from error
