"""Sends one request."""

from random import Random

from inlay.messages.request import Request
from inlay.messages.routing import WorkerLoad
from inlay.router import Router
from inlay.transport.api import Stream

IDLE = WorkerLoad()


async def send(
    router: Router, request: Request, name: str = "m", *, session: str | None = None
) -> Stream:
    """The stream of a request to a model."""
    (stream,) = await router.send(name, [request], session=session)
    return stream


class First(Random):
    """Takes the first of several that are alike."""

    def random(self) -> float:
        """The least there is."""
        return 0.0

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """The first."""
        return 0
