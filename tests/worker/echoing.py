"""An echo engine that takes adapters, strictly.

It fails when told to, and whenever its worker asks for what it must not.
"""

from inlay.base.errors import EngineError, InvalidRequestError, NotFoundError
from inlay.engine.echo import EchoEngine
from inlay.messages.card import Adapter
from inlay.messages.request import Emit, Request


class AdaptingEcho(EchoEngine):
    """`AdapterEngine` without any weights.

    Attributes:
        held: adapters by the name the worker gives them.
        failing: names of methods that fail once.
        leaves_traces: a load that fails has put the adapter in all the same.
    """

    held: dict[str, Adapter]
    failing: set[str]
    leaves_traces: bool = False

    async def start(self) -> None:
        await super().start()
        self.held = {}
        self.failing = set()
        self.loads = 0

    async def load_adapter(self, adapter: Adapter, directory: str) -> None:
        self.loads += 1
        if adapter.name in self.held:
            raise AssertionError(f"{adapter.name} is there already")
        if self.leaves_traces:
            self.held[adapter.name] = adapter
        self._fail("load_adapter")
        if "refuses" in self.failing:
            self.failing.remove("refuses")
            raise InvalidRequestError("it does not fit")
        if len(self.held) > self._settings.cpu_loras + self.leaves_traces:
            raise InvalidRequestError("no room")
        self.held[adapter.name] = adapter

    async def unload_adapter(self, name: str) -> None:
        if name not in self.held:
            raise NotFoundError(f"no adapter {name}")
        if any(running.request.adapter == name for running in self._shell):
            raise AssertionError(f"{name} is in use")
        self._fail("unload_adapter")
        del self.held[name]

    def submit(self, request: Request, emit: Emit) -> None:
        if request.adapter is not None and request.adapter not in self.held:
            raise AssertionError(f"{request.adapter} is not there")
        super().submit(request, emit)

    def _fail(self, what: str) -> None:
        if what in self.failing:
            self.failing.remove(what)
            raise EngineError(f"{what} failed")
