"""The part of a worker that stages need: payloads that are kept, and inputs that are fetched."""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Protocol, runtime_checkable

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.api import Engine
from inlay.messages.request import Emit, Request, Task
from inlay.worker.host import guarded
from inlay.worker.part import Handle, HostAccess
from inlay_stages.cards import StageCard
from inlay_stages.worker.input_fetcher import InputFetcher
from inlay_stages.worker.input_stream import InputStream
from inlay_stages.worker.payload_store import PayloadStore

log = logging.getLogger(__name__)


@runtime_checkable
class FedEngine(Engine, Protocol):
    """An engine that takes inputs of a request while it runs."""

    def submit_fed(self, request: Request, emit: Emit, inflow: InputStream) -> None:
        """As `submit`, of a request whose inputs come by `inflow`."""


@runtime_checkable
class PausingEngine(Protocol):
    """An engine that can wait with a request while others go on."""

    def pause(self, request_id: str, paused: bool) -> None:
        """Compute nothing more for a request beyond the step that runs, or go on with it.

        Unknown ids are ignored. It may be aborted, and its deadline passes, as of any other.
        """


class StagePart:
    """As `inlay.worker.part.WorkerPart`.

    Attributes:
        held: payloads that are kept for others.
        leased: fetches those that others keep; None where the worker asks no others.
    """

    def __init__(self, host: HostAccess) -> None:
        self._host = host
        self.held = PayloadStore(host.engine.abort, self._pause)
        self.leased = None if host.peers is None else InputFetcher(host.peers, self._admit)
        self.handlers: Mapping[Task, Handle] = {Task.FETCH: self.held.answer}

    def begin(self, request: Request, emit: Emit) -> None:
        address = self._host.address()
        if request.hold is not None and address is not None:
            emit = self.held.keep(request, request.hold, emit, address)
        if not request.feeds:
            self._admit(request, emit)
        elif self.leased is not None:
            guarded(self.leased.fetch, request, emit)
        else:
            emit(request.end("error", EngineError("this worker asks no others for inputs")))

    @property
    def takes_rows(self) -> bool:
        """As `WorkerPart`: hidden states of another stage are rows."""
        stage = self._host.stage
        return isinstance(stage, StageCard) and stage.graph.fed_on(stage.name) == "hidden"

    def abort(self, request_id: str) -> None:
        try:
            if self.leased is not None:
                self.leased.abort(request_id)
        finally:
            self.held.release(request_id)

    def stats(self) -> Mapping[str, int]:
        return {
            "leases": self.held.num_leases,
            "held_payloads": len(self.held),
            "held_bytes": self.held.num_bytes,
            "fetched_payloads": 0 if self.leased is None else self.leased.fetched,
        }

    @property
    def num_open(self) -> int:
        return self.held.num_made

    def _admit(self, request: Request, emit: Emit, inflow: InputStream | None = None) -> None:
        submit = None if inflow is None else partial(self._submit_fed, inflow=inflow)
        self._host.admit(request, emit, submit)

    def _submit_fed(self, request: Request, emit: Emit, inflow: InputStream) -> None:
        if not isinstance(self._host.engine, FedEngine):
            raise InvalidRequestError("this worker's engine takes no inputs while it runs")
        self._host.engine.submit_fed(request, emit, inflow)

    def _pause(self, request_id: str, paused: bool) -> None:
        engine = self._host.engine
        if isinstance(engine, PausingEngine):
            try:
                engine.pause(request_id, paused)
            except Exception:
                # It is called from what the engine, or another request, is at: those go on.
                log.exception("request %s could not be paused or go on", request_id)
                asyncio.get_running_loop().call_soon(engine.abort, request_id)
