"""How many bytes may be held: of bodies, of what they decode to, and of the rows in them."""

from collections.abc import Iterable
from threading import Lock
from types import TracebackType

from inlay.errors import BodyTooLargeError, OverloadedError, RateLimitedError
from inlay.frontend.callers.clients import RETRY_AFTER, Client
from inlay.prompt import Prompt, Rows


class ByteBudget:
    """Bytes held for all requests together.

    Attributes:
        limit: bytes at most.
        used: bytes held now.
        taken: bytes that were held so far, all requests' added up.
    """

    __slots__ = ("limit", "lock", "taken", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.taken = 0
        self.lock = Lock()


class Reservation:
    """One request's part of a `ByteBudget` and of its client's share.

    Given back at the end of its `with` block.

    Safe to call from any thread: bodies are taken in on the event loop, and decoded off it.

    Attributes:
        size: bytes held.
        client: whose share they come out of. Set before any are taken.
    """

    __slots__ = ("_budget", "client", "size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.client: Client | None = None
        self.size = 0

    def grow_to(self, size: int) -> None:
        """Hold at least `size` bytes.

        Raises:
            BodyTooLargeError: no request may ever hold as many.
            RateLimitedError: the client's share is used up.
            OverloadedError: the budget is.
        """
        with self._budget.lock:
            self._take(size - self.size)

    def grow(self, more: int) -> None:
        """Hold `more` bytes than now. Raises as `grow_to`."""
        with self._budget.lock:
            self._take(more)

    def _take(self, more: int) -> None:
        if more <= 0:
            return
        self._check(self.size + more, more)
        self._budget.used += more
        self._budget.taken += more
        self.size += more
        if self.client is not None:
            self.client.bytes += more

    def _check(self, size: int, more: int) -> None:
        budget, client = self._budget, self.client
        share = budget.limit
        if client is not None and client.share.max_bytes is not None:
            share = min(client.share.max_bytes, budget.limit)
        if size > share:
            raise BodyTooLargeError(
                f"the request takes {size} bytes with what it decodes to; one client may hold {share}"
            )
        if client is not None and share < budget.limit and client.bytes + more > share:
            raise RateLimitedError(
                f"your requests hold {client.bytes} bytes; {more} more would pass your share of {share}",
                retry_after=RETRY_AFTER,
            )
        if budget.used + more > budget.limit:
            raise OverloadedError(
                f"the server holds {budget.used} bytes of requests; {more} more would pass its limit of "
                f"{budget.limit}",
                retry_after=RETRY_AFTER,
            )

    def shrink_to(self, size: int) -> None:
        """Hold at most `size` bytes."""
        with self._budget.lock:
            less = self.size - size
            if less > 0:
                self._budget.used -= less
                self.size = size
                if self.client is not None:
                    self.client.bytes -= less

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shrink_to(0)


def bytes_alive(prompts: Iterable[Prompt]) -> int:
    """Bytes of memory that the rows of `prompts` keep alive.

    A row may be a view of the file it came in, all of which lives as long as the row; what several
    share counts once.
    """
    alive: dict[int, int] = {}
    for prompt in prompts:
        for segment in prompt.segments:
            if isinstance(segment, Rows):
                for buffer in (segment.data, *(field.data for field in segment.bundle)):
                    owner = buffer.view.obj
                    alive[id(owner)] = memoryview(owner).nbytes
    return sum(alive.values())
