"""The load that a request adds to its worker, from its beginning to its end."""

from collections.abc import Callable, Sequence

from inlay.request import Output
from inlay.router.member import PoolMember
from inlay.router.pool import Pool

_GROWS_BY = 16
"""Output tokens after which a sequence counts as longer: not each is worth the arithmetic."""


class LoadReservation:
    """A request's part of its worker's load.

    Args:
        pool: of the worker.
        member: the worker.
        prefill: positions it has to compute before the first token.
        length: positions of the prompt.
        ended: called with the client once it has ended.
        client: that sent it.
        computed: called once, when the prompt has been computed, or will not be.
        first_token: called when the first output token comes.
    """

    __slots__ = (
        "_client", "_computed", "_decode", "_ended", "_first_token", "_length", "_member", "_new",
        "_pool", "_prefill",
    )  # fmt: skip

    def __init__(
        self,
        pool: Pool,
        member: PoolMember,
        *,
        prefill: int,
        length: int,
        ended: Callable[[str | None], None],
        client: str | None = None,
        computed: Callable[[], object] = lambda: None,
        first_token: Callable[[], object] = lambda: None,
    ) -> None:
        self._pool = pool
        self._member = member
        self._prefill = prefill
        self._length = length
        self._ended: Callable[[str | None], None] | None = ended
        self._decode = 0
        self._new = 0
        self._client = client
        self._computed: Callable[[], object] | None = computed
        self._first_token = first_token
        pool.change(member, requests=1, prefill=prefill, client=client)

    def take(self, outputs: Sequence[Output]) -> None:
        """The worker has said so much."""
        self.add(sum([len(output.token_ids) for output in outputs]))

    def add(self, tokens: int) -> None:
        """The worker has made so many tokens."""
        if self._ended is None:
            return
        self._new += tokens
        if not self._decode and self._new:
            self._decode = self._length
            self._pool.change(self._member, prefill=-self._prefill, decode=self._length)
            self._prefill = 0
            self._first_token()
            self._tell_computed()
        elif self._new >= _GROWS_BY:
            self._decode += self._new
            self._pool.change(self._member, decode=self._new)
            self._new = 0

    @property
    def has_begun(self) -> bool:
        """True once an output token has come."""
        return self._decode > 0

    def end(self) -> None:
        """Release the load. May be called again."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self._pool.change(
                self._member,
                requests=-1,
                prefill=-self._prefill,
                decode=-self._decode,
                client=self._client,
            )
            self._tell_computed()
            ended(self._client)

    def _tell_computed(self) -> None:
        computed, self._computed = self._computed, None
        if computed is not None:
            computed()
