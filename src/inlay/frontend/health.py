"""Whether it lives, whether it is ready, what it counts."""

import msgspec

import inlay
from inlay.errors import OverloadedError
from inlay.frontend import metrics
from inlay.frontend.lifeline import shutting_down
from inlay.frontend.server import Call
from inlay.router.router import ASLEEP_RETRY_AFTER

_TEXT = (b"content-type", metrics.CONTENT_TYPE)


class Status(msgspec.Struct, frozen=True):
    """The answer of the probes."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """The answer of `/version`."""

    version: str


async def live(call: Call) -> None:
    """The process answers."""
    await call.json(Status("live"))


async def ready(call: Call) -> None:
    """A request for some model would be taken: a worker is ready and awake, and the server does not drain."""
    if call.server.inflight.draining:
        raise shutting_down()
    router = call.server.router
    workers = router.ready()
    if not workers:
        raise router.unready()
    if all(worker.card.asleep for worker in workers):
        raise OverloadedError("all workers are asleep", retry_after=ASLEEP_RETRY_AFTER)
    await call.json(Status("ready"))


async def version(call: Call) -> None:
    """Inlay's version."""
    await call.json(Version(inlay.__version__))


async def exposition(call: Call) -> None:
    """Everything counted, in Prometheus' text format."""
    await call.server.engines.refresh()
    await call.bytes(call.server.metrics.exposition(), _TEXT)
