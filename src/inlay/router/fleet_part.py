"""The part of a fleet that an extension adds: workers that it leaves out, and names it explains."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from inlay.base.errors import OverloadedError
from inlay.messages.card import ModelCard
from inlay.transport.api import Worker


class FleetPart(Protocol):
    """`Extension.fleet` makes one for each frontend."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Reasons by the id of each worker that `accept` left out."""

    def accept(self, workers: Sequence[Worker], announced: Sequence[ModelCard]) -> list[Worker]:
        """Return the workers that may be asked, in their order.

        Args:
            workers: that this frontend reaches.
            announced: cards of all that are ready, reached from here or not.
        """

    def missing(self, name: str, models: Sequence[ModelCard]) -> OverloadedError | None:
        """Return the error of a name that nobody serves now, where it is known; else None.

        Args:
            name: that a client asked for.
            models: that are served.
        """
