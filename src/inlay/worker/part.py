"""The part of a worker that an extension adds: tasks of its own, and what it does around others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from inlay.base.address import Address
from inlay.engine.api import Engine, PeerWorkers
from inlay.messages.card import Stage
from inlay.messages.request import Emit, Request, Task

Handle: TypeAlias = Callable[[Request, Emit], None]
"""Takes a request and gives its outputs; what it raises is the request's only one."""


@dataclass(frozen=True)
class HostAccess:
    """A worker, as its parts see it.

    Attributes:
        engine: of the worker, started.
        stage: of a pipeline that it is, or None.
        peers: asks other workers; None where it can ask none.
        address: where others reach it; None while they cannot.
        admit: admits a request in the engine, by its own `submit` or by another that is given.
    """

    engine: Engine
    stage: Stage | None
    peers: PeerWorkers | None
    address: Callable[[], Address | None]
    admit: Callable[[Request, Emit, Handle | None], None]


class WorkerPart(Protocol):
    """`Extension.worker` makes one of a `HostAccess`."""

    @property
    def handlers(self) -> Mapping[Task, Handle]:
        """Its own tasks, which are also done while the worker drains."""

    def begin(self, request: Request, emit: Emit) -> None:
        """Begin a request that says `hold` or `feeds`, once it can be admitted."""

    @property
    def takes_rows(self) -> bool:
        """True if requests have rows whether or not clients may send embeddings."""

    def abort(self, request_id: str) -> None:
        """Let go of a request that has been stopped in the engine. Unknown ids are ignored."""

    def stats(self) -> Mapping[str, int]:
        """Return its counters, by fields of `Stats`."""

    @property
    def num_open(self) -> int:
        """Requests that the engine has ended and others still use."""
