"""`Lookahead`: how far the engine computes ahead of what the host has read."""

from inlay.engine.torch.in_flight_step import InFlightStep
from inlay.engine.torch.speculation import Speculator


class Lookahead:
    """Which launched step is read now: this one, or with overlap the one before.

    Depth 0 and no drafts: one token at a time. Depth 1: the device computes a step while the host
    reads the last. With drafts the depth is 0, as they follow from what was read.

    Attributes:
        depth: launched steps that may stay unread, 0 or 1.
        speculator: drafts tokens, or None.
        unread: the launched step that is read next, or None.
    """

    def __init__(self, *, overlap: bool, speculator: Speculator | None = None) -> None:
        self.depth = int(overlap and speculator is None)
        self.speculator = speculator
        self.unread: InFlightStep | None = None

    def push(self, flight: InFlightStep | None) -> InFlightStep | None:
        """Take a launched step, or None if none was; return the one to read now, or None."""
        if not self.depth:
            return flight
        done, self.unread = self.unread, flight
        return done
