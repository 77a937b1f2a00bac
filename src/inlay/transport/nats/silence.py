"""Whether another participant is still there, judged by our own clock and only while we could have heard it."""

from inlay import liveness
from inlay.transport.nats.connection import Connection


class Clock:
    """Seconds in which we could have heard everybody: connected, and running ourselves."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @staticmethod
    def now() -> float:
        """As `inlay.liveness.now`."""
        return liveness.now()

    def silent(self, heard: float) -> float:
        """For how many seconds nothing was heard from somebody last heard at `heard`.

        0 when we may have missed it.
        """
        since = self._connection.since
        return 0.0 if since is None else max(0.0, self.now() - max(heard, since))


class Presence:
    """One other participant.

    Attributes:
        heard: when it was last heard.
    """

    def __init__(self, clock: Clock, *, gone_after: float, gone_unheard_after: float) -> None:
        """It is there.

        Args:
            clock: ours.
            gone_after: seconds of silence after which it is gone.
            gone_unheard_after: the same where the server says that nobody listens to what is sent
                to it.
        """
        self._clock = clock
        self._gone_after = gone_after
        self._gone_unheard_after = gone_unheard_after
        self.heard = clock.now()
        self._unheard = False

    def hear(self) -> None:
        """It gave a sign of life."""
        self.heard = self._clock.now()
        self._unheard = False

    def unheard(self) -> None:
        """Nobody listens to what is sent to it."""
        self._unheard = True

    @property
    def gone(self) -> bool:
        """Whether to give it up."""
        after = self._gone_unheard_after if self._unheard else self._gone_after
        return self._clock.silent(self.heard) > after
