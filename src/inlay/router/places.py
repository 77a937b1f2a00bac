"""Places at every stage of a pipeline, taken before the first has begun."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

from inlay.errors import RateLimitedError


class Places:
    """Requests under way by the stages that they will need.

    A stage takes as many as its workers may have, and as many more as may wait in the router. So
    one that has begun never finds a later stage full.

    Args:
        queue_size: requests that may wait for a stage; one client may have half.
    """

    def __init__(self, queue_size: int) -> None:
        self._queue_size = queue_size
        self._taken: Counter[str] = Counter()
        self._of: Counter[tuple[str, Hashable]] = Counter()

    @contextmanager
    def take(
        self, room: Mapping[str, int], client: Hashable, retry_after: Callable[[], float]
    ) -> Iterator[None]:
        """Take a place at each stage until the block ends.

        Args:
            room: by stage, requests that its workers may have.
            client: whose request it is.
            retry_after: seconds after which to ask again, for the error.

        Raises:
            RateLimitedError: one of them is full.
        """
        share = max(1, self._queue_size // 2)
        for stage, running in room.items():
            taken, own = self._taken[stage], self._of[stage, client]
            if taken >= running + self._queue_size or own >= running + share:
                raise RateLimitedError(
                    f"the stage `{stage}` has {taken} requests under way or coming, {own} of them "
                    f"yours; allowed: {running + self._queue_size}, and {running + share} of one "
                    "client",
                    retry_after=retry_after(),
                )
        self._taken.update(room.keys())
        self._of.update((stage, client) for stage in room)
        try:
            yield
        finally:
            self._taken -= Counter(room.keys())
            self._of -= Counter((stage, client) for stage in room)


__all__ = ["Places"]
