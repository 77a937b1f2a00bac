"""Sends one work."""

from random import Random

from inlay.protocol.routing import WorkerLoad
from inlay.protocol.work import Stream, Work
from inlay.router import Router

IDLE = WorkerLoad()


async def send(router: Router, work: Work, name: str = "m", *, session: str | None = None) -> Stream:
    """The stream of a work to a model."""
    (stream,) = await router.send(name, [work], session=session)
    return stream


class First(Random):
    """Takes the first of several that are alike."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """The first."""
        return 0
