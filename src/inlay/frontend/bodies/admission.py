"""Memory budget for bodies, decoded data and rows."""

from collections.abc import Iterable
from threading import Lock
from types import TracebackType

from inlay.errors import BodyTooLargeError, OverloadedError, RateLimitedError
from inlay.frontend.callers.clients import RETRY_AFTER, Client
from inlay.prompt import Prompt, Rows


class ByteBudget:
    """Memory budget of all requests together.

    Attributes:
        limit: maximum bytes.
        used: bytes held now.
        taken: total bytes reserved since the start.
    """

    __slots__ = ("limit", "lock", "taken", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.taken = 0
        self.lock = Lock()


class Reservation:
    """Bytes of one request, counted in a `ByteBudget` and in its client's quota.

    They are given back at the end of its `with` block. Safe to call from any thread: bodies are
    received on the event loop and decoded off it.

    Attributes:
        size: bytes held.
        client: the client whose quota they count in. Set before any bytes are reserved.
    """

    __slots__ = ("_budget", "client", "size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.client: Client | None = None
        self.size = 0

    def grow_to(self, size: int) -> None:
        """Reserve up to `size` bytes in all.

        Raises:
            BodyTooLargeError: more than any request may hold.
            RateLimitedError: the client's quota is used up.
            OverloadedError: the server's budget is used up.
        """
        with self._budget.lock:
            self._take(size - self.size)

    def grow(self, more: int) -> None:
        """Reserve `more` bytes. Raises as `grow_to`."""
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
                f"the request takes {size} bytes with what it decodes to; one client may hold "
                f"{share}"
            )
        if client is not None and share < budget.limit and client.bytes + more > share:
            raise RateLimitedError(
                f"your requests hold {client.bytes} bytes; {more} more would pass your share of "
                f"{share}",
                retry_after=RETRY_AFTER,
            )
        if budget.used + more > budget.limit:
            raise OverloadedError(
                f"the server holds {budget.used} bytes of requests; {more} more would pass its "
                f"limit of {budget.limit}",
                retry_after=RETRY_AFTER,
            )

    def shrink_to(self, size: int) -> None:
        """Release all but `size` bytes."""
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
    """Return the bytes of memory that the rows of `prompts` keep alive.

    Rows may be a view of their file, which then lives as long as the rows; shared memory counts
    once.
    """
    alive: dict[int, int] = {}
    for prompt in prompts:
        for segment in prompt.segments:
            if isinstance(segment, Rows):
                for buffer in (segment.data, *(field.data for field in segment.bundle)):
                    owner = buffer.view.obj
                    alive[id(owner)] = memoryview(owner).nbytes
    return sum(alive.values())
