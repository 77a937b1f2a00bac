"""Needs of a batch, which the server that runs it meets."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from inlay_batches.lines import LineRequest, Outcome
from inlay_batches.records import BatchRecord

T = TypeVar("T")


class Work(Protocol):
    """The lines of one batch, done in the name of its owner."""

    @property
    def max_line_bytes(self) -> int:
        """Bytes of a line at most."""

    @property
    def max_lines(self) -> int:
        """Lines of a batch at most."""

    def is_allowed(self) -> bool:
        """Return True if the owner may still use the server."""

    def check(self, body: bytes) -> str | None:
        """Check a body as its route would before it renders; return the model that it names.

        Not on the event loop. Raises `InvalidRequestError`, `BodyTooLargeError`.
        """

    async def check_model(self, name: str | None) -> None:
        """Check that a model does what the batch is for.

        Raises:
            InvalidRequestError: it does not.
            NotFoundError: there is no such model.
            OverloadedError: no worker is ready now.
        """

    async def answer(self, number: int, request: LineRequest) -> Outcome:
        """Answer a line, once the server has room; what fails for a time is tried again."""

    async def hold(self, refs: Sequence[str]) -> None:
        """Count stored prompts as used now. Raises `OverloadedError`."""

    async def has_room(self, num_bytes: int) -> bool:
        """Return True if the owner may keep so many bytes beside its files."""

    async def prepare(self, size: int, work: Callable[[], T], /) -> T:
        """Run CPU work on so many bytes in the owner's turn, in a thread where they are many."""

    async def publish(self, record: BatchRecord) -> None:
        """Make the files of a batch that is finalizing, if they are not there yet."""
