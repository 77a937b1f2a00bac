"""The part of a frontend that an extension adds: what it keeps and does between requests."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from inlay.http.app import Routes
from inlay.http.server import Server
from inlay.store.settings import BatchSettings, ResponseSettings
from inlay.store.shared import Shared

OpenShared: TypeAlias = Callable[[str], Awaitable[Shared]]
"""Opens the storage of a name in a fleet: records and contents."""


@dataclass(frozen=True)
class FrontendAccess:
    """A frontend, as its parts see it.

    Attributes:
        server: its state.
        routes: all of its routes.
        batches: settings of files and batches.
        responses: settings of kept responses.
        open_shared: of its fleet; None without one.
    """

    server: Server
    routes: Routes
    batches: BatchSettings
    responses: ResponseSettings
    open_shared: OpenShared | None = None


class FrontendPart(Protocol):
    """`Extension.frontend` makes one of a `FrontendAccess`, or None where it is off.

    It raises `InvalidRequestError` for settings that cannot be. Routes find it by the extension's
    name in `Server.parts`.
    """

    async def start(self) -> None:
        """Begin, in the event loop of the server."""

    async def close(self) -> None:
        """End what it does; what it keeps stays."""
