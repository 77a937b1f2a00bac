"""Whether it lives, whether it is ready, what it counts."""

import msgspec

import inlay
from inlay.errors import OverloadedError
from inlay.frontend.metrics import frontend as metrics
from inlay.frontend.metrics.engine_health import combined_status, health_of
from inlay.frontend.request_scope import shutting_down
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
    """A request for some model would be taken.

    The server does not drain, and a worker is ready, awake and well.
    """
    if call.server.inflight.draining:
        raise shutting_down()
    router = call.server.router
    cut_off = router.unreachable()
    if cut_off is not None:
        raise OverloadedError(cut_off, retry_after=1)
    found = [health_of(worker) for worker in router.ready()]
    if not found:
        raise router.unready()
    if all(worker.state == "asleep" for worker in found):
        raise OverloadedError("all workers are asleep", retry_after=ASLEEP_RETRY_AFTER)
    if not any(worker.well and worker.state != "asleep" for worker in found):
        said = "; ".join(worker.reason for worker in found)
        raise OverloadedError(f"no worker is well: {said}", retry_after=1)
    await call.json(Status("ready"))


async def health(call: Call) -> None:
    """How every worker's engine was when it was last tried.

    503 when a model has none that is well.
    """
    router = call.server.router
    cut_off = router.unreachable()
    if cut_off is None:
        found = combined_status(router.models(), router.ready(), router.unavailable())
    else:
        found = combined_status(router.models(), [], {**router.unavailable(), "NATS": cut_off})
    await call.json(found, OverloadedError.status if found.error is not None else 200)


async def version(call: Call) -> None:
    """Inlay's version."""
    await call.json(Version(inlay.__version__))


async def exposition(call: Call) -> None:
    """Everything counted, in Prometheus' text format."""
    await call.server.engines.refresh()
    await call.bytes(call.server.metrics.exposition(), _TEXT)
