"""Whether another participant is still there, judged by our own clock and only while we could have heard it."""

import asyncio

from inlay.plane.nats.connection import Connection

_FROZEN_SECONDS = 1.0
"""A tick that comes so much too late means that we stood still, and the others did not."""


class Clock:
    """Since when we could have heard everybody, without a break: connected, and awake.

    `tick` must be called regularly.
    """

    def __init__(self, connection: Connection, interval: float) -> None:
        self._connection = connection
        self._interval = interval
        self._ticked = self.now()
        self._awake_since = self._ticked

    @staticmethod
    def now() -> float:
        """Seconds, monotonic."""
        return asyncio.get_running_loop().time()

    def tick(self) -> None:
        """Notice whether we stood still since the last tick."""
        now = self.now()
        if now - self._ticked > self._interval + _FROZEN_SECONDS:
            self._awake_since = now
        self._ticked = now

    def silent(self, heard: float) -> float:
        """For how many seconds nothing was heard from somebody last heard at `heard`; 0 when we may have missed it."""
        since = self._connection.since
        return 0.0 if since is None else max(0.0, self.now() - max(heard, since, self._awake_since))


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
            gone_unheard_after: the same where the server says that nobody listens to what is sent to it.
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
