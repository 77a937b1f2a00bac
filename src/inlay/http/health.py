"""Probes (`/live`, `/ready`, `/health`), `/version` and `/metrics`."""

from collections.abc import Sequence

import msgspec

import inlay
from inlay.card import ModelCard
from inlay.errors import OverloadedError
from inlay.http.metrics import requests as metrics
from inlay.http.metrics.engine_health import combined_status, health_of
from inlay.http.request_scope import shutting_down
from inlay.http.server import Call
from inlay.router.router import ASLEEP_RETRY_AFTER

_TEXT = (b"content-type", metrics.CONTENT_TYPE)


class Status(msgspec.Struct, frozen=True):
    """Response of the probes."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """Response of `/version`."""

    version: str


async def live(call: Call) -> None:
    """Answer that the process is alive."""
    await call.json(Status("live"))


async def ready(call: Call) -> None:
    """Answer 200 if a request for some model would be accepted, else raise `OverloadedError`.

    That is so if the server does not drain, and a worker is ready, awake and healthy; of a
    pipeline, if every stage has one that is ready.
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
    lacking = _lacking([worker.card for worker in router.asked()])
    if lacking:
        raise OverloadedError(f"no pipeline has all its stages: {lacking}", retry_after=1)
    await call.json(Status("ready"))


def _lacking(cards: Sequence[ModelCard]) -> str:
    """Return the stages that pipelines lack; empty where some model or pipeline is whole."""
    served = {card.name for card in cards}
    found = set()
    for card in cards:
        missing = [] if card.stage is None else card.stage.graph.missing(served)
        if card.stage is None or not missing:
            return ""
        found.add(f"{card.stage.graph.name} lacks {', '.join(missing)}")
    return "; ".join(sorted(found))


async def health(call: Call) -> None:
    """Answer with the last probe of every worker's engine; 503 if a model has no healthy worker."""
    router = call.server.router
    cut_off = router.unreachable()
    if cut_off is None:
        found = combined_status(router.models(), router.ready(), router.unavailable())
    else:
        found = combined_status(router.models(), [], {**router.unavailable(), "NATS": cut_off})
    await call.json(found, OverloadedError.status if found.error is not None else 200)


async def version(call: Call) -> None:
    """Answer with inlay's version."""
    await call.json(Version(inlay.__version__))


async def exposition(call: Call) -> None:
    """Answer with all metrics in Prometheus' text format."""
    await call.server.engines.refresh()
    await call.bytes(call.server.metrics.exposition(), _TEXT)
