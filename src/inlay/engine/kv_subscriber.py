"""Subscriber to the events of a `KvPublisher` or of vLLM.

Delivers batches in order and fills gaps from the publisher's replay, or reports them as lost.
"""

import logging
import threading
from collections.abc import Callable

import msgspec
import zmq

from inlay.engine.kv_events import END_OF_REPLAY, SEQUENCE_SIZE, EventBatch, decode

log = logging.getLogger(__name__)

_REPLAY_SECONDS = 5.0
_LOOK_SECONDS = 0.1


class KvSubscriber:
    """A thread that follows one publisher.

    Args:
        endpoint: its publish address; "*" means this machine.
        replay_endpoint: its replay address, if any.
        topic: topic to subscribe to.
        take: called with every batch, in order.
        lost: called if batches are lost for good: a view of the cache must be rebuilt.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        *,
        take: Callable[[EventBatch], None],
        lost: Callable[[], None],
    ) -> None:
        self._take = take
        self._lost = lost
        self._next = 0
        self._closing = threading.Event()
        self._context = zmq.Context()
        # Default of this context's sockets; IPv4 addresses still work.
        self._context.setsockopt(zmq.IPV6, 1)
        self._replay_endpoint = None if replay_endpoint is None else _reached(replay_endpoint)
        self._events = self._context.socket(zmq.SUB)
        self._events.connect(_reached(endpoint))
        self._events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._thread = threading.Thread(target=self._run, name="inlay-kv-subscriber", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._events.poll(int(_LOOK_SECONDS * 1000)):
                continue
            _, number, payload = self._events.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if sequence < self._next - 1 and sequence == 0:
                # The publisher was restarted.
                self._next = 0
                self._lost()
            if sequence > self._next:
                self._catch_up(sequence)
            if sequence >= self._next:
                self._deliver(sequence, payload)

    def _catch_up(self, until: int) -> None:
        """Request the batches from the next expected one up to number `until`."""
        if self._replay_endpoint is not None:
            with self._context.socket(zmq.DEALER) as asked:
                asked.setsockopt(zmq.LINGER, 0)
                asked.connect(self._replay_endpoint)
                asked.send_multipart((b"", self._next.to_bytes(SEQUENCE_SIZE, "big")))
                while self._next < until and asked.poll(int(_REPLAY_SECONDS * 1000)):
                    *_, number, payload = asked.recv_multipart()
                    if number == END_OF_REPLAY:
                        break
                    sequence = int.from_bytes(number, "big")
                    if sequence == self._next and sequence < until:
                        self._deliver(sequence, payload)
                    elif self._next < sequence < until:
                        self._skip(sequence)
                        self._deliver(sequence, payload)
        if self._next < until:
            self._skip(until)

    def _skip(self, sequence: int) -> None:
        log.warning("%d batches of KV events are lost", sequence - self._next)
        self._next = sequence
        self._lost()

    def _deliver(self, sequence: int, payload: bytes) -> None:
        self._next = sequence + 1
        try:
            batch = decode(payload)
        except msgspec.DecodeError as error:
            log.warning("a batch of KV events cannot be read: %s", error)
            self._lost()
            return
        self._take(batch)


def _reached(endpoint: str) -> str:
    """Replace a publisher's wildcard address by an address of this machine."""
    return endpoint.replace("*", "127.0.0.1").replace("//[::]:", "//[::1]:")
