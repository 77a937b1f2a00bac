"""The references of a fleet, as a process that starts an engine sees them.

Its parent, which talks to NATS, is asked over the channel between them.
"""

import asyncio
import math
from itertools import count

from inlay.engine.references import LocalReferences
from inlay.transport.local import LocalTransport
from inlay.transport.messages import SettledReference, SettleReference, ToWorker
from inlay.transport.pending_calls import PendingCalls


class FleetReferences:
    """As `inlay.engine.references.References`, called from other threads than the event loop's.

    What the fleet keeps is kept in the user's cache too.
    """

    def __init__(self, channel: "LocalTransport[ToWorker]") -> None:
        self._channel = channel
        self._local = LocalReferences()
        self._loop = asyncio.get_running_loop()
        self._calls = PendingCalls[bytes | None](count())

    def find(self, key: str) -> bytes | None:
        found = self._local.find(key)
        return self.agreed(key) if found is None else found

    def keep(self, key: str, data: bytes) -> None:
        self._local.keep(key, data)
        self._settle(key, data, replace=False)

    def agreed(self, key: str, own: bytes | None = None, *, replace: bool = False) -> bytes | None:
        """As `References.agreed`; waits for as long as NATS is away."""
        here = self._local.find(key)
        found = self._settle(key, here if own is None else own, replace=replace)
        if found is not None and found != here:
            self._local.keep(key, found)
        return found

    def heard(self, answer: SettledReference) -> None:
        """Take an answer of the parent."""
        self._calls.resolve(answer.number, answer.data)

    def _settle(self, key: str, own: bytes | None, *, replace: bool) -> bytes | None:
        def send(number: int) -> None:
            self._channel.send(SettleReference(number, key, own, replace))

        asked = self._calls.call(send, math.inf)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
