"""Tickets: a prompt's keys and values in a prefill worker's vLLM, for a decode worker's vLLM.

vLLM's NixlConnector names blocks by their place alone and believes what it is told: a word too few
ends an engine, and the blocks of another prompt are taken for this one's. So a prefill worker puts
what its vLLM says into a ticket with a keyed checksum, bound to the prompt and to the form of the
blocks, and a decode worker gives its vLLM nothing but a ticket that it has checked. No vLLM here.
"""

import time
from collections.abc import Callable, Mapping
from hmac import compare_digest
from typing import Any, TypeAlias

import msgspec
from blake3 import blake3

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret, prompt_digest, root_digest
from inlay.messages.prompt import Buffer
from inlay.messages.request import PORTS, Payload, Request, Task

LEASE_SECONDS = 30
"""Seconds for which vLLM keeps blocks for a decode worker; one whose vLLM has the request and waits
renews it."""
ADMISSION_SECONDS = LEASE_SECONDS / 2
"""Seconds after which a ticket is not used any more, wherever it spent them."""
TO_KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
"""Parameters with which vLLM keeps a prompt's blocks."""
_MAC = 32

Ranks: TypeAlias = tuple[int, int, int]
"""Processes that share a layer, the positions of a layer, and the layers."""


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place of a prompt's keys and values.

    Attributes:
        layout: `ModelCard.kv_layout` of the prefill worker.
        prompt: digest of the prompt, its adapter and its salt.
        num_positions: of the prompt.
        block_ids: of its blocks, in order.
        engine_id: of the vLLM that has them.
        request_id: vLLM's, of the request that computed them.
        host: where vLLM answers others' questions.
        port: of it.
        made_at: Unix time by the prefill worker's clock.
        until: end of vLLM's lease by its own monotonic clock, in seconds.
    """

    layout: str
    prompt: bytes
    num_positions: int
    block_ids: tuple[int, ...]
    engine_id: str
    request_id: str
    host: str
    port: int
    made_at: float
    until: float

    def parameters(self, ranks: Ranks) -> dict[str, Any]:
        """The parameters for vLLM, where `ranks` are those of both workers."""
        tp_size, dcp_size, pp_size = ranks
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(self.block_ids)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_num_tokens": self.num_positions,
            "remote_blocks_expiry_time": self.until,
            "tp_size": tp_size,
            "dcp_size": dcp_size,
            "pp_size": pp_size,
        }


class _BlockReport(msgspec.Struct, frozen=True):
    """Statements of vLLM about the blocks it keeps; its further fields are not needed."""

    remote_block_ids: tuple[tuple[int, ...]]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    dcp_size: int
    pp_size: int
    remote_num_tokens: int
    remote_blocks_expiry_time: float


class TicketOffice:
    """Makes tickets for what its vLLM keeps, and checks those of others."""

    def __init__(
        self,
        secret: Secret,
        card: ModelCard,
        engine_id: str,
        ranks: Ranks,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ranks = ranks
        self._clock = clock
        self._secret = secret
        self._card = card
        self._engine_id = engine_id

    def payload(self, request: Request, adapter: str | None, said: Mapping[str, Any]) -> Payload:
        """Make the ticket for a prompt that vLLM has computed.

        Args:
            request: that was computed.
            adapter: content id of its adapter, or None.
            said: vLLM's parameters of it.

        Raises:
            EngineError: vLLM says something else than it should.
        """
        try:
            kept = msgspec.convert(said, _BlockReport, strict=True)
        except msgspec.ValidationError as error:
            raise EngineError(f"vLLM's parameters of kept blocks are unknown: {error}") from error
        length = len(request.prompt)
        ids = kept.remote_block_ids[0]
        if (
            kept.remote_num_tokens != length
            or len(ids) != self._num_blocks(length)
            or not all(0 <= id_ < self._card.num_blocks for id_ in ids)
            or (kept.tp_size, kept.dcp_size, kept.pp_size) != self.ranks
            or kept.remote_engine_id != self._engine_id
        ):
            raise EngineError(
                f"vLLM keeps {len(ids)} blocks of {kept.remote_num_tokens} positions for a prompt "
                f"of {length}"
            )
        ticket = Ticket(
            self._card.kv_layout,
            self._digest(request, adapter),
            length,
            ids,
            kept.remote_engine_id,
            kept.remote_request_id,
            kept.remote_host,
            kept.remote_port,
            self._clock(),
            kept.remote_blocks_expiry_time,
        )
        body = msgspec.msgpack.encode(ticket)
        data = self._mac(body) + body
        return Payload(PORTS[Task.GENERATE], "uint8", (len(data),), Buffer(data))

    def opened(self, sealed: bytes) -> Ticket:
        """Read a ticket. Raises `InvalidRequestError` for one that no worker here has made."""
        mac, body = sealed[:_MAC], sealed[_MAC:]
        if not compare_digest(mac, self._mac(body)):
            raise InvalidRequestError("the ticket for keys and values was not made in this fleet")
        try:
            return msgspec.msgpack.decode(body, type=Ticket)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(f"the ticket for keys and values: {error}") from error

    def refused(self, ticket: Ticket, request: Request, adapter: str | None) -> str | None:
        """Return how a ticket's keys and values differ from a request's; None if they do not."""
        if ticket.layout != self._card.kv_layout:
            return f"they are of the form {ticket.layout}, here it is {self._card.kv_layout}"
        if ticket.prompt != self._digest(request, adapter) or request.prior_output:
            return "they are of another prompt"
        if len(ticket.block_ids) != self._num_blocks(len(request.prompt)):
            return (
                f"{len(ticket.block_ids)} blocks cannot be those of {len(request.prompt)} positions"
            )
        return self.late(ticket)

    def late(self, ticket: Ticket) -> str | None:
        """Return why the blocks of a ticket may be another prompt's before they are read, or None.

        Clocks of machines differ: this spares a read that may be in vain, no more.
        """
        age = self._clock() - ticket.made_at
        if age > ADMISSION_SECONDS:
            return f"they have been kept for {age:.0f} s, allowed are {ADMISSION_SECONDS:.0f}"
        return None

    def is_own(self, ticket: Ticket) -> bool:
        """True if this worker's vLLM has the keys and values itself."""
        return ticket.engine_id == self._engine_id

    def _num_blocks(self, length: int) -> int:
        return -(-length // self._card.block_size)

    def _digest(self, request: Request, adapter: str | None) -> bytes:
        card = self._card
        root = root_digest(
            self._secret,
            weights_id=card.weights_id,
            dtype=card.dtype,
            adapter=adapter,
            salt=request.salt,
        )
        return prompt_digest(request.prompt, root, self._secret)

    def _mac(self, body: bytes) -> bytes:
        return blake3(body, key=self._secret.tickets).digest(_MAC)
