"""Places at every stage of a pipeline, taken before the first has begun."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

from inlay.base.errors import RateLimitedError


class StageSlots:
    """Requests under way by the stages that they will need.

    A stage takes as many as its workers may have, and as many more as may wait in the router. So
    one that has begun never finds a later stage full. One that is larger than that comes alone.

    Args:
        queue_size: requests that may wait for a stage; one client may have half.
    """

    def __init__(self, queue_size: int) -> None:
        self._queue_size = queue_size
        self._taken: Counter[str] = Counter()
        self._of: Counter[tuple[str, Hashable]] = Counter()

    @contextmanager
    def take(
        self,
        wanted: Mapping[str, int],
        room: Mapping[str, int],
        client: Hashable,
        retry_after: Callable[[], float],
    ) -> Iterator[None]:
        """Take places at stages until the block ends.

        Args:
            wanted: by stage, requests that will come to it.
            room: by stage, requests that its workers may have.
            client: whose requests they are.
            retry_after: seconds after which to ask again, for the error.

        Raises:
            RateLimitedError: one of them is full.
        """
        share = max(1, self._queue_size // 2)
        for stage, count in wanted.items():
            taken, own, running = self._taken[stage], self._of[stage, client], room[stage]
            if (taken and taken + count > running + self._queue_size) or (
                own and own + count > running + share
            ):
                raise RateLimitedError(
                    f"the stage `{stage}` has {taken} requests under way or coming, {own} of them "
                    f"yours, and {count} more would come; allowed: {running + self._queue_size}, "
                    f"and {running + share} of one client",
                    retry_after=retry_after(),
                )
        own_wanted = {(stage, client): count for stage, count in wanted.items()}
        self._taken.update(wanted)
        self._of.update(own_wanted)
        try:
            yield
        finally:
            self._taken -= Counter(wanted)
            self._of -= Counter(own_wanted)
