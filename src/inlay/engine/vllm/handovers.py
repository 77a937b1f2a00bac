"""Prompts that this vLLM computes for others of its fleet, and that others compute for it.

On the event loop; no vLLM is imported.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from inlay.base.errors import EngineError
from inlay.engine.vllm.adapters import VllmAdapters
from inlay.engine.vllm.request_tracker import VllmRequestTracker
from inlay.engine.vllm.tickets import TO_KEEP, Ticket, TicketOffice
from inlay.messages.request import Request

log = logging.getLogger(__name__)

_PAUSES = (0.0, 0.1, 0.5)
"""Seconds before each try to end a lease: vLLM's workers know of it with the next step."""
_FIRST_PAUSES = (0.0, 0.2, 1.0, 5.0)
"""Seconds before each notice to a vLLM that this one has not met: it greets it with the first, and
an idle one sends what waits for that with its next step, which another notice makes."""
_MOST_MET = 1024
"""Prefill workers that are remembered as met; forgotten all at once, as each start is a new one."""


class Handovers:
    """The tickets of a vLLM's requests."""

    def __init__(
        self,
        llm: Any,
        office: TicketOffice | None,
        adapters: VllmAdapters,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._llm = llm
        self._office = office
        self._adapters = adapters
        self._spawn = spawn
        self._met: set[str] = set()

    def opened(self, request: Request) -> Ticket | None:
        """The ticket that came with a request, if its keys and values are to be fetched.

        Those that are not wanted are told so where they are.

        Raises:
            InvalidRequestError: it was not made in this fleet.
        """
        office = self._office
        if office is None or not request.ticket:
            return None
        ticket = office.opened(request.ticket)
        if office.is_own(ticket):
            self.let_go(ticket.request_id.rpartition("-")[0])
            return None
        reason = office.refused(ticket, request, self._adapters.content_id(request.adapter))
        if reason is not None:
            log.warning("request %s is computed here: %s", request.id, reason)
            self.refuse(ticket, request)
            return None
        return ticket

    def extra_args(self, follower: VllmRequestTracker) -> dict[str, Any] | None:
        """Further arguments of a request that vLLM is given now."""
        if follower.request.gives_ticket and self._office is not None:
            return {"kv_transfer_params": dict(TO_KEEP)}
        ticket = follower.ticket
        if ticket is None or self._office is None:
            return None
        late = self._office.late(ticket)
        if late is not None:
            # They may have been given up there. vLLM would take whatever is in their place now.
            log.warning("request %s is computed here: %s", follower.request.id, late)
            follower.ticket = None
            self.refuse(ticket, follower.request)
            return None
        return {"kv_transfer_params": ticket.parameters(self._ranks)}

    def finished(self, follower: VllmRequestTracker, output: Any) -> None:
        """Make the ticket of a prompt that vLLM has computed for another worker."""
        request = follower.request
        if self._office is None or not request.gives_ticket or output.kv_transfer_params is None:
            return
        adapter = self._adapters.content_id(request.adapter)
        try:
            payload = self._office.payload(request, adapter, output.kv_transfer_params)
        except EngineError as error:
            log.warning("request %s is not handed over: %s", request.id, error.message)
            return
        follower.payloads = (payload,)

    def ended(self, follower: VllmRequestTracker) -> None:
        """Give back what a request has kept, here or elsewhere, and nobody will use."""
        if self._office and follower.request.gives_ticket and not follower.payloads:
            self.let_go(follower.request_id)
        ticket, follower.ticket = follower.ticket, None
        if ticket is not None:
            self.refuse(ticket, follower.request)

    def refuse(self, ticket: Ticket | None, request: Request) -> None:
        """Tell the prefill worker's vLLM that nobody comes for what it keeps."""
        if ticket is not None:
            self._spawn(self._refuse(ticket, request))

    async def _refuse(self, ticket: Ticket, request: Request) -> None:
        pauses = (0.0,) if ticket.engine_id in self._met else _FIRST_PAUSES
        try:
            for number, pause in enumerate(pauses):
                await asyncio.sleep(pause)
                await self._llm.notify_kv_transfer_request_rejected(
                    f"{request.id}.refused{number}.{ticket.request_id}",
                    ticket.parameters(self._ranks),
                )
            if len(self._met) == _MOST_MET:
                self._met.clear()
            self._met.add(ticket.engine_id)
        except Exception:
            log.warning("a prefill worker keeps blocks until their lease ends", exc_info=True)

    def let_go(self, name: str) -> None:
        """Free what vLLM keeps of the request that it was given by this name."""
        self._spawn(self._let_go(name))

    async def _let_go(self, name: str) -> None:
        try:
            for pause in _PAUSES:
                await asyncio.sleep(pause)
                if any(await self._llm.collective_rpc("let_go", args=(name,))):
                    return
        except Exception:
            log.warning("blocks of %s are kept until their lease ends", name, exc_info=True)

    @property
    def _ranks(self) -> tuple[int, int, int]:
        if self._office is None:
            raise EngineError("this worker has no tickets")
        return self._office.ranks
