"""Sends one request."""

from random import Random

from inlay.protocol.routing import WorkerLoad
from inlay.protocol.work import Request, Stream
from inlay.router import Router

IDLE = WorkerLoad()


async def send(router: Router, request: Request, name: str = "m", *, session: str | None = None) -> Stream:
    """The stream of a request to a model."""
    (stream,) = await router.send(name, [request], session=session)
    return stream


class First(Random):
    """Takes the first of several that are alike."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """The first."""
        return 0
