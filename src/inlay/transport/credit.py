"""Credit: memory that one end of a connection grants the other before it offers anything.

A large message that fits into it is sent at once, a round trip sooner than one that is offered
first. Credit is part of the bytes that `inlay.transport.memory` may have in use. It goes to an end
that has offered a message it would have been enough for, and is asked back from one that has sent
nothing for a while, and from all when another message finds no room.
"""

from collections.abc import Callable, Sequence

from inlay.base import liveness
from inlay.transport.memory import ReceiveMemory

CREDIT_BYTES = 16 * 1024 * 1024
"""Bytes that the other end may send without asking: more than the rows of most images have."""
IDLE_SECONDS = 60.0
"""Seconds after which credit that nobody uses is asked back."""


class Credit:
    """Bytes that the other end may send before they are granted; kept by the end that receives.

    Args:
        memory: of which it is a part.
        say: tells the other end of bytes that it may send besides; 0 asks for all of them back.
    """

    def __init__(self, memory: ReceiveMemory, say: Callable[[int], None]) -> None:
        self._memory = memory
        self._say = say
        self._used_at = 0.0
        self._revoked = False
        self.left = 0
        """Bytes that it may send, as far as this end knows."""

    def extend(self, num_bytes: int) -> None:
        """Note a message of so many bytes; grant credit anew, once half of it is used."""
        self._used_at = liveness.now()
        missing = CREDIT_BYTES - self.left
        if num_bytes > CREDIT_BYTES or 2 * missing < CREDIT_BYTES or self._revoked:
            return
        if self._memory.set_aside(missing, self.revoke):
            self.left += missing
            self._say(missing)

    def spend(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return memory for the parts of a message that was sent without asking.

        Raises:
            ValueError: it is larger than the credit.
        """
        if sum(sizes) > self.left:
            raise ValueError(
                f"a message of {sum(sizes)} bytes is sent unasked; {self.left} are granted"
            )
        self.left -= sum(sizes)
        return self._memory.spend(sizes)

    def revoke(self) -> None:
        """Ask for what is left."""
        if self.left and not self._revoked:
            self._revoked = True
            self._say(0)

    def on_revoked(self) -> None:
        """Take what is left, as the other end will not use it. Raises `ValueError` unasked."""
        if not self._revoked:
            raise ValueError("credit is returned that was not asked back")
        self._revoked = False
        self.close()

    def tick(self) -> None:
        """Ask for what was not used for a while."""
        if liveness.now() - self._used_at > IDLE_SECONDS:
            self.revoke()

    def close(self) -> None:
        """Give back what is left: the other end cannot use it any more."""
        left, self.left = self.left, 0
        self._memory.give_back(left, self.revoke)
