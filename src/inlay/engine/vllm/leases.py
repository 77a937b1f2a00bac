"""Leases of blocks that another vLLM keeps, and the question whether a read ended in time.

vLLM frees blocks when their lease ends, whoever reads them just then. The one clock that says so is
that of the vLLM that keeps them, so it is asked for the time once a read has ended: if the lease
had not ended by then, the blocks were the prompt's all the while. No clock of this machine counts,
which may have stood still with it. As with a seqlock, the reader validates afterwards.

vLLM's NixlConnector tells its clock to whoever asks for its metadata; every decode worker does when
it first meets a prefill worker. No vLLM here.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec
import zmq

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Most that the other vLLM takes to tell its clock: as long as vLLM waits for its metadata."""
_QUESTION = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))
"""VLLM's question for the metadata of the first rank."""


class KvLease(NamedTuple):
    """A lease of the blocks of a prompt.

    Attributes:
        engine_id: of the vLLM that keeps them.
        address: where it answers, as ZeroMQ writes it.
        until: end of the lease, in seconds of that vLLM's monotonic clock.
    """

    engine_id: str
    address: str
    until: float


class Leases:
    """The leases of requests whose blocks are being read. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._reading: dict[str, KvLease] = {}
        self._asked: dict[str, tuple[KvLease, zmq.Socket[bytes], float]] = {}

    def begin(self, request_id: str, lease: KvLease) -> None:
        """Note the lease of blocks that are about to be read."""
        self._reading[request_id] = lease

    def forget(self, request_id: str) -> None:
        """Drop the lease of blocks that could not be read."""
        self._reading.pop(request_id, None)

    def settled(self, read: Collection[str]) -> tuple[set[str], set[str]]:
        """Ask about what has been read by now, and return what was answered. Does not wait.

        Args:
            read: requests whose blocks have all been read since the last call.

        Returns:
            The requests of which it is known since the last call: those whose blocks were read
            before their lease ended, and those of which nobody says so.
        """
        in_time, late = set[str](), set[str]()
        for request_id in read:
            lease = self._reading.pop(request_id, None)
            if lease is None:
                late.add(request_id)
            else:
                self._asked[request_id] = (lease, self._ask(lease.address), self._clock())
        for request_id, (lease, socket, asked) in tuple(self._asked.items()):
            now = _answer(socket, lease.engine_id)
            if now is None and self._clock() - asked < ANSWER_SECONDS:
                continue
            (in_time if now is not None and now < lease.until else late).add(request_id)
            socket.close()
            del self._asked[request_id]
        return in_time, late

    def close(self) -> None:
        """Close what waits for answers."""
        if self._context is not None:
            self._context.destroy(linger=0)

    def _ask(self, address: str) -> "zmq.Socket[bytes]":
        if self._context is None:
            self._context = zmq.Context()
            self._context.setsockopt(zmq.IPV6, 1)
        # One for each question, so that no answer is taken for another's.
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart([b"", _QUESTION], zmq.NOBLOCK)
        return socket


class _Payload(msgspec.Struct):
    agent_metadata_bytes: bytes


class _Agent(msgspec.Struct):
    engine_id: str


def _answer(socket: "zmq.Socket[bytes]", engine_id: str) -> float | None:
    """The clock of the vLLM `engine_id`, if it has answered.

    Another one, started since at the same address, has none of its blocks; what is no answer says
    nothing of them.
    """
    try:
        _, payload, clock = socket.recv_multipart(zmq.NOBLOCK)
        agent = msgspec.msgpack.decode(payload, type=_Payload).agent_metadata_bytes
        if msgspec.msgpack.decode(agent, type=_Agent).engine_id == engine_id:
            return msgspec.msgpack.decode(clock, type=float)
    except zmq.Again:
        return None
    except (ValueError, msgspec.MsgspecError) as error:
        log.warning("what a vLLM at the other end of a read answered is no clock: %s", error)
    return float("inf")
