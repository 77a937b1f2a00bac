"""How much may be under way: requests, and bytes of bodies and embeddings."""

from types import TracebackType

from inlay.errors import OverloadedError

RETRY_AFTER = 1.0


class ByteBudget:
    """Bytes held for all requests together.

    Attributes:
        limit: bytes at most.
        used: bytes held now.
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Reservation:
    """One request's part of a `ByteBudget`; given back at the end of its `with` block."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._size = 0

    def grow_to(self, size: int) -> None:
        """Hold at least `size` bytes. Raises `OverloadedError` when the budget is used up."""
        more = size - self._size
        if more <= 0:
            return
        if self._budget.used + more > self._budget.limit:
            raise OverloadedError(
                f"the server holds {self._budget.used} bytes of requests; {more} more would pass its limit of "
                f"{self._budget.limit}",
                retry_after=RETRY_AFTER,
            )
        self._budget.used += more
        self._size = size

    def shrink_to(self, size: int) -> None:
        """Hold at most `size` bytes."""
        if size < self._size:
            self._budget.used -= self._size - size
            self._size = size

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shrink_to(0)
